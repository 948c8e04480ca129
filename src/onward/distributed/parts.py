"""Parts of a forward that go through a pipeline one after the other."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from onward.ops.blocks import BLOCK

# The fewest tokens of a prompt, and the fewest rows, of which a part pays: each part reads all weights of a rank. Eight
# rows of a 0.6B model in two parts took twice as long as in one process (benchmarks/LOG.md).
_LEAST_TOKENS = 32
_LEAST_ROWS = 16


class Part(NamedTuple):
    """Some rows of a forward, or some tokens of its only row.

    tokens: int32 [B, T]. offsets: int32 [B]. table: int32 [B, M]. at: int64 [R, N], the positions
    whose logits are wanted; None: all.
    """

    tokens: Tensor
    offsets: Tensor
    table: Tensor
    at: Tensor | None

    @property
    def wanted(self) -> tuple[int, int]:
        """The shape of the positions whose logits come back."""
        shape = self.tokens.shape if self.at is None else self.at.shape
        return shape[0], shape[1]

    @property
    def has_result(self) -> bool:
        return self.at is None or self.at.numel() > 0


def parts_of(whole: Part, most: int) -> list[Part]:
    """At most `most` parts, which together are the forward. Their results in order are its logits.

    A row that another row reads goes with it: a layer stores the keys and values of all rows before it reads any.
    """
    tokens, offsets, table, at = whole
    rows, count = tokens.shape
    if rows == 1 and at is not None and at.shape[0] == 1 and count >= 2 * _LEAST_TOKENS:
        return _of_tokens(whole, min(most, count // _LEAST_TOKENS))
    if (
        rows < 2 * _LEAST_ROWS
        or (count == 1 and _share_blocks(offsets, table))
        or (at is not None and at.shape[0] != rows)
    ):
        return [whole]
    most = min(most, rows // _LEAST_ROWS)
    cuts = [rows * index // most for index in range(most + 1)]
    return [
        Part(tokens[a:b], offsets[a:b], table[a:b], None if at is None else at[a:b])
        for a, b in itertools.pairwise(cuts)
    ]


def _of_tokens(whole: Part, most: int) -> list[Part]:
    """The tokens of a row cut into runs. The positions that are wanted must lie in the last one."""
    count = whole.tokens.shape[1]
    cuts = [count * index // most for index in range(most + 1)]
    assert whole.at is not None
    if whole.at.numel() and int(whole.at.min()) < cuts[-2]:
        return [whole]
    nothing = whole.at[:0]
    return [
        whole._replace(
            tokens=whole.tokens[:, a:b], offsets=whole.offsets + a, at=whole.at - a if b == count else nothing
        )
        for a, b in itertools.pairwise(cuts)
    ]


def _share_blocks(offsets: Tensor, table: Tensor) -> bool:
    """Whether a row may read what another row writes: a block where some row's token goes is in another row's table."""
    at = (offsets // BLOCK).long()
    written = table.gather(1, at.unsqueeze(1)).squeeze(1)
    if len(set(written.tolist())) < len(written):
        return True
    used = torch.arange(table.shape[1]) <= at.unsqueeze(1)
    read = torch.where(used, table, -1)
    return any(int((read == block).any(1).sum()) > 1 for block in written)
