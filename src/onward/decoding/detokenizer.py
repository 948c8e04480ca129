"""Tokens to characters, one token at a time."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, Self

REPLACEMENT = "\ufffd"
# How many of a prompt's last ids are decoded again with what follows. One would do but for special tokens.
_CONTEXT = 8
# Of a character in UTF-8.
_MOST_BYTES = 4


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...


class StreamingDetokenizer:
    """Gives out a character once all of its bytes are there, never before.

    A token may hold part of a character, and a tokenizer may write a token differently after another one (with a
    leading space, for example). So the ids since the last text given out are decoded together with the ids of that
    text. An unfinished character decodes to the replacement character: the new text is given out as soon as it does
    not end in one. The pieces add up to `decode` of all ids, as long as these are valid UTF-8. Byte fallback writes
    a run of bytes with an invalid one as replacement characters throughout; here characters that were given out stay.

    decode: ids to text.
    before: the ids that the text continues. Their own text is not given out. With them the first word after a prompt
        keeps its leading space, where a tokenizer drops one at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        # Ids whose text has been given out, as far as later ones need them.
        self._context = _whole_end(decode, before)
        self._pending: list[int] = []  # ids whose text has not been given out

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The rest of the text; an unfinished character becomes the replacement character."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def added_by(self, token_id: int) -> str:
        """The text that a token would add here, less an unfinished character before it."""
        ids = self._context + self._pending
        return self._added(ids, [token_id])

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _new_text(self) -> str:
        return self._added(self._context, self._pending)

    def _added(self, ids: list[int], more: list[int]) -> str:
        """The text that ids add to that of others."""
        before, text = self._decode(ids), self._decode(ids + more)
        if REPLACEMENT in text[: len(before)] and not text.startswith(before):
            return self._decode(more)  # a byte broke the characters of the bytes before it
        return text[len(before) :]


def _whole_end(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """The last of these ids, from the start of a character on: byte fallback breaks all characters of a run of bytes
    that starts inside one. None where the ids end inside a character, which is no part of a text then.
    """
    last = list(ids[-_CONTEXT:])
    starts = range(min(_MOST_BYTES, len(last)))
    return next((last[start:] for start in starts if not decode(last[start:]).endswith(REPLACEMENT)), [])
