"""Tokens to characters, one token at a time."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, Self

REPLACEMENT = "\ufffd"
# How many of a prompt's last ids are decoded again with what follows. One would do but for special tokens.
_CONTEXT = 8


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
    not end in one. The pieces add up to `decode` of all ids.

    decode: ids to text.
    before: the ids that the text continues. Their own text is not given out. With them the first word after a prompt
        keeps its leading space, where a tokenizer drops one at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        context = list(before[-_CONTEXT:])
        # Ids whose text has been given out, as far as later ones need them. A prompt that ends inside a character
        # has not given that character out, so it is no context.
        self._context: list[int] = [] if decode(context).endswith(REPLACEMENT) else context
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
        return self._decode([*ids, token_id])[len(self._decode(ids)) :]

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]
