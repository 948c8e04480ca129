"""Tokens to characters, one token at a time."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, Self

REPLACEMENT = "\ufffd"
# Ids of a prompt that may bear on how the next one is written; one would do, special tokens aside.
_CONTEXT = 8


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> Self:
        """One that goes on from here by itself."""
        ...


class StreamingDetokenizer:
    """Gives out a character once all of its bytes are there, never before.

    A token may hold part of a character, and a tokenizer may write a token differently after another one (a
    leading space, for one). So the ids since the last text given out are decoded together with the ids of
    that text, and what is new is given out as soon as it does not end in the replacement character that an
    unfinished character decodes to. The pieces add up to `decode` of all ids.

    decode: ids to text. before: the ids that the text continues, which are not given out: the first word after a
    prompt keeps its leading space with tokenizers that drop one at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        context = list(before[-_CONTEXT:])
        # ids whose text has been given out, as far as later ones need them; a prompt that ends inside a character
        # has not given it out.
        self._context: list[int] = [] if decode(context).endswith(REPLACEMENT) else context
        self._pending: list[int] = []  # ids whose text has not

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The rest, an unfinished character as its replacement character."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def fork(self) -> Self:
        """Another one, for tokens that part here."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]
