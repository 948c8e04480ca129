"""Where `short_conv`, `gated_delta` and `ssd` store a layer's recurrent states.

A state is stored as of the beginning of a block of 16 positions, with what each later position of the block adds to
it. So positions are rolled back by ignoring the last of these, as in a KV cache, and nothing at or past a row's offset
is ever read. Each slot has two places, for two blocks.

Shapes: N slots; `block_numbers` int32 [N, 2] is the number of the block at each place, counted from 1, 0 for none;
`offsets` int32 [B] is each row's own; `rows` int32 [B] is the slot of each row, None if row b has slot b.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.interface import Int, Pointer, Structure
from onward.ops.kernel_calls import KernelCalls, Operand, Unsupported
from onward.ops.operator import shapes

# Positions of a block, which begins at an absolute multiple of 16 (native/src/state/places.h).
STATE_BLOCK = 16
# Advice for ops that write to a state.
TRAIN_WITHOUT_STATE = "train with the layer written in torch over whole sequences, without a state"


class StatePlaces(NamedTuple):
    """The places of rows that advance from their offsets by some positions; int64 or bool [B].

    begins: the row starts at position 0, with zeros. known: the state at its offset is stored. source: the place of the
    block of the position before the offset, `before`. to: the place of the last position's block, `last`. Blocks are
    counted from 1.
    """

    slots: Tensor
    begins: Tensor
    known: Tensor
    source: Tensor
    before: Tensor
    to: Tensor
    last: Tensor

    def read(self, state: Tensor) -> Tensor:
        """The contents of `source` [B, …]: zeros for a row that begins, NaN if it is not known."""
        shape = (-1, *[1] * (state.dim() - 2))
        stored = state[self.slots, self.source].masked_fill(self.begins.view(shape), 0)
        return stored.masked_fill(~self.known.view(shape), torch.nan)

    def write(self, state: Tensor, block_numbers: Tensor, at_source: Tensor, at_to: Tensor) -> None:
        """Store the contents of `source`, and then of `to`, for known rows."""
        for place, new in ((self.source, at_source), (self.to, at_to)):
            known = self.known.view(-1, *[1] * (state.dim() - 2))
            state[self.slots, place] = torch.where(known, new, state[self.slots, place])
        numbers = torch.where(self.known, self.last, block_numbers[self.slots, self.to])
        block_numbers[self.slots, self.to] = numbers.to(block_numbers.dtype)


def places(block_numbers: Tensor, offsets: Tensor, rows: Tensor | None, count: int) -> StatePlaces:
    """The places of rows that advance by `count` positions, in plain torch."""
    slots = torch.arange(len(offsets), device=offsets.device) if rows is None else rows.long()
    before, last = (block_after(ends) for ends in (offsets.long(), offsets.long() + count))
    begins, matches = offsets == 0, block_numbers[slots] == before.unsqueeze(1)
    source = torch.where(begins | matches[:, 0], 0, 1)
    to = torch.where(begins | (last == before), source, 1 - source)
    return StatePlaces(slots, begins, begins | matches.any(1), source, before, to, last)


def block_after(positions: Tensor) -> Tensor:
    """The number of blocks that this many positions touch."""
    return (positions + STATE_BLOCK - 1) // STATE_BLOCK


def check_state(name: str, state: Tensor, width: tuple[int, ...], block_numbers: Tensor, offsets: Tensor,
                rows: Tensor | None, batch: int) -> None:  # fmt: skip
    """Raise unless `state` is [N, 2, *width] for `batch` rows, and the other tensors match it."""
    slots = state.shape[0]
    fits = state.shape == (slots, 2, *width) and block_numbers.shape == (slots, 2) and offsets.shape == (batch,)
    fits = fits and (slots == batch if rows is None else rows.shape == (batch,))
    if not fits or any(t is not None and t.dtype != torch.int32 for t in (block_numbers, offsets, rows)):
        sizes = ", ".join(map(str, width))
        raise RequestError(
            f"{name} expects a state [N, 2, {sizes}] with block_numbers int32 [N, 2], and for {batch} rows offsets "
            "int32 [B] and rows int32 [B] (without them N = B); got "
            f"{shapes(state=state, block_numbers=block_numbers, offsets=offsets, rows=rows)}"
        )


def check_rows(state: Tensor, block_numbers: Tensor, offsets: Tensor, rows: Tensor | None) -> None:
    """On the CPU: raise if an offset is negative, two rows share a slot, or a slot doesn't exist."""
    if (least := min(offsets.tolist(), default=0)) < 0:
        raise RequestError(f"offsets must be 0 or more; got {least}")
    used, slots = [] if rows is None else rows.tolist(), state.shape[0]
    if used and (min(used) < 0 or max(used) >= slots or len(set(used)) < len(used)):
        raise RequestError(f"each row must have a different slot, 0 to {slots - 1}; got {used}")


class StateArguments(Structure):
    """OnwardState of native/src/state/places.h, which documents the fields."""

    _fields_ = (
        ("data", Pointer),
        ("strides", Int * 2),
        ("held", Pointer),
        ("held_stride", Int),
        ("slots", Int),
        ("rows", Pointer),
        ("offsets", Pointer),
    )


def state_fields(
    k: KernelCalls, state: Operand, block_numbers: Operand, offsets: Operand, rows: Operand | None
) -> dict[str, Any]:
    """The fields of `StateArguments`."""
    slots, _, height, width = state.shape
    *strides, column, feature = state.stride()
    if (width > 1 and feature != 1) or (height > 1 and column != width) or block_numbers.stride()[1] != 1:
        raise Unsupported("a state that is not contiguous at each place")
    return {
        "data": k.address(state), "strides": tuple(strides), "held": k.address(block_numbers),
        "held_stride": block_numbers.stride()[0], "slots": slots if rows is None else k.num_slots(slots),
        "rows": k.optional(rows), "offsets": k.optional(offsets),
    }  # fmt: skip


class StateBlock(NamedTuple):
    """A state [B, H, K, V] at the beginning of a block, and what the block's positions add to it: keys [B, H, 16, K],
    updates [B, H, 16, V], and the sums of the logarithms of their decays [B, H, 16]."""

    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    def end(self) -> Tensor:
        """The state after all 16 positions."""
        last = self.decays[..., -1:]
        remaining = (last - self.decays).exp().unsqueeze(-1)
        return last.exp().unsqueeze(-1) * self.state + self.keys.mT @ (remaining * self.updates)


def through_blocks(
    block: StateBlock,
    state: Tensor,
    block_numbers: Tensor,
    at: StatePlaces,
    offsets: Tensor,
    tokens: Sequence[Tensor],
    advance: Callable[..., tuple[StateBlock, Tensor]],
    pack: Callable[[StateBlock], Tensor],
) -> Tensor:
    """The outputs [B, T, H, V] of tokens, whose blocks are stored.

    Args:
        block: the contents of each row's source.
        state, block_numbers, at, offsets: as in `onward.ops.recurrent_state`.
        tokens: [B, H, T, D] each.
        advance: called with a block, its new positions bool [B, 16], and each of `tokens` [B, H, 16, D], which is
            arbitrary where positions are not new; returns the block with these positions, and its outputs
            [B, H, 16, V].
        pack: a block -> [B, heads or groups, width], as it is stored.
    """
    queries, device = tokens[0].shape[2], state.device
    first = offsets.long() % STATE_BLOCK  # the first token's place in its block
    # The block before may be full. Then the first token begins one.
    block = block._replace(state=torch.where((first == 0)[:, None, None, None], block.end(), block.state))
    pages, outs = [], []
    for number in range(-(-(queries + STATE_BLOCK - 1) // STATE_BLOCK)):  # as many as T tokens may touch
        index = number * STATE_BLOCK + torch.arange(STATE_BLOCK, device=device) - first.unsqueeze(1)
        block, out = advance(block, index >= 0, *(_gather(x, index) for x in tokens))
        pages.append(pack(block))
        outs.append(out)
        block = block._replace(state=block.end())
    _store(state, block_numbers, at, torch.stack(pages, 1), offsets, first)
    index = first.unsqueeze(1) + torch.arange(queries, device=device)
    return _gather(torch.cat(outs, 2), index).transpose(1, 2)


def sums_of_decays(new: Tensor, log_decays: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The sums G [B, H, 16, 1] of a block with new positions, and the share of position i left at j, [B, H, j, i].

    Args:
        new: bool [B, 1, 16, 1].
        log_decays: the logarithms of the decays of new positions, [B, H, 16, 1].
        known: the sums of the other positions, [B, H, 16].
    """
    # The sum before the first new position stands for the decays up to it.
    before = torch.where(new, 0, known.unsqueeze(-1))
    is_last = ~new & torch.cat([new[:, :, 1:], torch.ones_like(new[:, :, :1])], 2)
    sums = torch.where(new, log_decays, torch.where(is_last, before, 0)).cumsum(2)
    decays = torch.where(new, sums, before)
    ahead = torch.ones(STATE_BLOCK, STATE_BLOCK, dtype=torch.bool, device=log_decays.device).triu(1)
    return decays, (decays - decays.mT).masked_fill(ahead, -torch.inf).exp()


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, T, D] at the tokens index [B, L], arbitrary outside of x: [B, H, L, D]."""
    index = index.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _store(
    state: Tensor, block_numbers: Tensor, at: StatePlaces, pages: Tensor, offsets: Tensor, first: Tensor
) -> None:
    """Store the pages [B, M, …] that rows have passed, of which the first has the first token."""
    index = (at.last - 1 - offsets.long() // STATE_BLOCK)[:, None, None, None]
    last = pages.gather(1, index.expand(-1, -1, *pages.shape[2:])).squeeze(1)
    appended = torch.where((first != 0)[:, None, None], pages[:, 0], state[at.slots, at.source])
    at.write(state, block_numbers, appended, last)
