"""Parse the answer to a chat."""

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
    """A streaming parser of one answer.

    Text that may be the beginning of a mark, or of a call whose name is not complete, is held back. If a call's name
    cannot be read, the call is content, including its mark. A call that is cut off later has incomplete arguments.

    format: of the model's messages.
    new_id: returns the id of the call at an index.
    tools: the names of the request's tools, or a mapping from names to JSON schemas of their arguments, from which
        formats without JSON tell strings from numbers; empty if unknown. None: no tools, and calls are content.
    thinking: whether the prompt has already opened the reasoning.
    """

    def __init__(
        self,
        format: MessageFormat,
        new_id: Callable[[int], str],
        tools: Collection[str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._source = source = TextReader()
        self._message = MessageBuilder(new_id, lambda: source.place, tools or ())
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
    in the text, and their texts.
    """

    format: MessageFormat
    tools: Tools | None = None
    thinking: bool | None = None
    marks: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, format: MessageFormat, vocabulary: Vocabulary, prompt: str, tools: Tools | None) -> "AnswerFormat":
        """Return how to parse the answer to `prompt`, the text of the conversation."""
        texts = format.marks_of(calls=tools is not None)
        marks = tuple((id, text) for text in texts if (id := special_token(vocabulary, text)) is not None)
        opening, closing = (prompt.rstrip().endswith(mark) for mark in format.thinking)
        return cls(format, tools, opening or (False if closing else None), marks)

    def parser(self, prompt: Sequence[int], seed: int | None) -> MessageParser:
        """Return a parser for one text. The ids of its calls are derived from the prompt and the seed."""

        def new_id(index: int) -> str:
            digest = hashlib.sha256(array("q", prompt).tobytes() + f"{seed} {index}".encode())
            return self.format.call_id(digest.digest())

        return MessageParser(self.format, new_id, self.tools, self.thinking is True)


def special_token(vocabulary: Vocabulary, text: str) -> int | None:
    """Return the id of the special token with this text, or None."""
    try:
        ids = vocabulary.encode(text, add_special_tokens=False)
    except RequestError:
        return None  # outside the model's vocabulary
    return ids[0] if len(ids) == 1 and not vocabulary.decode(ids) else None
