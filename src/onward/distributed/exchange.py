"""Exchanges between ranks of one machine through memory that they share: microseconds, where TCP takes half a
millisecond."""

import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# The most bytes that a rank gives at once; a token's features take a few thousand.
MOST_BYTES = 2**20
_LINE = 64
# How often a rank looks whether the others are there, before it lets other threads and processes run.
_LOOKS = 50
# Looks between two checks of whether the others live.
_CHECK = 20_000


def is_usable() -> bool:
    """Whether this machine shares memory in the way that is needed: a processor that shows stores in their order, which
    a rank's data and the number that announces them are."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and Path("/dev/shm").is_dir()


class Exchange:
    """A place in memory for each rank, twice: a rank that has gone on to the next exchange does not write where another
    still reads. When it goes on to the one after, all have been at the next, so nobody reads there any more.

    file: of `new_file`. rank: its number. world: how many there are. check: raises where another rank has ended.
    """

    def __init__(self, file: Path, rank: int, world: int, check: Callable[[], None] = lambda: None) -> None:
        self.file = file
        self._rank, self._world, self._check = rank, world, check
        with file.open("r+b") as opened:
            memory = torch.frombuffer(mmap.mmap(opened.fileno(), nbytes_for(world)), dtype=torch.uint8)
        self._places = memory[world * _LINE :].view(2, world, MOST_BYTES)
        lines = memory[: world * _LINE].numpy().view(np.int64).reshape(world, _LINE // 8)
        self._reached = lines[:, 0]  # the last exchange to which each rank has given its data
        self._count = 0

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is small enough."""
        return x.nbytes <= MOST_BYTES

    def gathered(self, x: Tensor) -> list[Tensor]:
        """The contiguous tensors of one shape that all ranks give, in their order. They are valid until the next."""
        self._count += 1
        places = self._places[self._count % 2]
        places[self._rank, : x.nbytes] = x.view(-1).view(torch.uint8)
        self._reached[self._rank] = self._count
        self._await()
        return [place[: x.nbytes].view(x.dtype).view(x.shape) for place in places]

    def _await(self) -> None:
        """Wait until every rank has given its data."""
        looks = 0
        while int(self._reached.min()) < self._count:
            looks += 1
            if looks > _LOOKS:
                time.sleep(0)
            if looks % _CHECK == 0:
                self._check()


def nbytes_for(world: int) -> int:
    """Bytes of the memory for so many ranks."""
    return world * (_LINE + 2 * MOST_BYTES)


def new_file(world: int) -> Path:
    """An empty file in memory for an `Exchange`; to be removed when all ranks have it open."""
    handle, name = tempfile.mkstemp(prefix="onward-", dir="/dev/shm")
    with os.fdopen(handle, "wb") as file:
        file.truncate(nbytes_for(world))
    return Path(name)
