"""A forward with adapters beside its weights: each row of a batch with its own, or with none.

The family's own forward runs. Where it calls a matrix, what it calls adds the rows' updates.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.cache import KVCache, PagedKVCache
from onward.models import Architecture, Embedding, Linear


class Updates(NamedTuple):
    """The updates of one module by every adapter, of S slots and R ranks, as `ops.lora` takes them.

    a: [S, R, K]; of a table [S, R, V]. b: [S, R, N]. ranks: int32 [S]. factors: float32 [S, R] where a and b are int8.
    scale, shift: float32 [S, N], or both None.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    factors: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


class AdaptedLinear(NamedTuple):
    """A linear layer with updates. slots: int32 [B], the slot of each row; None until a forward begins."""

    linear: Linear
    updates: Updates
    slots: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """float [R, ..., in] -> [R, ..., out], of the first R rows."""
        assert self.slots is not None, "a forward binds its rows first"
        a, b, ranks, factors, scale, shift = self.updates
        slots = self.slots[: x.shape[0]]
        return ops.lora(x, self.linear(x), a, b, slots, ranks, factors=factors, scale=scale, shift=shift)


class AdaptedEmbedding(NamedTuple):
    """A table with updates. units: [S, R, R], the unit matrix of each slot. slots: as of `AdaptedLinear`."""

    embedding: Embedding
    updates: Updates
    units: Tensor
    slots: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """int [B, T] -> float [B, T, D]."""
        assert self.slots is not None, "a forward binds its rows first"
        table, b, ranks, *_ = self.updates
        of_ids = table.transpose(1, 2)[self.slots.unsqueeze(1), ids]  # [B, T, R]
        return ops.lora(of_ids, self.embedding(ids), self.units, b, self.slots, ranks)


@dataclass(frozen=True, eq=False)
class AdaptedForward:
    """The forward of an architecture over params with updates, and caches that say which adapter each row has."""

    architecture: Architecture

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: KVCache | PagedKVCache,
        params: Any,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        (slots,) = cache.adapters

        def bound(part: Any) -> Any:
            return part._replace(slots=slots) if _is_adapted(part) else part

        of_rows = pytree.tree_map(bound, params, is_leaf=_is_adapted)
        return self.architecture(tokens, offsets, cache, of_rows, logits_at=logits_at)


def _is_adapted(part: Any) -> bool:
    return isinstance(part, AdaptedLinear | AdaptedEmbedding)


def unit_matrices(slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, R, R]."""
    return torch.eye(rank, dtype=dtype, device=device).repeat(slots, 1, 1)
