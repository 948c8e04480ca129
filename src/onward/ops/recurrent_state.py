"""Where a layer's recurrent states lie, for the ops that keep them: `short_conv`, `gated_delta` and `ssd`.

A state is kept as it was at the beginning of a block of 16 positions, with what each later position of the block adds
to it. So taking positions back is forgetting the last of these, as in a cache of keys and values, and whatever lies at
or past a row's offset is never read. Each slot has two places, for two blocks.

Shapes: N slots; `held` int32 [N, 2] is the number of the block at each place, counted from 1, and 0 where there is
none; `offsets` int32 [B] is each row's own; `rows` int32 [B] is the slot of each row, None where row b has slot b.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.ops.operator import shapes

# Positions of a block, absolute multiples of which begin one (native/src/state/places.h).
STATE_BLOCK = 16
# Of the ops that write to a state.
TRAIN_WITHOUT_STATE = "train with the layer written in torch over whole sequences, without a state"


class StatePlaces(NamedTuple):
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


def places(held: Tensor, offsets: Tensor, rows: Tensor | None, count: int) -> StatePlaces:
    """The places of rows that go over `count` positions, in plain torch."""
    slots = torch.arange(len(offsets), device=offsets.device) if rows is None else rows.long()
    before, last = (block_after(ends) for ends in (offsets.long(), offsets.long() + count))
    begins, found = offsets == 0, held[slots] == before.unsqueeze(1)
    source = torch.where(begins | found[:, 0], 0, 1)
    to = torch.where(begins | (last == before), source, 1 - source)
    return StatePlaces(slots, begins, begins | found.any(1), source, before, to, last)


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


class StateBlock(Protocol):
    """What lies at a place: a state [B, H, K, V] at the beginning of a block, and what its positions add to it."""

    @property
    def state(self) -> Tensor: ...

    def page(self) -> Tensor:
        """All of it as it lies at a place, [B, heads or groups, width]."""
        ...

    def end(self) -> Tensor:
        """The state after all 16 positions."""
        ...

    def with_state(self, state: Tensor) -> Self: ...


Block = TypeVar("Block", bound=StateBlock)


def through_blocks(
    block: Block,
    state: Tensor,
    held: Tensor,
    at: StatePlaces,
    offsets: Tensor,
    tokens: Sequence[Tensor],
    through: Callable[..., tuple[Block, Tensor]],
) -> Tensor:
    """The outputs [B, T, H, V] of tokens, whose blocks are stored.

    Args:
        block: what lies at the source of each row.
        state, held, at, offsets: as in `onward.ops.recurrent_state`.
        tokens: [B, H, T, D] each.
        through: called with a block, its new positions bool [B, 16], and each of `tokens` [B, H, 16, D], anything at
            positions that are not new; returns the block with these positions, and its outputs [B, H, 16, V].
    """
    queries, device = tokens[0].shape[2], state.device
    first = offsets.long() % STATE_BLOCK  # the first token's place in its block
    # The block before may be full. Then the first token begins one.
    block = block.with_state(torch.where((first == 0)[:, None, None, None], block.end(), block.state))
    pages, outs = [], []
    for number in range(-(-(queries + STATE_BLOCK - 1) // STATE_BLOCK)):  # as many as T tokens may touch
        index = number * STATE_BLOCK + torch.arange(STATE_BLOCK, device=device) - first.unsqueeze(1)
        block, out = through(block, index >= 0, *(_taken(x, index) for x in tokens))
        pages.append(block.page())
        outs.append(out)
        block = block.with_state(block.end())
    _store(state, held, at, torch.stack(pages, 1), offsets, first)
    index = first.unsqueeze(1) + torch.arange(queries, device=device)
    return _taken(torch.cat(outs, 2), index).transpose(1, 2)


def sums_of_decays(new: Tensor, step: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The sums G [B, H, 16, 1] of a block with new positions, and how much of position i is left at j, [B, H, j, i].

    Args:
        new: bool [B, 1, 16, 1].
        step: the logarithms of the decays of new positions, [B, H, 16, 1].
        known: the sums of the others, [B, H, 16].
    """
    # The sum before the first new position stands for the steps up to it.
    before = torch.where(new, 0, known.unsqueeze(-1))
    is_last = ~new & torch.cat([new[:, :, 1:], torch.ones_like(new[:, :, :1])], 2)
    sums = torch.where(new, step, torch.where(is_last, before, 0)).cumsum(2)
    decays = torch.where(new, sums, before)
    ahead = torch.ones(STATE_BLOCK, STATE_BLOCK, dtype=torch.bool, device=step.device).triu(1)
    return decays, (decays - decays.mT).masked_fill(ahead, -torch.inf).exp()


def state_at_end(state: Tensor, keys: Tensor, added: Tensor, decays: Tensor) -> Tensor:
    """The state after the 16 positions of a block, whose keys, additions and sums of decays [B, H, 16, D] these are."""
    last = decays[..., -1:]
    fading = (last - decays).exp().unsqueeze(-1)
    return last.exp().unsqueeze(-1) * state + keys.mT @ (fading * added)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, T, D] at the tokens index [B, L], anything where there is none: [B, H, L, D]."""
    index = index.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _store(state: Tensor, held: Tensor, at: StatePlaces, pages: Tensor, offsets: Tensor, first: Tensor) -> None:
    """Store what the rows went through, pages [B, M, …], of which the first is that of the first token."""
    index = (at.last - 1 - offsets.long() // STATE_BLOCK)[:, None, None, None]
    last = pages.gather(1, index.expand(-1, -1, *pages.shape[2:])).squeeze(1)
    appended = torch.where((first != 0)[:, None, None], pages[:, 0], state[at.slots, at.source])
    at.write(state, held, appended, last)
