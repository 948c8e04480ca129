"""One request while it is decoded, and the one place that decides whether it has ended."""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, Self

from onward.decoding.step import TokenLogprobs
from onward.decoding.text import NoText, TextStream

FinishReason = Literal["stop", "length", "time", "cancelled"]
# (ids so far, text so far) -> whether to end
StopWhen = Callable[[Sequence[int], str], bool]

# The id of `eos`, the stop string or the `stop_when` that ended a text.
StoppedBy = int | str | StopWhen


class Row:
    """Collects a request's tokens and text, and ends it.

    finish_reason is None while the row goes on. It becomes
        "stop" after an id of `eos` (which is part of `token_ids` and not of the text), after a stop string, or when
            `stop_when` returns True;
        "length" after `max_new_tokens`; at once where that is 0;
        "time" with the first token at or after `deadline` (on the clock `time.monotonic`);
        "cancelled" with the first token after any thread has set `cancel`.

    stopped_by is the id, the stop string or the function `stop_when` that ended the row with "stop"; otherwise None.
    """

    def __init__(
        self,
        max_new_tokens: int,
        eos: AbstractSet[int] = frozenset(),
        text: TextStream | None = None,
        *,
        stop_when: StopWhen | None = None,
        deadline: float | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None if max_new_tokens > 0 else "length"
        self.stopped_by: StoppedBy | None = None
        self._max_new_tokens = max_new_tokens
        self._eos = eos
        self._stream = NoText() if text is None else text
        self._stop_when = stop_when
        self._deadline = deadline
        self._cancel = cancel

    @property
    def room(self) -> int:
        """How many tokens the row may still take."""
        return self._max_new_tokens - len(self.token_ids)

    def accept(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Take the next token and return the text that became final with it."""
        assert self.finish_reason is None, "a row that has ended takes no tokens"
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece = ""
        if token_id in self._eos:
            self.finish_reason, self.stopped_by = "stop", token_id
        else:
            piece = self._stream.push(token_id)
            self.finish_reason = self._reason_to_end(piece)
        if self.finish_reason is not None:
            piece += self._stream.flush()
            if self._stream.stopped_by is not None:
                # The flush gives out an unfinished character, and that can complete a stop string.
                self.finish_reason, self.stopped_by = "stop", self._stream.stopped_by
        self.text += piece
        return piece

    def fork(self) -> Self:
        """A copy that goes on from here by itself, as the beams of a search do."""
        other = copy.copy(self)
        other.token_ids, other.logprobs = self.token_ids.copy(), self.logprobs.copy()
        other._stream = self._stream.fork()
        return other

    def take_over(self, ended: "Row") -> None:
        """Take the whole state of `ended`, a fork of this row that has ended."""
        assert self.finish_reason is None, "a row that has ended is final"
        assert ended.finish_reason is not None, "only a row's own end ends it"
        self.__dict__.update(ended.fork().__dict__)

    def _reason_to_end(self, piece: str) -> FinishReason | None:
        if self._stream.stopped_by is not None:
            return "stop"
        if self._stop_when is not None and self._stop_when(self.token_ids, self.text + piece):
            self.stopped_by = self._stop_when
            return "stop"
        if len(self.token_ids) == self._max_new_tokens:
            return "length"
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        return "time" if self._deadline is not None and time.monotonic() >= self._deadline else None
