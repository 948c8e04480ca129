"""Render messages as a prompt with a checkpoint's Jinja template, in a sandbox.

The environment has the features that Hugging Face templates expect: trimmed blocks, `break` and `continue`, `tojson`
without escapes, `raise_exception`, `strftime_now`, `tools` and `documents` (none by default), and `generation` blocks,
which only matter for training. The time is an argument, and is formatted independently of the machine's locale and time
zone. Templates are untrusted: they get copies of plain JSON values, and `onward.chat.template_sandbox` limits them.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from onward.chat.template_sandbox import SandboxedEnvironment, budget, budgeted
from onward.errors import OptionError, RequestError, TokenizerError, blaming, one_line
from onward.util.text import brief, described
from onward.util.text_input import check_value

# Variables set by the checkpoint, not by the chat.
_SPECIAL_TOKENS = frozenset(f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))

# Names of the variable that turns reasoning on.
_SWITCHES = ("enable_thinking", "thinking")

# {"role": "user", "content": "…"}, and other keys that a template reads.
Message = Mapping[str, Any]

# Templates with this test write arguments verbatim if they are text.
_TAKES_TEXT = re.compile(r"arguments\s+is\s+string")
# In characters. The longest template in use has about 30,000.
_MAX_LENGTH = 2**20
_MAX_ERROR_LENGTH = 500
# How a prompt ends: keywords of `render`.
PROMPT_ENDINGS = ("add_generation_prompt", "continue_final_message")
# Written after the content of a message to be continued. The space shows whether the template trims the content.
_MESSAGE_END = "ContinuedMessageEndsHere "


class ChatTemplate:
    """A compiled template.

    source: its text. special_tokens: variables of the template, such as {"bos_token": "<s>"}. tool_source: another
    template for chats with `tools`. takes_text: whether it takes the arguments of calls as text. An invalid template
    raises `TokenizerError`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        if (length := max(len(source), len(tool_source or ""))) > _MAX_LENGTH:
            raise TokenizerError(f"the chat template has {length} characters; at most {_MAX_LENGTH} are allowed")
        extensions = [LoopControls, _GenerationBlock]
        environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = None  # defined here, and set for each chat
        environment.meter()
        try:
            with budgeted():
                self._template = environment.from_string(source)
                self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
                sources = [source] if tool_source is None else [source, tool_source]
                names = frozenset().union(*(find_undeclared_variables(environment.parse(each)) for each in sources))
        except Exception as error:  # Jinja's errors, and the compiler's for Jinja's Python code
            raise TokenizerError(f"the chat template cannot be read: {_message(error)}") from error
        self._special_tokens = dict(special_tokens)
        self._sources = (source, self._special_tokens, tool_source)
        self.takes_text = any(map(_TAKES_TEXT.search, sources))
        self._settable = names - {"messages", "strftime_now"} | {*PROMPT_ENDINGS}
        self._variables = frozenset(names - {"messages", *PROMPT_ENDINGS, *special_tokens} - _SPECIAL_TOKENS)

    def __repr__(self) -> str:
        return described(self, f"reads {', '.join(sorted(self.variables)) or 'nothing'} in addition to the messages")

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled templates cannot be pickled; a copy compiles the source again.
        return type(self), self._sources

    @property
    def sources(self) -> tuple[str, ...]:
        """The text of the template, and of the one for tools, if any."""
        source, _, tool_source = self._sources
        return (source,) if tool_source is None else (source, tool_source)

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, except messages and special tokens: tools, enable_thinking, …"""
        return self._variables

    @property
    def thinking_switch(self) -> str | None:
        """The variable that turns reasoning on or off, if the template reads one."""
        return next((name for name in _SWITCHES if name in self._variables), None)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise `RequestError` for variables that the template does not read."""
        unread = sorted(str(name) for name, value in variables.items() if not (value is None or name in self._settable))
        if unread:
            reads = ", ".join(sorted(self.variables)) or "no variables"
            message = f"this model's chat template does not read {', '.join(unread)}; it reads {reads}"
            raise RequestError(message, unread[0])

    def render(
        self,
        messages: Sequence[Message],
        now: datetime.datetime | None = None,
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **variables: Any,
    ) -> str:
        """Render the prompt of a conversation.

        Args:
            messages: mappings with a "role" and, usually, a "content"; all values are JSON.
            now: the time for `strftime_now`, in its own time zone; by default the current time in UTC.
            add_generation_prompt: end with the beginning of the assistant's turn; by default, unless the final message
                is continued.
            continue_final_message: end inside the final message, after its content, so that the model continues it.
            variables: of the template, such as tools or enable_thinking; JSON values.

        Raises:
            RequestError: no messages, a message without a role or with nothing else, a value that is not JSON, is
                nested too deep or has a lone surrogate, a time that is not a datetime, or messages that the template
                rejects.
            TokenizerError: the template does something forbidden, or more work than any conversation needs.
        """
        check_value(messages, "messages")
        check_value(variables)
        check_messages(messages)
        if now is not None and not isinstance(now, datetime.datetime):
            raise OptionError("now", f"must be a datetime.datetime; got {now!r}")
        time = datetime.datetime.now(datetime.UTC) if now is None else now
        template = self._tool_template if variables.get("tools") else self._template
        context = {"tools": None, "documents": None, **self._special_tokens, **_plain(variables)}
        begins = _begins_turn(add_generation_prompt, continue_final_message)
        with blaming("messages"):
            read = _with_end_marked(messages) if continue_final_message else messages
            context |= {"messages": _plain(read), "add_generation_prompt": begins}
        context["strftime_now"] = _strftime_at(time)
        try:
            with budgeted(context):
                text = template.render(context)
        except SecurityError as error:
            raise TokenizerError(f"the chat template does something its sandbox forbids: {_message(error)}") from error
        except Exception as error:  # an untrusted program may raise anything
            raise RequestError(f"the chat template refuses these messages: {_message(error)}", "messages") from error
        return _until_end_mark(text) if continue_final_message else text


def _begins_turn(add_generation_prompt: object, continue_final_message: object) -> bool:
    """Whether a prompt ends with the beginning of a turn. Raises `RequestError`: it is to end in two ways."""
    endings = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in endings.items():
        if not isinstance(value, bool | None):
            raise OptionError(name, f"must be true or false; got {brief(value)}")
    if add_generation_prompt and continue_final_message:
        problem = "cannot be combined with add_generation_prompt, which begins another message: use one of the two"
        raise OptionError("continue_final_message", problem)
    return not continue_final_message if add_generation_prompt is None else bool(add_generation_prompt)


def _with_end_marked(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a mark after the content of the final one."""
    final = messages[-1]
    if not isinstance(content := final.get("content"), str) or final.get("tool_calls"):
        got = "tool calls" if final.get("tool_calls") else f"the content {brief(content)}"
        problem = f"needs a final message with a text as its content, and without tool calls; got {got}"
        raise OptionError("continue_final_message", problem)
    return [*messages[:-1], {**final, "content": content + _MESSAGE_END}]


def _until_end_mark(text: str) -> str:
    """The text before the mark of `_with_end_marked`, trimmed as the template would trim it."""
    before, mark, after = text.rpartition(_MESSAGE_END.rstrip())
    if not mark:
        raise OptionError(
            "continue_final_message", "cannot be used: the chat template does not write the final message"
        )
    return before if after.startswith(" ") else before.rstrip()


def check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        problem = f"must be a list such as [{{'role': 'user', 'content': 'Hi'}}]; got {brief(messages)}"
        raise OptionError("messages", problem)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a mapping with a 'role'; got {brief(message)}", "messages")
        if len(message) == 1:
            raise RequestError(f"a message needs a 'content' in addition to its role; got {brief(message)}", "messages")


# Convert subclasses, such as enums, to plain values without their methods.
_BARE: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _plain(value: Any) -> Any:
    """Copy a value in plain JSON types, because a template may call the methods of its variables."""
    if value is None or isinstance(value, bool):
        return value
    for kind, bare in _BARE.items():
        if isinstance(value, kind):
            return bare(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise RequestError(f"a chat template takes text, numbers, lists and mappings of them; got a {type(value).__name__}")


def _message(error: BaseException) -> str:
    """Return an error's message as one short line: a template may raise any text."""
    return one_line(error)[:_MAX_ERROR_LENGTH]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    pieces = []
    for piece in encoder.iterencode(value):  # indentation can make the text far longer than the value
        budget().spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_at(time: datetime.datetime) -> Callable[[str], str]:
    # A function, not a `partial`: a template could reach its attributes.
    def strftime_now(layout: str) -> str:
        if isinstance(layout, str) and len(layout) > _MAX_ERROR_LENGTH:
            raise SecurityError(f"a date of {len(layout)} characters")
        return strftime(time, layout)

    return strftime_now


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %}: the content in its own scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
# Directives that expand to others in the C locale.
_LAYOUTS = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}
# A flag, an optional E or O for the locale's alternative format, and a directive.
_DIRECTIVE = re.compile("%([-_0^#]?)[EO]?(.)", re.DOTALL)


def strftime(time: datetime.datetime, layout: str) -> str:
    """Return `time.strftime(layout)` in the C locale. A time without a time zone is in UTC."""
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    half = "PM" if time.hour >= 12 else "AM"
    names = {"A": _DAYS[time.weekday()], "B": _MONTHS[time.month - 1], "p": half, "P": half.lower()}
    names |= {"a": names["A"][:3], "b": names["B"][:3], "h": names["B"][:3], "s": str(int(time.timestamp()))}

    def replacement(match: re.Match[str]) -> str:
        flag, directive = match.groups()
        if directive in _LAYOUTS:
            return _DIRECTIVE.sub(replacement, _LAYOUTS[directive])
        name = names.get(directive)
        if name is None:
            return f"%{flag}{directive}"
        return name.upper() if flag in ("^", "#") else name

    return time.strftime(_DIRECTIVE.sub(replacement, layout))
