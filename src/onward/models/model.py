"""The one contract. Everything above this floor knows a model only as what stands here.

    forward(tokens, offsets, cache, params) -> (logits, cache)
        tokens   int32 [B, T]   the ids to process
        offsets  int32 [B]      absolute position of tokens[:, 0] in each row
        cache    any pytree of fixed-shape tensors; updated in place and returned
        params   any pytree of tensors: the weights, an argument and never a closure
        logits   float [B, T, V]

A forward is shape-stable: no shape depends on the VALUE of `offsets`. Entries of the cache at or past a
row's offset are never read.

The head is the dearest matrix of a small model and a prompt needs it at one position only, so a forward may
also take `logits_at`, int64 [B, N] indices into T, and return logits [B, N, V] of those positions alone.
It says so with `Model(selects_logits=True)`; a plain four-argument function is served by picking its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CPU = torch.device("cpu")

Cache = Any
Params = Any
Forward = Callable[..., tuple[Tensor, Cache]]


class NewCache(Protocol):
    """Makes an empty cache for `batch` rows of `max_len` positions."""

    def __call__(self, batch: int, max_len: int) -> Cache: ...


@dataclass(frozen=True)
class Model:
    """A forward, its weights and how to make its cache.

    vocab_size: V. max_seq_len: the most positions it can serve, None where it does not say.
    selects_logits: whether forward takes the keyword `logits_at`.
    device: where its tokens and offsets go.
    num_parameters: weights, a tied one counted once; None where nobody counted.
    """

    forward: Forward
    params: Params
    new_cache: NewCache
    vocab_size: int
    max_seq_len: int | None = None
    selects_logits: bool = False
    device: torch.device = CPU
    num_parameters: int | None = None

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Run the forward; logits [B, T, V], or [B, N, V] at `logits_at` int64 [B, N]."""
        if self.selects_logits:
            return self.forward(tokens, offsets, cache, self.params, logits_at=logits_at)
        return run_plain(self.forward, self.params, tokens, offsets, cache, logits_at)

    @property
    def nbytes(self) -> int:
        """Bytes of weights held in memory or mapped, each tensor once."""
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves(self.params) if isinstance(leaf, Tensor)}
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())


def run_plain(
    forward: Forward, params: Params, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Call a four-argument forward and pick the logits asked for out of all of them."""
    logits, cache = forward(tokens, offsets, cache, params)
    return (logits if logits_at is None else take_positions(logits, logits_at)), cache


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D] at int64 [B, N] indices into T -> [B, N, D]."""
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[rows, positions]
