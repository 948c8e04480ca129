"""`MessageFormat`: the syntax of reasoning and calls of a model family; and the parser of its answers."""

import hashlib
import re
import string
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from onward.chat.custom_input import InputReader
from onward.chat.message import MessageDelta
from onward.chat.source import SPACE, MessageBuilder, Reading, TextReader
from onward.errors import RequestError

_LETTERS = string.ascii_letters + string.digits


class ArgumentSyntax(NamedTuple):
    """The syntax of a separate argument.

    before: text before its name. middle: between its name and value. after: after its value. names: the names that can
    be parsed.
    """

    before: str
    middle: str
    after: str
    names: re.Pattern[str]


class CallSyntax(NamedTuple):
    """The syntax of constrained calls, after their opener.

    before: text before the name of a call. middle: between the name and the arguments. after: after the arguments.
    between: between two calls; None if an answer has at most one. begin: before the first call. end: after the last.
    quoted: whether the name is a JSON string. argument: the syntax of each argument; None if the arguments are one JSON
    object.
    """

    before: str
    middle: str
    after: str
    between: str | None
    begin: str = ""
    end: str = ""
    quoted: bool = False
    argument: ArgumentSyntax | None = None


class MessageFormat(ABC):
    """The syntax of a model family's answers. To add one, write a module and add it to `FORMATS`.

    name: for `message_format=`.
    thinking: the marks around reasoning. after_thinking: the text between reasoning and the rest of the answer.
    before_content: the mark before content, if any.
    has_messages: whether an answer is several messages, each of which may be reasoning.
    openers: marks that begin a call anywhere in an answer. No opener may be a prefix of another.
    bare: whether an answer may also begin with a call without an opener, which is then a JSON object.
    syntax: the syntax of constrained calls; None if calls cannot be constrained.
    marks: other marks in calls. Marks may be special tokens, which are not in the text; they are parsed the same way.
    """

    name: ClassVar[str]
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    after_thinking: ClassVar[str] = ""
    before_content: ClassVar[str] = ""
    has_messages: ClassVar[bool] = False
    openers: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[bool] = False
    syntax: ClassVar[CallSyntax | None] = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks, which may be special tokens."""
        return (*self.thinking, *self.openers, *self.marks)

    def marks_of(self, *, calls: bool) -> tuple[str, ...]:
        """Return the marks to parse in an answer. calls: whether the request has tools."""
        return self.all_marks if calls else self.thinking

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template, as text, belongs to this family."""

    def read(self, source: TextReader, message: MessageBuilder, *, calls: bool, thinking: bool) -> Reading[None]:
        """Read an answer: reasoning, then content and calls.

        calls: whether the request has tools; without them, calls are content. thinking: whether the prompt has already
        opened the reasoning.
        """
        yield from self._read_reasoning(source, message, thinking)
        if calls:
            source.mark()
            if not (yield from self.read_start(source, message)):
                source.rewind()
        openers = self.openers if calls else ()
        while opener := (yield from source.until(openers, message.content.add, is_cut=message.has_calls)):
            source.mark()
            if not (yield from self.read_calls(opener, source, message)):
                if message.has_calls() and source.is_over:  # the text is cut in another call
                    return
                source.rewind()
                message.content.add(opener)

    def _read_reasoning(self, source: TextReader, message: MessageBuilder, thinking: bool) -> Reading[None]:
        """Read reasoning, which is only at the beginning of a message."""
        opening, closing = self.thinking
        source.mark()
        yield from source.skip_space()
        if (yield from source.skip(opening)) or (thinking and not message.continues):
            source.forget()
        else:
            source.rewind()
            if not thinking:
                return
        if (yield from source.until([closing], message.reasoning.add)) is not None:
            message.content.mark()

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """The marks that end reasoning, and any other message."""
        return (self.thinking[1],)

    def begins_reasoning(self, text: str, *, calls: bool) -> bool | None:
        """Whether a message that begins with `text` begins with reasoning; None if that is not clear yet. calls: as in
        `read`."""
        opening, begin = self.thinking[0], text.lstrip(SPACE)
        return begin.startswith(opening) or (None if opening.startswith(begin) else False)

    def end_of_reasoning(self, *, calls: bool) -> str:
        """The text that ends reasoning, up to the rest of the answer. calls: as in `read`."""
        return self.thinking[1] + self.after_thinking + ("" if calls else self.before_content)

    def read_start(self, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        """Read calls without an opener at the beginning of a message; return whether there was one."""
        yield from ()
        return False

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        """Read the calls after `opener`, which is already read; return whether there was one."""
        yield from ()
        return False

    def call_id(self, digest: bytes) -> str:
        """Return the id of a call, from 32 bytes that are unique to it."""
        return f"call_{letters(digest, 24)}"


def letters(digest: bytes, count: int) -> str:
    """Return `count` letters and digits derived from bytes."""
    number, text = int.from_bytes(digest), ""
    for _ in range(count):
        number, digit = divmod(number, len(_LETTERS))
        text += _LETTERS[digit]
    return text


class MessageParser:
    """A streaming parser of one answer.

    Text that may be the beginning of a mark, or of a call whose name is not complete, is held back. If a call's name
    cannot be read, the call is content, including its mark. A call that is cut off later has incomplete arguments.

    format: of the model's messages.
    new_id: returns the id of the call at an index.
    tools: the names of the request's tools, or a mapping from names to JSON schemas of their arguments, from which
        formats without JSON tell strings from numbers; empty if unknown. None: no tools, and calls are content.
    thinking: whether the prompt has already opened the reasoning.
    continues: whether the answer continues a message, whose text the whitespace at its beginning belongs to.
    custom: the names of the tools that are custom, so that their calls have an input.
    """

    def __init__(
        self,
        format: MessageFormat,
        new_id: Callable[[int], str],
        tools: Collection[str] | None = None,
        thinking: bool = False,
        continues: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        self._source = source = TextReader()
        inputs = dict.fromkeys(custom, InputReader)
        self._message = MessageBuilder(new_id, lambda: source.place, tools or (), continues, inputs)
        self._reading = format.read(source, self._message, calls=tools is not None, thinking=thinking)
        next(self._reading, None)

    def feed(self, text: str) -> None:
        if text:
            self._source.add(text)
            next(self._reading, None)

    def finish(self) -> None:
        """End the text, and release the rest of it."""
        self._source.end()
        next(self._reading, None)
        self._message.end_call()
        self._message.content.end()

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """The spans of reasoning in the text, without marks: (begin, end), in order."""
        return self._message.reasoning.spans

    def take(self) -> MessageDelta:
        """Return what was parsed since the last call of `take`."""
        return self._message.take()


class Vocabulary(Protocol):
    """The methods of a tokenizer that find special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


# Names of tools, or names with the JSON schemas of their arguments.
Tools: TypeAlias = tuple[str, ...] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerFormat:
    """How to parse the answer to a request.

    format: of the model's messages. tools: as in `MessageParser`. thinking: True if the prompt ends with open
    reasoning, False if it ends with closed reasoning, None if it has none. marks: ids of special tokens, which are not
    in the text, and their texts. continues: whether the answer is the rest of a message that the prompt begins.
    custom: the names of custom tools.
    """

    format: MessageFormat
    tools: Tools | None = None
    thinking: bool | None = None
    marks: tuple[tuple[int, str], ...] = ()
    continues: bool = False
    custom: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, format: MessageFormat, vocabulary: Vocabulary, prompt: str, tools: Tools | None, continued: str = ""
    ) -> "AnswerFormat":
        """Return how to parse the answer to `prompt`, the text of the conversation. continued: the content of the
        message that the answer continues, if any."""
        texts = format.marks_of(calls=tools is not None)
        marks = tuple((id, text) for text in texts if (id := special_token(vocabulary, text)) is not None)
        if continued:
            opened, closed = map(continued.rfind, format.thinking)
            return cls(format, tools, opened > closed, marks, continues=True)
        opening, closing = (prompt.rstrip().endswith(mark) for mark in format.thinking)
        return cls(format, tools, opening or (False if closing else None), marks)

    def parser(self, prompt: Sequence[int], seed: int | None) -> MessageParser:
        """Return a parser for one text. The ids of its calls are derived from the prompt and the seed."""

        def new_id(index: int) -> str:
            digest = hashlib.sha256(array("q", prompt).tobytes() + f"{seed} {index}".encode())
            return self.format.call_id(digest.digest())

        return MessageParser(self.format, new_id, self.tools, self.thinking is True, self.continues, self.custom)


def special_token(vocabulary: Vocabulary, text: str) -> int | None:
    """Return the id of the special token with this text, or None."""
    try:
        ids = vocabulary.encode(text, add_special_tokens=False)
    except RequestError:
        return None  # outside the model's vocabulary
    return ids[0] if len(ids) == 1 and not vocabulary.decode(ids) else None
