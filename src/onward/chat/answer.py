"""How the answer to a chat is read."""

import hashlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from onward.chat.format import MessageFormat
from onward.chat.message import MessageDelta
from onward.chat.source import MessageBuilder, TextReader
from onward.errors import RequestError


class MessageParser:
    """Reads one answer as it comes.

    Text is held back as long as it may be the beginning of a mark, or of a call whose name is not known. A call whose
    name cannot be read is content, its mark too, so nothing is lost. One that breaks off later stays a call, with the
    arguments as far as they were written.

    format: how the model writes.
    new_id: the id of the call with an index.
    tools: the names of the tools that were given, maybe each with the JSON schema of its arguments, by which formats
        without JSON tell texts from numbers; empty where they are not known. None: no tools were given, and what
        looks like a call is content.
    thinking: whether the prompt has opened the reasoning already.
    """

    def __init__(
        self,
        format: MessageFormat,
        new_id: Callable[[int], str],
        tools: Collection[str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._source = source = TextReader()
        self._written = MessageBuilder(new_id, lambda: source.place, tools or ())
        self._reading = format.read(self._source, self._written, calls=tools is not None, thinking=thinking)
        next(self._reading, None)

    def feed(self, text: str) -> None:
        """Read on."""
        if text:
            self._source.add(text)
            next(self._reading, None)

    def finish(self) -> None:
        """The text is over: what was held back is certain, too."""
        self._source.end()
        next(self._reading, None)
        self._written.content.end()

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Where reasoning stands in the text that was fed, without its marks: (begin, end), in order."""
        return self._written.reasoning.spans

    def take(self) -> MessageDelta:
        """What became certain since the last time."""
        return self._written.take()


class Vocabulary(Protocol):
    """What marks need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


# Names of tools, or each with the JSON schema of its arguments.
Tools: TypeAlias = tuple[str, ...] | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerFormat:
    """How the answer to a request is read as a message.

    format: how the model writes. tools: those that may be called, by name, maybe each with the JSON schema of its
    arguments; empty where they are not known, and None where there are none. thinking: whether the prompt ends in
    opened reasoning; False where it ends in closed reasoning, None where it has none. marks: ids of special tokens, and
    how each is written; a text does not have them.
    """

    format: MessageFormat
    tools: Tools | None = None
    thinking: bool | None = None
    marks: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, format: MessageFormat, vocabulary: Vocabulary, prompt: str, tools: Tools | None) -> "AnswerFormat":
        """prompt: the conversation as text, up to where the answer begins."""
        written = format.marks_of(calls=tools is not None)
        marks = tuple((id, text) for text in written if (id := special_token(vocabulary, text)) is not None)
        opening, closing = (prompt.rstrip().endswith(mark) for mark in format.thinking)
        return cls(format, tools, opening or (False if closing else None), marks)

    def parser(self, prompt: Sequence[int], seed: int | None) -> MessageParser:
        """A parser for one text. The ids of its calls follow from the prompt and the seed."""
        return MessageParser(self.format, _call_ids(self.format, prompt, seed), self.tools, self.thinking is True)


def special_token(vocabulary: Vocabulary, text: str) -> int | None:
    """The id of the special token that is written like this; None where it is no such token."""
    try:
        ids = vocabulary.encode(text, add_special_tokens=False)
    except RequestError:
        return None  # it lies past the model's vocabulary, so no answer has it
    return ids[0] if len(ids) == 1 and not vocabulary.decode(ids) else None


def _call_ids(format: MessageFormat, prompt: Sequence[int], seed: int | None) -> Callable[[int], str]:
    def new_id(index: int) -> str:
        digest = hashlib.sha256(array("q", prompt).tobytes() + f"{seed} {index}".encode())
        return format.call_id(digest.digest())

    return new_id
