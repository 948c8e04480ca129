"""The options of a chat, as /set shows and changes them."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from onward.cli.template import as_json_or_text
from onward.errors import RequestError
from onward.option_names import check_option_names

if TYPE_CHECKING:
    from onward.cli.session import ChatSession

# Options of several texts, of reports, and those that only code can give well.
_NOT_OF_A_CHAT = {
    *("n", "beams", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs"),
    *("draft", "stop_when", "cancel", "logit_bias"),
    *("json_schema", "regex", "grammar", "choice", "constraint"),
}
_ALWAYS_SHOWN = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed")
_OF_TEXTS = ("stop", "bad_words")
# What stands for the model's own value.
_DEFAULT = ("-", "default")


def change(session: "ChatSession", name: str, text: str) -> str:
    """Set an option or a variable of the chat template; returns what it is now.

    Raises:
        RequestError: an unknown name, or a value outside its range; nothing is changed.
    """
    name = _known(session, name)
    value = text if name in _OF_TEXTS and not text.startswith("[") else as_json_or_text(name, text)
    if name in _names():
        options = {key: old for key, old in session.options.items() if key != name}
        if text not in _DEFAULT:
            options[name] = value
        session.lm.defaults.replace(**options)  # which checks them
        session.options = options
    elif text in _DEFAULT:
        session.variables.pop(name, None)
    else:
        session.variables[name] = value
    return show_one(session, name)


def show_one(session: "ChatSession", name: str) -> str:
    """One option with its value.

    Raises:
        RequestError: an unknown name.
    """
    name = _known(session, name)
    value = _values(session).get(name, "as the chat template has it")
    return f"{name} {value}"


def show_all(session: "ChatSession") -> str:
    """A line for each option that changes an answer, and the names of the others."""
    values, names = _values(session), _names()
    neutral = {name: _shown(name, default) for name, default in names.items()}
    lines = {
        name: value
        for name, value in values.items()
        if name in _ALWAYS_SHOWN or name in session.options or value != neutral.get(name)
    }
    others = [name for name in (*names, *sorted(_variables(session))) if name not in lines]
    width = max(map(len, lines)) + 2
    rows = [f"  {name:<{width}}{value}" for name, value in lines.items()]
    return "\n".join([*rows, f"  {'others':<{width}}{', '.join(others)}"])


def _known(session: "ChatSession", name: str) -> str:
    name = name.replace("-", "_")
    known = [*_names(), *sorted(_variables(session))]
    if name in _NOT_OF_A_CHAT:
        raise RequestError(f"{name} is no option of a chat; those are {', '.join(known)}")
    check_option_names([name], known)
    return name


def _names() -> dict[str, Any]:
    """The options of a chat with the values that they have without a checkpoint's."""
    from onward import GenerateOptions

    neutral = GenerateOptions()
    names = [field.name for field in dataclasses.fields(neutral) if field.name not in _NOT_OF_A_CHAT]
    return {name: getattr(neutral, name) for name in names}


def _variables(session: "ChatSession") -> frozenset[str]:
    template = session.lm.chat_template
    return frozenset() if template is None else template.variables - set(_names())


def _values(session: "ChatSession") -> dict[str, str]:
    """As they hold for the next answer."""
    options = session.lm.defaults.replace(**session.options)
    values = {name: _shown(name, getattr(options, name)) for name in _names()}
    if session.options.get("max_new_tokens") is None:
        values["max_new_tokens"] = "what is left of the context"
    return values | {name: json.dumps(value, ensure_ascii=False) for name, value in session.variables.items()}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "a fresh one each time" if name == "seed" else "none"
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False) if value else "none"
    return json.dumps(value)
