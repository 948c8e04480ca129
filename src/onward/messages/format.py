"""`MessageFormat`: how a family of models writes reasoning and calls."""

import string
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from onward.messages.source import Reading, Source
from onward.messages.written import Written

_LETTERS = string.ascii_letters + string.digits


class CallSyntax(NamedTuple):
    """How calls are written where they are constrained, after their opener.

    begin: before the first. call: with NAME and ARGUMENTS in their places. between: between two. end: after the last.
    """

    begin: str
    call: str
    between: str
    end: str


class MessageFormat(ABC):
    """How a family of models writes its answers. To add one, write a file and a line in `FORMATS`.

    name: what `message_format=` calls it.
    thinking: the marks around reasoning.
    openers: marks that a call begins with, wherever it stands. No opener begins another.
    bare: whether an answer may also begin with a call without an opener, which is then a JSON object.
    syntax: how constrained calls are written; None where calls cannot be.
    marks: other marks that calls have. A mark that is a special token is no part of the text, and is read all the same.
    """

    name: ClassVar[str]
    thinking: ClassVar[tuple[str, str]] = ("<think>", "</think>")
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

    @abstractmethod
    def is_of(self, template: str) -> bool:
        """Whether a chat template, as text, is one of this family."""

    def read_start(self, source: Source, written: Written) -> Reading[bool]:
        """Read the calls that a message may begin with, without an opener. Returns whether there was one."""
        yield from ()
        return False

    def read_calls(self, opener: str, source: Source, written: Written) -> Reading[bool]:
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
