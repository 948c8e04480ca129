"""Encode calls as the words that the native library runs (native/src/program.cpp), and plan their temporaries.

A program's memory image is its code, followed by the arrays and structures that its kernels take by address. Addresses
are listed separately, as a base and an offset, so that an image can be bound to other tensors.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onward.native import Library
from onward.native.interface import SIGNATURES
from onward.program.graph import Address, KernelCall, Kind, ProgramCall, Storage, TorchCall

ImageWords = npt.NDArray[np.int64]
_ALIGNMENT = 64


@dataclass(eq=False)
class Segment:
    """words[begin:end] of the image, with `calls` kernel calls. then: the operator that torch runs after them."""

    begin: int
    end: int
    calls: int
    then: TorchCall | None = None


@dataclass(eq=False)
class ProgramImage:
    """A program without its addresses.

    words: code and data. places, bases, offsets: words[places[i]] must be set to the address of bases[i] plus
    offsets[i]. Base 0 is the image itself, followed by a base for each slot and one for each storage.
    slot_bytes: the size of each slot; temporaries share slots. slots: the slot of each temporary, by storage index.
    """

    words: ImageWords
    places: ImageWords
    bases: ImageWords
    offsets: ImageWords
    slot_bytes: ImageWords
    slots: dict[int, int]
    storages: list[Storage]
    segments: list[Segment]
    calls: list[ProgramCall]

    def base_of(self, storage: Storage) -> int:
        if storage.kind is Kind.TEMPORARY:
            return 1 + self.slots[storage.index]
        return 1 + len(self.slot_bytes) + storage.index

    @property
    def numbers(self) -> ImageWords:
        """All numbers that may depend on the number of rows or tokens."""
        return np.concatenate((self.words, self.offsets, self.slot_bytes))

    def with_numbers(self, numbers: ImageWords) -> "ProgramImage":
        """The same program for another number of rows or tokens."""
        words, offsets, slot_bytes = np.split(numbers, np.cumsum((len(self.words), len(self.offsets))))
        return replace(self, words=words, offsets=offsets, slot_bytes=slot_bytes)


# Words reserved after the code for a call that samples ids from the logits.
SAMPLING_WORDS = 16


def encode(calls: Sequence[ProgramCall], storages: list[Storage], library: Library) -> ProgramImage:
    """Lay out the code of `calls` and plan the memory of their temporaries."""
    slots, slot_bytes = plan_slots(calls)
    image = _Encoder(library, slots, len(slot_bytes))
    for call in calls:
        if isinstance(call, KernelCall):
            image.add(call)
        else:
            image.cut(call)
    image.finish()
    numbers = (image.words, image.places, image.bases, image.offsets, slot_bytes)
    words, places, bases, offsets, sizes = (np.array(values, dtype=np.int64) for values in numbers)
    return ProgramImage(words, places, bases, offsets, sizes, slots, storages, image.segments, list(calls))


def plan_slots(calls: Sequence[ProgramCall]) -> tuple[dict[int, int], list[int]]:
    """Assign each temporary a slot from its first call to its last: (slot by storage index, bytes of each slot).

    Only temporaries of equal size share a slot, so that the plan is the same for any number of rows and tokens.
    """
    storages = [call.storages() for call in calls]
    last_call = {storage.index: number for number, used in enumerate(storages) for storage in used}
    slots: dict[int, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}
    for number, used in enumerate(storages):
        temporaries = {s.index: s.nbytes for s in used if s.kind is Kind.TEMPORARY}
        for index, nbytes in temporaries.items():
            if index not in slots:
                available = free.setdefault(nbytes, [])
                if not available:
                    available.append(len(sizes))
                    sizes.append(nbytes)
                slots[index] = available.pop()
        for index, nbytes in temporaries.items():
            if last_call[index] == number:
                free[nbytes].append(slots[index])
    return slots, sizes


class _Encoder:
    def __init__(self, library: Library, slots: Mapping[int, int], num_slots: int) -> None:
        self.words: list[int] = []
        self.places: list[int] = []
        self.bases: list[int] = []
        self.offsets: list[int] = []
        self.segments: list[Segment] = []
        self._library = library
        self._slots = slots
        self._num_slots = num_slots
        self._begin = self._calls = 0
        self._data: list[tuple[int, list[Any]]] = []  # (place of the pointer, words of its target)

    def add(self, call: KernelCall) -> None:
        _, kinds = SIGNATURES[call.kernel]
        assert len(kinds) == len(call.args), (call.kernel, len(kinds), len(call.args))
        self._calls += 1
        self.words += (self._library.instructions[call.kernel], len(call.args))
        for kind, argument in zip(kinds, call.args, strict=True):
            self.words.append(self._word(kind, argument, len(self.words)))

    def cut(self, call: TorchCall) -> None:
        self.segments.append(Segment(self._begin, len(self.words), self._calls, call))
        self._begin, self._calls = len(self.words), 0

    def finish(self) -> None:
        """End the code, reserve the words of the sampling call, and append the data."""
        self.segments.append(Segment(self._begin, len(self.words), self._calls))
        self.words += [0] * SAMPLING_WORDS
        for place, data in self._data:
            self._add_address(place, 0, len(self.words) * 8)
            for kind, value in data:
                self.words.append(self._word(kind, value, len(self.words)))

    def _word(self, kind: Any, argument: Any, place: int) -> int:
        if argument is None:
            return 0
        if kind is ctypes.c_float:
            return int(struct.unpack("<I", struct.pack("<f", argument))[0])
        if kind is ctypes.c_double:
            return int(struct.unpack("<q", struct.pack("<d", argument))[0])
        if isinstance(argument, Address):
            temporary = argument.storage.kind is Kind.TEMPORARY
            base = self._slots[argument.storage.index] if temporary else self._num_slots + argument.storage.index
            self._add_address(place, 1 + base, argument.offset)
            return 0
        if isinstance(argument, list | tuple):
            self._data.append((place, _data(kind, argument)))
            return 0
        return int(argument)

    def _add_address(self, place: int, base: int, offset: int) -> None:
        self.places.append(place)
        self.bases.append(base)
        self.offsets.append(offset)


def _data(kind: Any, values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(C type, value) for each word of an array of integers or structures."""
    words: list[tuple[Any, Any]] = []
    for value in values:
        if isinstance(value, Mapping):
            words += _structure(kind._type_, value)
        else:
            words.append((ctypes.c_int64, value))
    return words


def _structure(structure: type[ctypes.Structure], fields: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The 64-bit words of a structure: addresses as they are, numbers in their C layout."""
    numbers = structure()
    kinds = {name: kind for name, kind, *_ in structure._fields_}
    assert not set(fields) - set(kinds), (structure, set(fields) - set(kinds))
    addresses = {}
    for name, value in fields.items():
        if isinstance(value, Address) or (value is None and kinds[name] is ctypes.c_void_p):
            addresses[getattr(structure, name).offset] = value
        elif isinstance(value, list | tuple):
            setattr(numbers, name, kinds[name](*value))
        else:
            setattr(numbers, name, value)
    raw = bytes(numbers)
    raw += bytes(-len(raw) % 8)
    return [
        (ctypes.c_int64, addresses[offset] if offset in addresses else struct.unpack_from("<q", raw, offset)[0])
        for offset in range(0, len(raw), 8)
    ]


def arena_offsets(slot_bytes: ImageWords) -> tuple[ImageWords, int]:
    """(offset of each slot in the arena, bytes of the arena). Slots are aligned to cache lines."""
    padded = (slot_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    ends = np.cumsum(padded)
    return ends - padded, int(ends[-1]) if len(ends) else 0
