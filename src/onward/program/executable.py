"""A program of native kernels: its arena for temporaries, the tensors that others own, and its image bound to both."""

import ctypes
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library, advise_huge_pages
from onward.native.structs import Status
from onward.ops.operator import DTYPES
from onward.program.encode import ROOM_AT_END, ProgramImage, Segment, arena_offsets
from onward.program.graph import Array, KernelCall, Kind, Storage, TorchCall
from onward.program.leaves import CacheLeaves

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

    def __init__(self, image: ProgramImage, arena: Arena) -> None:
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


@dataclass(frozen=True, eq=False)
class Signature:
    """The inputs of a program and its result.

    inputs: tokens, offsets and perhaps logits_at. cache: its tensors, in order.
    """

    inputs: dict[Kind, Array]
    cache: list[Array]
    logits_shape: tuple[int, ...]
    logits_dtype: torch.dtype


class SamplingKernel(Protocol):
    """A kernel that picks an id from each row of logits; a program may call it at its end.

    kernel: its name. It takes rows, columns, logits, their dtype and stride, the tensors that `operands` returns for
        the positions [B] of the picked tokens, and the int64 [B] to write ids into.
    most_ids: the longest row that it takes.
    """

    kernel: str
    most_ids: int

    def operands(self, positions: Tensor) -> tuple[Tensor, ...]: ...


# Which argument of the kernels that look rows up is the number of the table's rows.
_TABLE_ROWS = {"onward_gather_rows": 4, "onward_linear_rows": 1}


class NativeExecutable:
    """Runs one image. It is not for two threads at once: programs that share an arena share a lock."""

    def __init__(self, image: ProgramImage, signature: Signature, library: Library, arena: Arena) -> None:
        self.image = image
        self.signature = signature
        self._library = library
        self._addresses = Addresses(image, arena)
        self._inputs = {kind: torch.empty(array.shape, dtype=array.dtype) for kind, array in signature.inputs.items()}
        self._input_storages = {kind: array.storage for kind, array in signature.inputs.items()}
        self._failed = ctypes.c_int64(-1)
        self._end = image.segments[-1].end
        self._leaves: CacheLeaves | None = None  # of the cache whose addresses are in the code
        self._seconds: list[float] | None = None  # of each call, while it is timed

    def __call__(self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, logits_at: Tensor | None) -> Tensor:
        """Run it over a cache of the signature it was made for. The logits are a new tensor."""
        logits = self._prepared(tokens, offsets, leaves, logits_at)
        self._run(offsets)
        return logits

    def serves(self, pick: SamplingKernel) -> bool:
        """Whether `pick` takes the logits: one position a row, of a length and dtype that it can read."""
        shape, dtype = self.signature.logits_shape, self.signature.logits_dtype
        return len(shape) == 3 and shape[1] == 1 and 0 < shape[2] <= pick.most_ids and dtype in DTYPES

    def picked(
        self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run it, and in the same native call pick the ids int64 [B] from its logits: (logits, ids)."""
        logits = self._prepared(tokens, offsets, leaves, None)
        rows, _, columns = logits.shape
        ids, operands = torch.empty(rows, dtype=torch.int64), pick.operands(positions)
        args = [rows, columns, logits.data_ptr(), DTYPES[logits.dtype], columns]
        args += [operand.data_ptr() for operand in operands]
        words = [self._library.instruction(pick.kernel), len(args) + 1, *args, ids.data_ptr()]
        assert len(words) <= ROOM_AT_END, f"{pick.kernel} takes more arguments than there is room for"
        self._addresses.put(self._end, words)
        self._run(offsets, len(words))
        return logits, ids

    def _prepared(self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, logits_at: Tensor | None) -> Tensor:
        """Put inputs and addresses in place; return the tensor that the logits will be written to."""
        logits = torch.empty(self.signature.logits_shape, dtype=self.signature.logits_dtype)
        self._inputs[Kind.TOKENS].copy_(tokens)
        self._inputs[Kind.OFFSETS].copy_(offsets)
        if logits_at is not None:
            self._inputs[Kind.LOGITS_AT].copy_(logits_at)
        if leaves is not self._leaves or self._addresses.stale():
            self._bind(leaves)
        self._addresses.point_logits(logits)
        return logits

    def _bind(self, leaves: CacheLeaves) -> None:
        self._leaves = None  # until the end: an interrupt may leave the binding half done
        inputs = [(self._input_storages[kind], tensor) for kind, tensor in self._inputs.items()]
        storages = [array.storage for array in self.signature.cache]
        self._addresses.bind([*inputs, *zip(storages, leaves.tensors(), strict=True)])
        self._leaves = leaves

    def timed(
        self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it once, then `rounds` times; return each call with its mean seconds over the rounds."""
        self(tokens, offsets, leaves, None)
        calls = self.image.calls
        self._seconds = [0.0] * len(calls)
        try:
            for _ in range(rounds):
                self(tokens, offsets, leaves, None)
            return [(call, seconds / rounds) for call, seconds in zip(calls, self._seconds, strict=True)]
        finally:
            self._seconds = None

    def _run(self, offsets: Tensor, words_at_end: int = 0) -> None:
        """Run all segments. words_at_end: the words of the call that was put behind the program."""
        done = 0
        for segment in self.image.segments:
            end = segment.end + (words_at_end if segment is self.image.segments[-1] else 0)
            if end > segment.begin:
                self._run_kernels(segment, end, done, offsets)
            done += segment.calls
            if segment.then is not None:
                began = time.perf_counter()
                self._run_torch(segment.then)
                if self._seconds is not None:
                    self._seconds[done] += time.perf_counter() - began
                done += 1

    def _run_kernels(self, segment: Segment, end: int, first: int, offsets: Tensor) -> None:
        nanoseconds = None if self._seconds is None else (ctypes.c_int64 * segment.calls)()
        status = self._library.onward_program_run(
            self._addresses.start + 8 * segment.begin,
            end - segment.begin,
            ctypes.addressof(self._failed),
            None if nanoseconds is None else ctypes.addressof(nanoseconds),
        )
        if status != Status.OK:
            self._fail(status, segment.begin + self._failed.value, offsets)
        if self._seconds is not None and nanoseconds is not None:
            for index, spent in enumerate(nanoseconds):
                self._seconds[first + index] += spent * 1e-9

    def _run_torch(self, call: TorchCall) -> None:
        """Run an operator on tensors over the program's memory. They are made anew: kept ones would hold the cache."""
        node = call.node

        def to_tensor(leaf: Any) -> Any:
            return self._addresses.tensor(leaf) if isinstance(leaf, Array) else leaf

        args, kwargs = pytree.tree_map(to_tensor, (node.args, node.kwargs))
        results = [leaf for leaf in pytree.tree_leaves(node.op(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for array, result in zip(node.outputs, results, strict=False):
            self._addresses.tensor(array).copy_(result)

    def _fail(self, status: int, place: int, offsets: Tensor) -> None:
        reason = Status(status).name.lower().replace("_", " ")
        if place == self._end:
            raise ProgramError(f"the kernel that picks a token failed ({reason}); please report it")
        call = self._call_at(place)
        raise ProgramError(f"{call.kernel} failed ({reason}) at {call.node.where}: {_likely_cause(call, offsets)}")

    def _call_at(self, place: int) -> KernelCall:
        at = 0
        for call in self.image.calls:
            if isinstance(call, KernelCall):
                if at == place:
                    return call
                at += 2 + len(call.args)
        raise AssertionError(place)


def _likely_cause(call: KernelCall, offsets: Tensor) -> str:
    if call.kernel in ("onward_heads", "onward_attention", "onward_index"):
        return (
            f"offsets {offsets.tolist()} and the tokens after them must lie within the cache: make a longer cache, or "
            "stop before it is full"
        )
    if call.kernel in _TABLE_ROWS:
        rows = call.args[_TABLE_ROWS[call.kernel]]
        return (
            f"an index outside a table of {rows} rows: a token id outside the vocabulary, or a position past the last"
        )
    return "the kernel cannot take these arguments; this is a defect of onward, please report it"
