"""Where a layer's recurrent states lie, for the ops that keep them: `short_conv`, `gated_delta` and `ssd`.

A state is kept as it was at the beginning of a block of 16 positions, with what each later position of the block adds
to it. So taking positions back is forgetting the last of these, as in a cache of keys and values, and whatever lies at
or past a row's offset is never read. Each slot has two places, for two blocks.

Shapes: N slots; `held` int32 [N, 2] is the number of the block at each place, counted from 1, and 0 where there is
none; `offsets` int32 [B] is each row's own; `rows` int32 [B] is the slot of each row, None where row b has slot b.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.operators import shapes

# Positions of a block, absolute multiples of which begin one (native/src/state/places.h).
STATE_BLOCK = 16
# Of the ops that write to a state.
TRAIN_WITHOUT_STATE = "train with the layer written in torch over whole sequences, without a state"


class Places(NamedTuple):
    """The places of rows that go from their offsets over some positions; int64 or bool [B].

    begins: the row starts at position 0, with zeros. known: what lay before its offset is there.
    source: the place of the block of the position before the offset, `before`. to: the place of the last position's
    block, `last`. Blocks are counted from 1.
    """

    slots: Tensor
    begins: Tensor
    known: Tensor
    source: Tensor
    before: Tensor
    to: Tensor
    last: Tensor

    def read(self, state: Tensor) -> Tensor:
        """What lies at `source` [B, …]: zeros for a row that begins, NaN where it is not known."""
        shape = (-1, *[1] * (state.dim() - 2))
        found = state[self.slots, self.source].masked_fill(self.begins.view(shape), 0)
        return found.masked_fill(~self.known.view(shape), torch.nan)

    def write(self, state: Tensor, held: Tensor, at_source: Tensor, at_to: Tensor) -> None:
        """Store what lies at `source`, and then at `to`, of rows that are known."""
        for place, new in ((self.source, at_source), (self.to, at_to)):
            known = self.known.view(-1, *[1] * (state.dim() - 2))
            state[self.slots, place] = torch.where(known, new, state[self.slots, place])
        held[self.slots, self.to] = torch.where(self.known, self.last, held[self.slots, self.to]).to(held.dtype)


def places(held: Tensor, offsets: Tensor, rows: Tensor | None, count: int) -> Places:
    """The places of rows that go over `count` positions, in plain torch."""
    slots = torch.arange(len(offsets), device=offsets.device) if rows is None else rows.long()
    before, last = (block_after(ends) for ends in (offsets.long(), offsets.long() + count))
    begins, found = offsets == 0, held[slots] == before.unsqueeze(1)
    source = torch.where(begins | found[:, 0], 0, 1)
    to = torch.where(begins | (last == before), source, 1 - source)
    return Places(slots, begins, begins | found.any(1), source, before, to, last)


def block_after(positions: Tensor) -> Tensor:
    """How many blocks have begun when a row has so many positions."""
    return (positions + STATE_BLOCK - 1) // STATE_BLOCK


def check_state(name: str, state: Tensor, width: tuple[int, ...], held: Tensor, offsets: Tensor, rows: Tensor | None,
                batch: int) -> None:  # fmt: skip
    """Raise unless `state` is [N, 2, *width] for `batch` rows, with `held`, `offsets` and `rows` that fit."""
    slots = state.shape[0]
    fits = state.shape == (slots, 2, *width) and held.shape == (slots, 2) and offsets.shape == (batch,)
    fits = fits and (slots == batch if rows is None else rows.shape == (batch,))
    fits = fits and all(t.dtype == torch.int32 for t in (held, offsets, *(() if rows is None else (rows,))))
    if not fits:
        sizes = ", ".join(map(str, width))
        raise RequestError(
            f"{name} wants a state [N, 2, {sizes}] with held int32 [N, 2], and for {batch} rows offsets int32 [B] and "
            f"rows int32 [B] (without them N = B); got {shapes(state=state, held=held, offsets=offsets, rows=rows)}"
        )


def check_rows(offsets: Tensor, rows: Tensor | None, slots: int) -> None:
    """On the CPU: raise where an offset is negative, or two rows are of one slot or of one that there is not."""
    if (least := min(offsets.tolist(), default=0)) < 0:
        raise RequestError(f"offsets must be 0 or more; got {least}")
    named = [] if rows is None else rows.tolist()
    if named and (min(named) < 0 or max(named) >= slots or len(set(named)) < len(named)):
        raise RequestError(f"each row must have a slot of its own, 0 to {slots - 1}; got {named}")


def arguments(state: Any, held: Any, offsets: Any, rows: Any, pointer: Any) -> Mapping[str, Any]:
    """The fields of `StateArguments` for tensors, or for the arrays of a program. pointer: gives the address of one."""
    strides = state.stride() if isinstance(state, Tensor) else state.strides
    held_strides = held.stride() if isinstance(held, Tensor) else held.strides
    return {
        "data": pointer(state), "strides": tuple(strides[:2]), "held": pointer(held), "held_stride": held_strides[0],
        "slots": state.shape[0], "rows": None if rows is None else pointer(rows), "offsets": pointer(offsets),
    }  # fmt: skip
