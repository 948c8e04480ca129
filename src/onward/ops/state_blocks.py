"""Rows that go through blocks of 16 positions, in plain torch: for the definitions of `gated_delta` and `ssd`.

Shapes: B rows, H heads, T tokens, D features; K and V are the features of a key and of what a position adds at it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from onward.ops.state import STATE_BLOCK, Places


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
    at: Places,
    offsets: Tensor,
    tokens: Sequence[Tensor],
    through: Callable[..., tuple[Block, Tensor]],
) -> Tensor:
    """The outputs [B, T, H, V] of tokens, whose blocks are stored.

    Args:
        block: what lies at the source of each row.
        state, held, at, offsets: as in `onward.ops.state`.
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


def _store(state: Tensor, held: Tensor, at: Places, pages: Tensor, offsets: Tensor, first: Tensor) -> None:
    """Store what the rows went through, pages [B, M, …], of which the first is that of the first token."""
    index = (at.last - 1 - offsets.long() // STATE_BLOCK)[:, None, None, None]
    last = pages.gather(1, index.expand(-1, -1, *pages.shape[2:])).squeeze(1)
    appended = torch.where((first != 0)[:, None, None], pages[:, 0], state[at.slots, at.source])
    at.write(state, held, appended, last)
