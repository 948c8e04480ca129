"""Prompts into the cache ahead of the first step: shared by several rows, or looked at on the way.

The loop's first step processes whatever is pending, so most requests need nothing here. What remains pending
afterwards is each row's last token, from which any `Step` goes on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onward.cache import CompactableCache
from onward.decoding.state import DecodeState
from onward.decoding.step import Run, TokenLogprobs, forward, not_finite, padded, token_logprobs

# (index of the first of the columns, logits [B, T, V] after each pending token from there on)
Look = Callable[[int, Tensor], None]

# Logits [B, T, V] wanted at every position are made so many at once: 2^26 are 256 MB in float32, 440 positions of a
# vocabulary of 152k. Their logprobs take some 30 bytes each while they are computed, so fewer at a time.
_MOST_LOGITS = 2**26
_MOST_SCORED = 2**22


@torch.no_grad()
def prefilled(run: Run, state: DecodeState, chunk: int, look: Look | None = None) -> DecodeState:
    """Process all pending tokens but each row's last, which stays pending.

    chunk: the most tokens of a row given to the model at once. look: is shown all their logits, chunk by chunk;
    without it the head does not run. Columns at or past a row's last pending token hold nothing of meaning.
    """
    tokens = padded(state)[:, :-1]
    offsets = torch.tensor(state.offsets, dtype=torch.int32, device=state.device)
    cache = state.cache
    for start in range(0, tokens.shape[1], chunk):
        piece = tokens[:, start : start + chunk]
        wanted = torch.arange(piece.shape[1] if look else 0, device=state.device).expand(len(tokens), -1)
        logits, cache = forward(run, piece, offsets + start, cache, wanted)
        if look is not None:
            look(start, logits)
    pending = tuple(ids[-1:] for ids in state.pending)
    after = tuple(offset + len(ids) - 1 for offset, ids in zip(state.offsets, state.pending, strict=True))
    return state.advanced(pending, after, cache)


def spread(state: DecodeState, cache: CompactableCache, copies: int) -> DecodeState:
    """Each row `copies` times, one copy beside the other, with positions held copied.

    state: owner i in row i, over the first rows of `cache`, which has a row for each copy.
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
    """A `Look` that collects the logprobs of prompts' ids, each given those before it.

    found: for each prompt and each of its ids; None for the first, which nothing predicts. top: how many of the
    likeliest ids to report beside each. The prompts are to be prefilled from their beginning.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], top: int) -> None:
        self.found: list[list[TokenLogprobs | None]] = [[None] for _ in prompts]
        self._prompts = prompts
        self._top = top

    def __call__(self, start: int, logits: Tensor) -> None:
        at_once = max(1, _MOST_SCORED // logits.shape[2])
        for prompt, found, of_row in zip(self._prompts, self.found, logits, strict=True):
            ids = prompt[start + 1 : start + 1 + len(of_row)]
            for begin in range(0, len(ids), at_once):
                some = ids[begin : begin + at_once]
                told = token_logprobs(some, of_row[begin : begin + len(some)], self._top)
                if any(math.isnan(one.chosen) for one in told):
                    raise not_finite()
                found += told

    def chunk(self, most: int, vocab_size: int) -> int:
        """How many tokens of each row to prefill at once, `most` or fewer, so that memory holds their logits."""
        return min(most, max(1, _MOST_LOGITS // (len(self.found) * vocab_size)))
