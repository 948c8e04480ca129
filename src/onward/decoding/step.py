"""A step: process what is pending, emit what follows. Prefill and decoding are the same step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from onward.decoding.state import DecodeState
from onward.errors import OnwardError, RequestError
from onward.models import Cache

# (logits [B, V], positions int32 [B] of the tokens to pick) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]
# What a step emitted: for every row the ids that follow its pending ones.
Emitted = list[list[int]]
Step = Callable[[DecodeState], tuple[DecodeState, Emitted]]


class Run(Protocol):
    """A model with its weights: `onward.models.Model`, or a user's forward bound to its params."""

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]: ...


@dataclass(frozen=True)
class DecodeStep:
    """Emits one token a row, predicted from its last pending one.

    run: the model. select: logits to ids. chunk: the most tokens of a row given to the model at once; a longer
    prompt is processed in pieces of this size.
    """

    run: Run
    select: Select
    chunk: int = 512

    @torch.no_grad()
    def __call__(self, state: DecodeState) -> tuple[DecodeState, Emitted]:
        logits, cache = self._last_logits(state)
        next_at = state.offsets + state.lengths
        picked = self.select(logits, next_at)
        emitted = _checked_ids(picked, logits, state.live)
        state = replace(
            state,
            tokens=torch.where(state.live, picked, 0).to(torch.int32).unsqueeze(1),
            lengths=torch.ones_like(state.lengths),
            offsets=torch.where(state.live, next_at, state.offsets),
            cache=cache,
        )
        return state, [[token] for token in emitted]

    def _last_logits(self, state: DecodeState) -> tuple[Tensor, Cache]:
        """Process the pending tokens chunk by chunk; the logits [B, V] after each row's last real one."""
        total, cache = state.tokens.shape[1], state.cache
        if total == 1:
            logits, cache = self._forward(state.tokens, state.offsets, cache, None)
            return logits[:, 0], cache
        last = state.lengths.to(torch.int64) - 1
        found: Tensor | None = None
        for start in range(0, total, self.chunk):
            tokens = state.tokens[:, start : start + self.chunk]
            at = last - start
            ends_here = (at >= 0) & (at < tokens.shape[1])
            # A chunk in which no row ends needs no head: ask for logits at no position.
            wanted = at.clamp(0, tokens.shape[1] - 1).unsqueeze(1)[:, : int(ends_here.any())]
            logits, cache = self._forward(tokens, state.offsets + start, cache, wanted)
            if wanted.shape[1]:
                found = logits[:, 0] if found is None else torch.where(ends_here.unsqueeze(1), logits[:, 0], found)
        assert found is not None
        return found, cache

    def _forward(self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None) -> tuple[Tensor, Cache]:
        logits, cache = self.run(tokens, offsets, cache, logits_at)
        wanted = tokens.shape if logits_at is None else logits_at.shape
        if logits.dim() != 3 or logits.shape[:2] != wanted:
            raise RequestError(f"forward must return logits {[*wanted, 'V']}; got {list(logits.shape)}")
        return logits, cache


def _checked_ids(picked: Tensor, logits: Tensor, live: Tensor) -> list[int]:
    """The picked ids on the host. One look at the picked logits finds NaN anywhere: NaN wins every argmax.

    Rows that have ended may hold anything; nobody takes their ids.
    """
    if picked.shape != logits.shape[:1] or picked.is_floating_point():
        raise RequestError(
            f"select must return integer ids of shape {list(logits.shape[:1])}; got {picked.dtype} {list(picked.shape)}"
        )
    ids: list[int] = picked.tolist()
    if out := [token for token in ids if not 0 <= token < logits.shape[1]]:
        raise RequestError(f"select returned id {out[0]}, but the logits are of ids from 0 to {logits.shape[1] - 1}")
    at_picked = logits.gather(1, picked.unsqueeze(1).to(torch.int64))
    if not bool((at_picked.squeeze(1).isfinite() | ~live).all()):
        raise OnwardError(
            "the model returned logits that are NaN or infinite where a token was picked: look for "
            "overflow (float16?), damaged weights or an uninitialised cache"
        )
    return ids
