"""Prefill ahead of the first step, for prompts that several rows share and for logprobs of the prompts themselves.

Most requests need nothing here, for the loop's first step processes all that is pending. After `prefilled` each row's
last token remains pending, and any `Step` goes on from it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onward.cache import CompactableCache
from onward.decoding.state import DecodeState
from onward.decoding.step import Run, TokenLogprobs, forward, not_finite, padded, token_logprobs

# (start, logits [B, T, V]): the logits after T pending tokens of each row, the first of which is at index `start`.
Look = Callable[[int, Tensor], None]

# The most logits computed at once where they are needed at every position: 2^26 take 256 MB in float32, which are 440
# positions of a vocabulary of 152k.
_MOST_LOGITS = 2**26
# The most logits turned into logprobs at once. That takes some 30 bytes each, so they are fewer.
_MOST_SCORED = 2**22


@torch.no_grad()
def prefilled(run: Run, state: DecodeState, chunk: int, look: Look | None = None) -> DecodeState:
    """Process all pending tokens but each row's last, which stays pending.

    chunk: the most tokens of a row given to the model at once.
    look: called with the logits of all these tokens, chunk by chunk; without it the head does not run. The logits at
        or past a row's last pending token mean nothing.
    """
    tokens = padded(state)[:, :-1]
    offsets = torch.tensor(state.offsets, dtype=torch.int32, device=state.device)
    cache = state.cache
    for start in range(0, tokens.shape[1], chunk):
        piece = tokens[:, start : start + chunk]
        logits_at = torch.arange(piece.shape[1] if look else 0, device=state.device).expand(len(tokens), -1)
        logits, cache = forward(run, piece, offsets + start, cache, logits_at)
        if look is not None:
            look(start, logits)
    pending = tuple(ids[-1:] for ids in state.pending)
    after = tuple(offset + len(ids) - 1 for offset, ids in zip(state.offsets, state.pending, strict=True))
    return state.advanced(pending, after, cache)


def spread(state: DecodeState, cache: CompactableCache, copies: int) -> DecodeState:
    """The state with each row `copies` times, one copy beside the other. The positions that the row holds are copied.

    state: over the first rows of `cache`, with owner i in row i. cache: has a row for each copy.
    """
    # From the end, so that no row is overwritten before it has been copied.
    for row in reversed(range(len(state.pending))):
        for to in reversed(range(row * copies, (row + 1) * copies)):
            if to != row:
                cache.copy_row(row, to, state.offsets[row])
    rows = [row for row in range(len(state.pending)) for _ in range(copies)]
    return replace(
        state,
        pending=tuple(state.pending[row] for row in rows),
        offsets=tuple(state.offsets[row] for row in rows),
        owners=tuple(range(len(rows))),
        live=(True,) * len(rows),
        cache=cache,
    )


class PromptLogprobs:
    """A `Look` that collects the logprob of each id of a prompt, given the ids before it.

    The prompts must be prefilled from their beginning.

    logprobs: for each prompt, one for each of its ids; None for the first id, which nothing predicts.
    top: how many of the likeliest ids to report beside each.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], top: int) -> None:
        self.logprobs: list[list[TokenLogprobs | None]] = [[None] for _ in prompts]
        self._prompts = prompts
        self._top = top

    def __call__(self, start: int, logits: Tensor) -> None:
        at_once = max(1, _MOST_SCORED // logits.shape[2])
        for prompt, logprobs, row_logits in zip(self._prompts, self.logprobs, logits, strict=True):
            ids = prompt[start + 1 : start + 1 + len(row_logits)]
            for begin in range(0, len(ids), at_once):
                some_ids = ids[begin : begin + at_once]
                new = token_logprobs(some_ids, row_logits[begin : begin + len(some_ids)], self._top)
                if any(math.isnan(token.chosen) for token in new):
                    raise not_finite()
                logprobs += new

    def chunk(self, most: int, vocab_size: int) -> int:
        """How many tokens of each row to prefill at once, at most `most`, so that their logits fit in memory."""
        return min(most, max(1, _MOST_LOGITS // (len(self.logprobs) * vocab_size)))
