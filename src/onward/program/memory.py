"""Where a program's memory is: one arena for temporaries, and tensors that others own."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onward.native import advise_huge_pages
from onward.program.arrays import Array, Kind, Storage
from onward.program.encode import Image, Words, arena_offsets

_PAGE = 4096


class Arena:
    """Memory that programs which never run at the same time share; it grows to the largest's need."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        if len(self.memory) < nbytes:
            self.memory = _aligned(nbytes)


class Addresses:
    """The memory behind the storages of one image, and its words with the addresses in.

    Inputs, cache and logits are given and held weakly; params and constants stay.
    """

    def __init__(self, image: Image, arena: Arena) -> None:
        self.words = image.words.copy()
        self.start: int = self.words.ctypes.data
        self._image = image
        self._arena = arena
        self._slot_offsets, self._arena_bytes = arena_offsets(image.slot_bytes)
        self._fixed = [s for s in image.storages if s.kind in (Kind.PARAM, Kind.CONSTANT)]
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._bound: Tensor | None = None
        logits = [s for s in image.storages if s.kind is Kind.LOGITS]
        self._logits = logits[0]
        of_logits = image.bases == image.base_of(self._logits)
        # Numbers and no arrays: there are few, and this is done at every step.
        self._logits_at = list(zip(image.places[of_logits].tolist(), image.offsets[of_logits].tolist(), strict=True))

    def stale(self) -> bool:
        """Whether the arena has moved since the last `bind`, or there was none."""
        return self._arena.memory is not self._bound

    def bind(self, given: Sequence[tuple[Storage, Tensor]]) -> None:
        """Point every address at the memory it means."""
        self._arena.reserve(self._arena_bytes)
        tensors = {storage.index: storage.tensor for storage in self._fixed}
        tensors |= {storage.index: tensor for storage, tensor in given}
        self._given = {storage.index: weakref.ref(tensor) for storage, tensor in given}
        image = self._image
        addresses = np.zeros(1 + len(self._slot_offsets) + len(image.storages), dtype=np.int64)
        addresses[0] = self.start
        addresses[1 : 1 + len(self._slot_offsets)] = self._arena.memory.data_ptr() + self._slot_offsets
        for index, tensor in tensors.items():
            assert tensor is not None, "params that a program was traced with are gone"
            addresses[1 + len(self._slot_offsets) + index] = tensor.data_ptr()
        self.words[image.places] = addresses[image.bases] + image.offsets
        self._bound = self._arena.memory

    def point_logits(self, logits: Tensor) -> None:
        """Have the logits written into this tensor."""
        self._given[self._logits.index] = weakref.ref(logits)
        address = logits.data_ptr()
        for place, offset in self._logits_at:
            self.words[place] = address + offset

    def put(self, place: int, words: Sequence[int]) -> None:
        """Write words into the code."""
        self.words[place : place + len(words)] = words

    def tensor(self, array: Array) -> Tensor:
        """A torch tensor over an array's memory, as bound last."""
        size = array.dtype.itemsize
        if array.storage.kind is Kind.TEMPORARY:
            slot = self._image.slots[array.storage.index]
            begin = int(self._slot_offsets[slot])
            raw = self._arena.memory[begin : begin + int(self._image.slot_bytes[slot]) // size * size]
            memory = raw.view(array.dtype)
        else:
            given = self._given.get(array.storage.index)
            owned = array.storage.tensor if given is None else given()
            assert owned is not None
            # A leaf's own shape says nothing of the array's: both count from the leaf's first element.
            memory = owned if owned.dtype == array.dtype else owned.view(array.dtype)
            return torch.as_strided(memory, array.shape, array.strides, owned.storage_offset() + array.offset)
        return torch.as_strided(memory, array.shape, array.strides, memory.storage_offset() + array.offset)


def _aligned(nbytes: int) -> Tensor:
    """uint8 memory that begins on a page."""
    memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % _PAGE
    found = memory[skip : skip + nbytes]
    advise_huge_pages(found.data_ptr(), nbytes)
    return found


__all__ = ["Addresses", "Arena", "Words"]
