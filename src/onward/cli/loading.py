"""Load a model from the flags, and read the variables of its chat template."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, LoadFlags, ModelFlags, TemplateFlags
from onward.cli.inputs import expanded_source
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError, TokenizerError
from onward.util.text import brief
from onward.util.text_input import TextError, parse_request_json

if TYPE_CHECKING:
    from onward.language_model import LanguageModel

# Names of the variable that turns reasoning on, in chat templates that have one.
_THINKING = ("enable_thinking", "thinking")


def load_model(
    flags: ModelFlags, drafting: DraftFlags | None = None, adapting: AdapterFlags | None = None
) -> "LanguageModel":
    """Call `onward.load` with the flags, and show a progress bar."""
    options = load_options(flags, drafting, adapting)
    if flags.threads is not None:
        onward.set_num_threads(flags.threads)
        with waiting("starting …"):
            import torch
        torch.set_num_threads(flags.threads)  # for operators that run in torch
    folder = find(flags.model)
    with waiting(f"loading {flags.model} …") as show:
        return onward.load(folder, progress=show, **options)


def load_options(flags: LoadFlags, drafting: DraftFlags | None, adapting: AdapterFlags | None) -> dict[str, Any]:
    """Return the flags in use as keyword arguments of `onward.load`."""
    options = {name: value for name, value in vars(flags).items() if value is not None}
    for name in ("model", "threads"):
        options.pop(name, None)
    if drafting is not None and drafting.draft is not None:
        options["draft"] = drafting.draft
    options |= {name: expanded_source(str(options[name])) for name in ("name_map", "merge", "draft") if name in options}
    if adapting is not None and (sources := adapting.sources()):
        options["adapters"] = {name: expanded_source(source) for name, source in sources.items()}
    return options


@contextmanager
def importing(needs: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra within the block; raise `RequestError` if one is missing."""
    with waiting("starting …"):
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("onward"):
                raise
            raise RequestError(f"{needs} the package {error.name}: pip install 'onward[{extra}]'") from error


def find(source: str) -> Path:
    """Return the folder of a model source; download it if needed."""
    with waiting("starting …"):
        from onward.checkpoint import find_folder
    # Outside the spinner: the hub client shows its own progress bars.
    return find_folder(expanded_source(source), progress=is_terminal(sys.stderr))


def template_variables(flags: TemplateFlags, lm: "LanguageModel", model: str) -> dict[str, Any]:
    """Return the chat template variables that the flags set. model: its name, for errors."""
    if lm.chat_template is None:
        raise TokenizerError(f"{model} has no chat template: use `onward generate` with a plain prompt")
    names = lm.chat_template.variables
    known = f"it reads {', '.join(sorted(names))}" if names else "it reads none"
    variables: dict[str, Any] = {}
    for text in flags.template_option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"--template-option takes NAME=VALUE, such as enable_thinking=false; got {text!r}")
        if name not in names:
            raise RequestError(f"the chat template of {model} has no variable {name!r}: {known}")
        variables[name] = as_json_or_text(name, value)
    if flags.thinking is not None:
        switch = next((name for name in _THINKING if name in names), None)
        if switch is None:
            flag = "--thinking" if flags.thinking else "--no-thinking"
            raise RequestError(f"{flag}: the chat template of {model} has no switch for thinking; {known}")
        variables[switch] = flags.thinking
    return variables


def as_json_or_text(name: str, value: str) -> Any:
    """Parse a value as JSON, or return it as text if it is not JSON; raise for JSON that is not allowed in requests."""
    try:
        return parse_request_json(value)
    except TextError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            return value
        raise RequestError(f"{name} cannot be {brief(value)}: {error}") from error
