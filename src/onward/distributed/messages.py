"""What rank 0 tells the others, as integers."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(IntEnum):
    """END: there is no more. The others are of a memory of blocks: a new one of so many blocks, or one that nobody uses
    any more; a block's positions copied to another; blocks that hold nothing; a row's positions to be read or written;
    and a forward over rows of it."""

    END = 0
    NEW = 1
    FORGET = 2
    COPY = 3
    GIVE_BACK = 4
    READ = 5
    WRITE = 6
    FORWARD = 7


class Forward(NamedTuple):
    """What a rank needs for its part of a forward of [B, T] tokens.

    offsets: int32 [B]. table: int32 [B, m], the blocks up to each row's last position. at: int64 [R, N], the positions
    that are wanted at the end; None: all.
    """

    memory: int
    tokens: int
    offsets: Tensor
    table: Tensor
    at: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def has_result(self) -> bool:
        """Whether hidden states come back to rank 0."""
        return self.at is None or self.at.numel() > 0

    def numbers(self) -> list[int]:
        rows, each = (-1, 0) if self.at is None else self.at.shape
        head = [self.memory, self.tokens, self.rows, self.table.shape[1], rows, each]
        at = [] if self.at is None else self.at.flatten().tolist()
        return [*head, *self.offsets.tolist(), *self.table.flatten().tolist(), *at]

    @staticmethod
    def of(numbers: Sequence[int]) -> "Forward":
        memory, tokens, rows, width, wanted, each = numbers[:6]
        offsets, rest = numbers[6 : 6 + rows], numbers[6 + rows :]
        table, at = rest[: rows * width], rest[rows * width :]
        return Forward(
            memory,
            tokens,
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32).view(rows, width),
            None if wanted < 0 else torch.tensor(at, dtype=torch.int64).view(wanted, each),
        )
