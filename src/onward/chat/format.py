"""`MessageFormat`: the syntax of reasoning and calls of a model family."""

import re
import string
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from onward.chat.source import MessageBuilder, Reading, TextReader

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
    openers: marks that begin a call anywhere in an answer. No opener may be a prefix of another.
    bare: whether an answer may also begin with a call without an opener, which is then a JSON object.
    syntax: the syntax of constrained calls; None if calls cannot be constrained.
    marks: other marks in calls. Marks may be special tokens, which are not in the text; they are parsed the same way.
    """

    name: ClassVar[str]
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    after_thinking: ClassVar[str] = ""
    before_content: ClassVar[str] = ""
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
        if not (yield from source.skip(opening)) and not thinking:
            source.rewind()
            return
        source.forget()
        if (yield from source.until([closing], message.reasoning.add)) is not None:
            message.content.mark()

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
