"""Variables of a chat template, as a command line gives them."""

import json
from typing import TYPE_CHECKING, Any

from onward.cli.flags import TemplateFlags
from onward.errors import RequestError, TokenizerError
from onward.reprs import brief
from onward.text_input import TextError, parse_request_json

if TYPE_CHECKING:
    from onward import LanguageModel

# What templates call it whether the model thinks before it answers.
_THINKING = ("enable_thinking", "thinking")


def template_variables(flags: TemplateFlags, lm: "LanguageModel", model: str) -> dict[str, Any]:
    """The variables that the flags give, which the template reads. model: its name, for people.

    Raises:
        TokenizerError: there is no chat template. RequestError: it does not read one of them.
    """
    if lm.chat_template is None:
        raise TokenizerError(f"{model} has no chat template: use `onward generate` with a plain prompt")
    names = lm.chat_template.variables
    known = f"it reads {', '.join(sorted(names))}" if names else "it reads none"
    variables: dict[str, Any] = {}
    for text in flags.template_option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"--template-option wants NAME=VALUE, such as enable_thinking=false; got {text!r}")
        if name not in names:
            raise RequestError(f"the chat template of {model} has no variable {name!r}: {known}")
        variables[name] = as_json_or_text(name, value)
    if flags.thinking is not None:
        switch = next((name for name in _THINKING if name in names), None)
        if switch is None:
            flag = "--thinking" if flags.thinking else "--no-thinking"
            raise RequestError(f"the chat template of {model} has no switch for thinking, {flag} is for: {known}")
        variables[switch] = flags.thinking
    return variables


def as_json_or_text(name: str, value: str) -> Any:
    """Parse a value as JSON (a number, true, false, null, a list, an object); what is not JSON is text.

    Raises:
        RequestError: JSON that no request can hold, with the name.
    """
    try:
        return parse_request_json(value)
    except TextError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            return value
        raise RequestError(f"{name} cannot be {brief(value)}: {error}") from error
