"""A program of native kernels: its image, bound to the arena of temporaries and to tensors with other owners."""

import bisect
import ctypes
import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library, advise_huge_pages
from onward.native.structs import Status
from onward.ops.operator import DTYPES
from onward.program.encode import SAMPLING_WORDS, ProgramImage, Segment, arena_offsets
from onward.program.graph import Array, KernelCall, Kind, Storage, TorchCall
from onward.program.leaves import CacheLeaves

_PAGE = 4096


class Arena:
    """Memory for temporaries, shared by programs that never run concurrently and sized for the largest one.

    calls: the number of calls so far that check the addresses of params; each program checks once per call.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.calls = 0

    def reserve(self, nbytes: int) -> None:
        if len(self.memory) < nbytes:
            self.memory = _aligned(nbytes)


class Addresses:
    """The words of one image with their addresses filled in, and the tensors of these addresses.

    Inputs, cache and logits are bound for a run and weakly referenced; params and constants stay bound.
    """

    def __init__(self, image: ProgramImage, arena: Arena) -> None:
        self.words = image.words.copy()
        self.start: int = self.words.ctypes.data
        self._image = image
        self._arena = arena
        self._slot_offsets, self._arena_bytes = arena_offsets(image.slot_bytes)
        self._fixed = [s for s in image.storages if s.kind in (Kind.PARAM, Kind.CONSTANT)]
        self._params = [s.param for s in self._fixed if s.param is not None]
        self._param_addresses: list[int] = []
        self._param_memory: list[weakref.ref[torch.UntypedStorage]] = []
        self._freed: list[object] = []  # memory of params that was freed since the last `bind`
        self._checked = 0  # the last of the arena's calls that checked the params
        self._bound: dict[int, weakref.ref[Tensor]] = {}
        self._bound_arena: Tensor | None = None
        self._logits = next(s for s in image.storages if s.kind is Kind.LOGITS)
        uses_logits = image.bases == image.base_of(self._logits)
        # Python numbers, not arrays: they are few, and every step writes them.
        self._logits_words = list(
            zip(image.places[uses_logits].tolist(), image.offsets[uses_logits].tolist(), strict=True)
        )

    def stale(self) -> bool:
        """Whether the arena or a param has moved since the last `bind`, or `bind` was never called.

        A param moves when another tensor is assigned to its `data`. Memory that this frees is never read. If the old
        memory stays alive, the next of the arena's calls detects the move: checking all params takes as long as a
        kernel.
        """
        if self._arena.memory is not self._bound_arena or self._freed:
            return True
        if self._checked == self._arena.calls:
            return False
        self._checked = self._arena.calls
        return self._current_addresses() != self._param_addresses

    def _current_addresses(self) -> list[int]:
        """The addresses of the params; 0 for a freed one."""
        return [0 if (tensor := param()) is None else tensor.data_ptr() for param in self._params]

    def bind(self, inputs: Sequence[tuple[Storage, Tensor]]) -> None:
        """Fill in every address. inputs: the tensors of all storages except params, constants, temporaries and logits.

        Raises:
            ProgramError: a param was freed, or has another shape, strides or dtype than at compilation.
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
            assert tensor is not None  # checked above
            addresses[1 + len(self._slot_offsets) + index] = tensor.data_ptr()
        self.words[image.places] = addresses[image.bases] + image.offsets
        self._bound_arena = self._arena.memory

    def _watch_params(self) -> None:
        addresses = self._current_addresses()
        if self._freed or addresses != self._param_addresses:
            tensors = [tensor for param in self._params if (tensor := param()) is not None]
            freed: list[object] = []
            self._param_memory = [weakref.ref(tensor.untyped_storage(), freed.append) for tensor in tensors]
            self._freed = freed
            self._param_addresses = addresses

    def point_logits(self, logits: Tensor) -> None:
        """Make the program write its logits to this tensor."""
        self._bound[self._logits.index] = weakref.ref(logits)
        address = logits.data_ptr()
        for place, offset in self._logits_words:
            self.words[place] = address + offset

    def tensor(self, array: Array) -> Tensor:
        """A torch tensor over an array's memory, as of the last `bind`."""
        if array.storage.kind is Kind.TEMPORARY:
            size, slot = array.dtype.itemsize, self._image.slots[array.storage.index]
            start = int(self._slot_offsets[slot])
            memory = self._arena.memory[start : start + int(self._image.slot_bytes[slot]) // size * size]
            memory = memory.view(array.dtype)
            offset = memory.storage_offset()
        else:
            reference = self._bound.get(array.storage.index)
            owner = array.storage.tensor if reference is None else reference()
            assert owner is not None
            # The array's offset counts from the owner's first element, whatever the owner's shape.
            memory = owner if owner.dtype == array.dtype else owner.view(array.dtype)
            offset = owner.storage_offset()
        return torch.as_strided(memory, array.shape, array.strides, offset + array.offset)


def _check_param(storage: Storage) -> None:
    tensor = storage.tensor
    if tensor is None:
        raise ProgramError(
            f"{storage.name} has been freed since the program was compiled: compile the forward with the current "
            "params, or write new weights in place (tensor.copy_)"
        )
    if storage.param is not None and (tensor.shape, tensor.stride(), tensor.dtype) != storage.layout:
        raise ProgramError(
            f"{storage.name} has another shape, strides or dtype than at compilation; got {tensor.dtype} "
            f"{list(tensor.shape)}: compile the forward with the current params"
        )


def _aligned(nbytes: int) -> Tensor:
    """uint8 memory that starts on a page boundary."""
    memory = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
    padding = -memory.data_ptr() % _PAGE
    pages = memory[padding : padding + nbytes]
    advise_huge_pages(pages.data_ptr(), nbytes)
    return pages


@dataclass(frozen=True, eq=False)
class Signature:
    """The inputs and the result of a program.

    inputs: tokens, offsets and optionally logits_at. cache: the tensors of the cache, in order.
    """

    inputs: dict[Kind, Array]
    cache: list[Array]
    logits_shape: tuple[int, ...]
    logits_dtype: torch.dtype


class SamplingKernel(Protocol):
    """A kernel that samples an id from each row of logits; a program may call it at its end.

    kernel: its name. Its arguments are rows, columns, logits, their dtype and stride, the tensors that `operands`
        returns for the positions [B] of the sampled tokens, and the output ids int64 [B].
    most_ids: the maximum length of a row.
    """

    kernel: str
    most_ids: int

    def operands(self, positions: Tensor) -> tuple[Tensor, ...]: ...


# The index of the argument that is the table's number of rows, for kernels that look up rows.
_TABLE_ROWS = {"onward_gather_rows": 4, "onward_linear_rows": 1}


class NativeExecutable:
    """Runs one image. It is not thread-safe: programs that share an arena share a lock."""

    def __init__(self, image: ProgramImage, signature: Signature, library: Library, arena: Arena) -> None:
        self.image = image
        self.signature = signature
        self._library = library
        self._addresses = Addresses(image, arena)
        self._inputs = {kind: torch.empty(array.shape, dtype=array.dtype) for kind, array in signature.inputs.items()}
        self._input_storages = {kind: array.storage for kind, array in signature.inputs.items()}
        self._failed = ctypes.c_int64(-1)
        self._end = image.segments[-1].end
        self._leaves: CacheLeaves | None = None  # the leaves of the bound cache
        self._seconds: list[float] | None = None  # the time of each call, while timing

    def __call__(self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, logits_at: Tensor | None) -> Tensor:
        """Run the program over a cache of its signature. The logits are a new tensor."""
        logits = self._prepare(tokens, offsets, leaves, logits_at)
        self._run(offsets)
        return logits

    def serves(self, pick: SamplingKernel) -> bool:
        """Whether `pick` supports the logits: one position per row, of a supported length and dtype."""
        shape, dtype = self.signature.logits_shape, self.signature.logits_dtype
        return len(shape) == 3 and shape[1] == 1 and 0 < shape[2] <= pick.most_ids and dtype in DTYPES

    def picked(
        self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the program, and sample the ids int64 [B] in the same native call: (logits, ids)."""
        logits = self._prepare(tokens, offsets, leaves, None)
        rows, _, columns = logits.shape
        ids, operands = torch.empty(rows, dtype=torch.int64), pick.operands(positions)
        args = [rows, columns, logits.data_ptr(), DTYPES[logits.dtype], columns]
        args += [operand.data_ptr() for operand in operands]
        words = [self._library.instruction(pick.kernel), len(args) + 1, *args, ids.data_ptr()]
        assert len(words) <= SAMPLING_WORDS, f"{pick.kernel} has too many arguments"
        self._addresses.words[self._end : self._end + len(words)] = words
        self._run(offsets, len(words))
        return logits, ids

    def _prepare(self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, logits_at: Tensor | None) -> Tensor:
        """Copy the inputs and bind all addresses; return the output tensor of the logits."""
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
        self._leaves = None  # set last: an interrupt may leave the binding incomplete
        inputs = [(self._input_storages[kind], tensor) for kind, tensor in self._inputs.items()]
        storages = [array.storage for array in self.signature.cache]
        self._addresses.bind([*inputs, *zip(storages, leaves.tensors(), strict=True)])
        self._leaves = leaves

    def timed(
        self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run the program once, then `rounds` times; return each call with its mean time in seconds."""
        self(tokens, offsets, leaves, None)
        calls = self.image.calls
        self._seconds = [0.0] * len(calls)
        try:
            for _ in range(rounds):
                self(tokens, offsets, leaves, None)
            return [(call, seconds / rounds) for call, seconds in zip(calls, self._seconds, strict=True)]
        finally:
            self._seconds = None

    def _run(self, offsets: Tensor, sampling_words: int = 0) -> None:
        """Run all segments. sampling_words: the length of the sampling call that follows the program."""
        done = 0
        for segment in self.image.segments:
            end = segment.end + (sampling_words if segment is self.image.segments[-1] else 0)
            if end > segment.begin:
                self._run_kernels(segment, end, done, offsets)
            done += segment.calls
            if segment.then is not None:
                start = time.perf_counter()
                self._run_torch(segment.then)
                if self._seconds is not None:
                    self._seconds[done] += time.perf_counter() - start
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
            for index, elapsed in enumerate(nanoseconds, start=first):
                self._seconds[index] += elapsed * 1e-9

    def _run_torch(self, call: TorchCall) -> None:
        """Run an operator on tensors over the program's memory. Cached tensors would keep the KV cache alive."""
        node = call.node
        args, kwargs = pytree.tree_map_only(Array, self._addresses.tensor, (node.args, node.kwargs))
        results = [leaf for leaf in pytree.tree_leaves(node.op(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for array, result in zip(node.outputs, results, strict=False):
            self._addresses.tensor(array).copy_(result)

    def _fail(self, status: int, place: int, offsets: Tensor) -> None:
        reason = Status(status).name.lower().replace("_", " ")
        if place == self._end:
            raise ProgramError(f"the sampling kernel failed ({reason}); please report it")
        kernel_calls = [call for call in self.image.calls if isinstance(call, KernelCall)]
        ends = list(itertools.accumulate(2 + len(call.args) for call in kernel_calls))
        call = kernel_calls[bisect.bisect_right(ends, place)]
        raise ProgramError(f"{call.kernel} failed ({reason}) at {call.node.where}: {_likely_cause(call, offsets)}")


def _likely_cause(call: KernelCall, offsets: Tensor) -> str:
    if call.kernel in ("onward_heads", "onward_attention", "onward_index"):
        return (
            f"offsets {offsets.tolist()} and the tokens after them must lie within the cache: use a longer cache, or "
            "stop before it is full"
        )
    if call.kernel in _TABLE_ROWS:
        rows = call.args[_TABLE_ROWS[call.kernel]]
        return f"an index outside a table of {rows} rows: a token id outside the vocabulary, or a position past the end"
    return "the kernel does not support these arguments; this is a bug in onward, please report it"
