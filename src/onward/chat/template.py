"""Render messages as a prompt with the checkpoint's own Jinja template, in a sandbox.

The environment offers what Hugging Face templates expect: trimmed blocks, `break` and `continue`, `tojson` that keeps
characters as they are, `raise_exception`, `strftime_now`, `tools` and `documents` that are none unless given, and the
`generation` block (which marks the answer for training and changes nothing here). The time is an argument; neither the
locale nor the time zone of the machine changes how it is written. A template is a stranger's program: it gets copies of
plain JSON values, and `onward.chat.template_sandbox` limits its access and its work.
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
from onward.errors import RequestError, TokenizerError, one_line
from onward.util.text import described
from onward.util.text_input import check_value

# Variables that the checkpoint sets, not the chat.
_SPECIAL_TOKENS = frozenset(f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))

# {"role": "user", "content": "…"}, and other keys that a template reads.
Message = Mapping[str, Any]


# Characters. The longest template in use has some 30,000.
_LONGEST = 2**20
_LONGEST_ERROR = 500


class ChatTemplate:
    """A compiled template.

    source: its text. special_tokens: variables of the template, such as {"bos_token": "<s>"}. tool_source: the template
    to use where `tools` are given; None for `source`. A template that cannot be read raises `TokenizerError`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        if (length := max(len(source), len(tool_source or ""))) > _LONGEST:
            raise TokenizerError(f"the chat template has {length} characters, and {_LONGEST} are the most")
        extensions = [LoopControls, _GenerationBlock]
        environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = None  # known, and given with each chat
        environment.meter()
        try:
            with budgeted():
                self._template = environment.from_string(source)
                self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
                sources = [source] if tool_source is None else [source, tool_source]
                names = frozenset().union(*(find_undeclared_variables(environment.parse(each)) for each in sources))
        except Exception as error:  # Jinja's errors, and those of Python's compiler for the code that Jinja writes
            raise TokenizerError(f"the chat template cannot be read: {_brief(error)}") from error
        self._special_tokens = dict(special_tokens)
        self._sources = (source, self._special_tokens, tool_source)
        self._settable = names - {"messages", "strftime_now"} | {"add_generation_prompt"}
        self._variables = frozenset(names - {"messages", "add_generation_prompt", *special_tokens} - _SPECIAL_TOKENS)

    def __repr__(self) -> str:
        return described(self, f"reads {', '.join(sorted(self.variables)) or 'nothing'} beside the messages")

    def __reduce__(self) -> tuple[Any, ...]:
        # What Jinja compiles belongs to this process; a copy compiles the source again.
        return type(self), self._sources

    @property
    def sources(self) -> tuple[str, ...]:
        """The text of the template, and that of the one for tools where it is another."""
        source, _, tool_source = self._sources
        return (source,) if tool_source is None else (source, tool_source)

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads beside the messages and the special tokens: tools, enable_thinking …"""
        return self._variables

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise `RequestError` for a variable that would change nothing: the template does not read it."""
        unread = sorted(
            str(name) for name, value in variables.items() if value is not None and name not in self._settable
        )
        if unread:
            reads = ", ".join(sorted(self.variables)) or "no variables"
            raise RequestError(f"this model's chat template does not read {', '.join(unread)}; it reads {reads}")

    def render(
        self,
        messages: Sequence[Message],
        now: datetime.datetime | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, up to where the answer begins.

        Args:
            messages: each a mapping with a "role" and, usually, a "content"; JSON values throughout.
            now: the time that `strftime_now` writes, in its own time zone; by default the present one in UTC.
            add_generation_prompt: end with what opens the assistant's turn.
            variables: for the template (such as tools, or enable_thinking); JSON values too.

        Raises:
            RequestError: no messages, a message without a role or with nothing else, a value that is not JSON, is
                nested too deep or has a lone surrogate, a time that is no datetime, or messages that the template
                refuses.
            TokenizerError: the template does what the sandbox forbids, or more work than any conversation needs.
        """
        check_value(messages, "messages")
        check_value(variables)
        check_messages(messages)
        if now is not None and not isinstance(now, datetime.datetime):
            raise RequestError(f"now must be a datetime.datetime; got {now!r}")
        time = datetime.datetime.now(datetime.UTC) if now is None else now
        template = self._tool_template if variables.get("tools") else self._template
        context = {"tools": None, "documents": None, **self._special_tokens, **_plain(variables)}
        context |= {"messages": _plain(messages), "add_generation_prompt": add_generation_prompt}
        context["strftime_now"] = _strftime_at(time)
        try:
            with budgeted(context):
                return template.render(context)
        except SecurityError as error:
            raise TokenizerError(f"the chat template does what its sandbox forbids: {_brief(error)}") from error
        except Exception as error:  # whatever a stranger's program may raise
            raise RequestError(f"the chat template refuses these messages: {_brief(error)}") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `RequestError` unless these are messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages must be a list such as [{{'role': 'user', 'content': 'Hi'}}]; got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be a mapping with a 'role'; got {message!r}")
        if len(message) == 1:
            raise RequestError(f"a message must hold a 'content' beside its role; got {message!r}")


# A subclass (an enum, say) has methods of its own; these functions give the bare value.
_BARE: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _plain(value: Any) -> Any:
    """A copy in JSON's own types, since a template may call the methods of its variables."""
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


def _brief(error: BaseException) -> str:
    """An error's message on one line, cut to a length: a template may raise any text."""
    return one_line(error)[:_LONGEST_ERROR]


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
    for piece in encoder.iterencode(value):  # indents can make the text far longer than the value
        budget().spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_at(time: datetime.datetime) -> Callable[[str], str]:
    """A plain function: a template could reach the attributes of a `partial`."""

    def strftime_now(layout: str) -> str:
        if isinstance(layout, str) and len(layout) > _LONGEST_ERROR:
            raise SecurityError(f"a date of {len(layout)} characters")
        return strftime(time, layout)

    return strftime_now


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %}: its content, unchanged, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
# Directives that stand for others in the C locale.
_LAYOUTS = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}
# A flag, E or O for a locale's own digits and eras, and a directive.
_DIRECTIVE = re.compile("%([-_0^#]?)[EO]?(.)", re.DOTALL)


def strftime(time: datetime.datetime, layout: str) -> str:
    """`time.strftime(layout)` in the C locale, whatever the machine's locale and time zone. A time without a zone is
    UTC."""
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
