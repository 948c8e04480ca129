"""`MessageFormat`: how a family of models writes reasoning and calls."""

import re
import string
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from onward.chat.source import MessageBuilder, Reading, TextReader

_LETTERS = string.ascii_letters + string.digits


class ArgumentSyntax(NamedTuple):
    """How an argument is written that stands by itself.

    before: before its name. middle: between its name and its value. after: after its value. names: the names that can
    be read back.
    """

    before: str
    middle: str
    after: str
    names: re.Pattern[str]


class CallSyntax(NamedTuple):
    """How calls are written where they are constrained, after their opener.

    before: before the name of a call. middle: between the name and the arguments. after: after the arguments.
    between: between two calls; None where an answer has one at most. begin: before the first call. end: after the last.
    quoted: the name is a string of JSON. argument: how each argument is written where it stands by itself; None where
    the arguments are one object of JSON.
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
    """How a family of models writes its answers. To add one, write a file and a line in `FORMATS`.

    name: what `message_format=` calls it.
    thinking: the marks around reasoning. after_thinking: what a model writes between reasoning and what follows it.
    before_content: what stands before content; empty where content has no mark.
    openers: marks that a call begins with, wherever it stands. No opener begins another.
    bare: whether an answer may also begin with a call without an opener, which is then a JSON object.
    syntax: how constrained calls are written; None where calls cannot be.
    marks: other marks that calls have. A mark that is a special token is no part of the text, and is read all the same.
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
        """Everything that may be a token of its own."""
        return (*self.thinking, *self.openers, *self.marks)

    def marks_of(self, *, calls: bool) -> tuple[str, ...]:
        """What is read of an answer and may be a token of its own. calls: whether tools were given."""
        return self.all_marks if calls else self.thinking

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template, as text, is one of this family."""

    def read(self, source: TextReader, written: MessageBuilder, *, calls: bool, thinking: bool) -> Reading[None]:
        """Read a whole answer: reasoning, then content with calls in it.

        calls: whether tools were given; without them, what looks like a call is content. thinking: whether the prompt
        has opened the reasoning already.
        """
        yield from self._read_reasoning(source, written, thinking)
        if calls:
            source.mark()
            if not (yield from self.read_start(source, written)):
                source.rewind()
        openers = self.openers if calls else ()
        while opener := (yield from source.until(openers, written.content.add, is_cut=written.has_calls)):
            source.mark()
            if not (yield from self.read_calls(opener, source, written)):
                if written.has_calls() and source.is_over:  # the text was cut within another call
                    return
                source.rewind()
                written.content.add(opener)

    def _read_reasoning(self, source: TextReader, written: MessageBuilder, thinking: bool) -> Reading[None]:
        """A message may begin with reasoning, and nowhere else has it any."""
        opening, closing = self.thinking
        source.mark()
        yield from source.skip_space()
        if not (yield from source.skip(opening)) and not thinking:
            source.rewind()
            return
        source.forget()
        if (yield from source.until([closing], written.reasoning.add)) is not None:
            written.content.mark()

    def read_start(self, source: TextReader, written: MessageBuilder) -> Reading[bool]:
        """Read the calls that a message may begin with, without an opener. Returns whether there was one."""
        yield from ()
        return False

    def read_calls(self, opener: str, source: TextReader, written: MessageBuilder) -> Reading[bool]:
        """Read the calls that follow `opener`, which was read. Returns whether there was one."""
        yield from ()
        return False

    def call_id(self, digest: bytes) -> str:
        """The id of a call, made of 32 bytes that no other call has."""
        return f"call_{letters(digest, 24)}"


def letters(digest: bytes, count: int) -> str:
    """So many letters and digits, made of bytes."""
    number, written = int.from_bytes(digest), []
    for _ in range(count):
        number, digit = divmod(number, len(_LETTERS))
        written.append(_LETTERS[digit])
    return "".join(written)
