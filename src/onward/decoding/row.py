"""One request while it is decoded, and the one place that decides whether it has ended."""

from collections.abc import Set as AbstractSet
from typing import Literal

from onward.decoding.text import NoText, TextStream

FinishReason = Literal["stop", "length"]


class Row:
    """Collects a request's tokens and text, and ends it.

    finish_reason is None while the row goes on; "stop" after an id of `eos` (which is part of `token_ids` and
    not of the text) or a stop string, "length" after `max_new_tokens`. A row of none has ended at once.
    """

    def __init__(
        self, max_new_tokens: int, eos: AbstractSet[int] = frozenset(), text: TextStream | None = None
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None if max_new_tokens > 0 else "length"
        self._max_new_tokens = max_new_tokens
        self._eos = eos
        self._stream = NoText() if text is None else text

    def accept(self, token_id: int) -> str:
        """Take the next token; returns the text that became final with it."""
        assert self.finish_reason is None, "a row that has ended takes no tokens"
        self.token_ids.append(token_id)
        piece = ""
        if token_id in self._eos:
            self.finish_reason = "stop"
        else:
            piece = self._stream.push(token_id)
            if self._stream.stopped:
                self.finish_reason = "stop"
            elif len(self.token_ids) == self._max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._stream.flush()
            if self._stream.stopped:
                # Text that was held back for its last character can complete a stop string when it is flushed.
                self.finish_reason = "stop"
        self.text += piece
        return piece
