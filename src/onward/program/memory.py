"""A program's memory: one arena for temporaries, and tensors that others own."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onward.errors import ProgramError
from onward.native import advise_huge_pages
from onward.program.arrays import Array, Kind, Storage
from onward.program.encode import Image, Words, arena_offsets

_PAGE = 4096


class Arena:
    """What programs that never run at the same time share: memory for temporaries, as much as the largest one needs.

    calls: how many calls of theirs have looked where the params lie; each program looks at its own once for each.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.calls = 0

    def reserve(self, nbytes: int) -> None:
        if len(self.memory) < nbytes:
            self.memory = _aligned(nbytes)


class Addresses:
    """The words of one image with their addresses filled in, and the tensors that the addresses belong to.

    Inputs, cache and logits are bound for a run and held weakly; params and constants stay.
    """

    def __init__(self, image: Image, arena: Arena) -> None:
        self.words = image.words.copy()
        self.start: int = self.words.ctypes.data
        self._image = image
        self._arena = arena
        self._slot_offsets, self._arena_bytes = arena_offsets(image.slot_bytes)
        self._fixed = [s for s in image.storages if s.kind in (Kind.PARAM, Kind.CONSTANT)]
        self._params = [s.param for s in self._fixed if s.param is not None]
        self._params_at: list[int] = []
        self._memory_of_params: list[weakref.ref[torch.UntypedStorage]] = []
        self._freed: list[object] = []  # of the memory that params had at the last `bind`
        self._looked = 0  # at which of the arena's calls
        self._bound: dict[int, weakref.ref[Tensor]] = {}
        self._bound_arena: Tensor | None = None
        logits = [s for s in image.storages if s.kind is Kind.LOGITS]
        self._logits = logits[0]
        of_logits = image.bases == image.base_of(self._logits)
        # Python numbers, not arrays: there are few, and every step writes them.
        self._logits_at = list(zip(image.places[of_logits].tolist(), image.offsets[of_logits].tolist(), strict=True))

    def stale(self) -> bool:
        """Whether the arena or a param has moved since the last `bind`, or there was none.

        A param moves where another tensor is assigned to its `data`. Memory that is freed by that is never read. Where
        someone keeps it, the next of the arena's calls sees the move: a look at all params takes as long as a kernel.
        """
        if self._arena.memory is not self._bound_arena or self._freed:
            return True
        if self._looked == self._arena.calls:
            return False
        self._looked = self._arena.calls
        return self._params_now() != self._params_at

    def _params_now(self) -> list[int]:
        """Where the params lie; 0 for one that was freed."""
        return [0 if (tensor := param()) is None else tensor.data_ptr() for param in self._params]

    def bind(self, inputs: Sequence[tuple[Storage, Tensor]]) -> None:
        """Fill in every address. inputs: the tensors of all storages but params, constants, temporaries and logits.

        Raises:
            ProgramError: a param was freed, or has another shape, strides or dtype than the program was made for.
        """
        for storage in self._fixed:
            _check_param(storage)
        self._watch_params()
        self._arena.reserve(self._arena_bytes)
        tensors = {storage.index: storage.tensor for storage in self._fixed}
        tensors |= {storage.index: tensor for storage, tensor in inputs}
        self._bound = {storage.index: weakref.ref(tensor) for storage, tensor in inputs}
        image = self._image
        addresses = np.zeros(1 + len(self._slot_offsets) + len(image.storages), dtype=np.int64)
        addresses[0] = self.start
        addresses[1 : 1 + len(self._slot_offsets)] = self._arena.memory.data_ptr() + self._slot_offsets
        for index, tensor in tensors.items():
            assert tensor is not None, "checked above"
            addresses[1 + len(self._slot_offsets) + index] = tensor.data_ptr()
        self.words[image.places] = addresses[image.bases] + image.offsets
        self._bound_arena = self._arena.memory

    def _watch_params(self) -> None:
        now = self._params_now()
        if self._freed or now != self._params_at:
            tensors = [tensor for param in self._params if (tensor := param()) is not None]
            freed: list[object] = []
            self._memory_of_params = [weakref.ref(tensor.untyped_storage(), freed.append) for tensor in tensors]
            self._freed = freed
            self._params_at = now

    def point_logits(self, logits: Tensor) -> None:
        """Let the program write its logits into this tensor."""
        self._bound[self._logits.index] = weakref.ref(logits)
        address = logits.data_ptr()
        for place, offset in self._logits_at:
            self.words[place] = address + offset

    def put(self, place: int, words: Sequence[int]) -> None:
        """Write words into the code."""
        self.words[place : place + len(words)] = words

    def tensor(self, array: Array) -> Tensor:
        """A torch tensor over an array's memory, as of the last `bind`."""
        size = array.dtype.itemsize
        if array.storage.kind is Kind.TEMPORARY:
            slot = self._image.slots[array.storage.index]
            begin = int(self._slot_offsets[slot])
            raw = self._arena.memory[begin : begin + int(self._image.slot_bytes[slot]) // size * size]
            memory = raw.view(array.dtype)
        else:
            reference = self._bound.get(array.storage.index)
            owner = array.storage.tensor if reference is None else reference()
            assert owner is not None
            # The array counts from the owner's first element, whatever the owner's own shape is.
            memory = owner if owner.dtype == array.dtype else owner.view(array.dtype)
            return torch.as_strided(memory, array.shape, array.strides, owner.storage_offset() + array.offset)
        return torch.as_strided(memory, array.shape, array.strides, memory.storage_offset() + array.offset)


def _check_param(storage: Storage) -> None:
    tensor = storage.tensor
    if tensor is None:
        raise ProgramError(
            f"{storage.name} has been freed since the program was made: compile the forward with the params of now, or "
            "write new weights in place (tensor.copy_)"
        )
    if storage.param is not None and (tensor.shape, tensor.stride(), tensor.dtype) != storage.layout:
        raise ProgramError(
            f"{storage.name} has another shape, strides or dtype than the program was made for; got {tensor.dtype} "
            f"{list(tensor.shape)}: compile the forward with the params of now"
        )


def _aligned(nbytes: int) -> Tensor:
    """uint8 memory that begins on a page."""
    memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % _PAGE
    pages = memory[skip : skip + nbytes]
    advise_huge_pages(pages.data_ptr(), nbytes)
    return pages


__all__ = ["Addresses", "Arena", "Words"]
