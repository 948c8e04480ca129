"""A program of native kernels for one shape: its image, bound to the arena of temporaries and to tensors with other
owners."""

import bisect
import ctypes
import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library, advise_huge_pages
from onward.native.interface import Status
from onward.ops.kernel_calls import DTYPES
from onward.program.encode import SAMPLING_WORDS, ProgramImage, Segment, arena_offsets
from onward.program.graph import Array, KernelCall, Kind, Storage, TorchCall
from onward.program.leaves import CacheLeaves
from onward.program.step import ForwardBatch, SamplingKernel, StepResult

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

    The cache, inputs and logits are bound for a run and weakly referenced; params and constants stay bound.
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
        self._runs_torch = any(segment.then is not None for segment in image.segments)
        # The words of the tensors that are new in every step: Python numbers, not arrays, because they are few.
        self._places: dict[int, list[tuple[int, int]]] = {}
        for storage in image.storages:
            if storage.kind in (Kind.TOKENS, Kind.OFFSETS, Kind.LOGITS_AT, Kind.LOGITS, Kind.TAP):
                uses = image.bases == image.base_of(storage)
                words = zip(image.places[uses].tolist(), image.offsets[uses].tolist(), strict=True)
                self._places[storage.index] = list(words)

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

    def bind(self, cache: Sequence[tuple[Storage, Tensor]]) -> None:
        """Fill in the addresses of the cache, the params, the constants and the temporaries.

        Raises:
            ProgramError: a param was freed, or has another shape, strides or dtype than at compilation.
        """
        for storage in self._fixed:
            _check_param(storage)
        self._watch_params()
        self._arena.reserve(self._arena_bytes)
        tensors = {storage.index: storage.tensor for storage in self._fixed}
        tensors |= {storage.index: tensor for storage, tensor in cache}
        self._bound = {storage.index: weakref.ref(tensor) for storage, tensor in cache}
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

    def point(self, storage: Storage, tensor: Tensor) -> None:
        """Fill in the address of an input or of the logits, after `bind`."""
        if self._runs_torch:
            self._bound[storage.index] = weakref.ref(tensor)
        address = tensor.data_ptr()
        for place, offset in self._places[storage.index]:
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

    inputs: tokens, offsets and optionally logits_at. cache: the tensors of the cache, in order. taps: by name.
    """

    inputs: dict[Kind, Array]
    cache: list[Array]
    logits_shape: tuple[int, ...]
    logits_dtype: torch.dtype
    taps: dict[str, Array] = field(default_factory=dict)


# The bits of a float as an integer, and those of its exponent; all of the latter are set in infinities and NaN.
_EXPONENTS = {
    torch.float32: (ctypes.c_uint32, 0x7F80_0000),
    torch.bfloat16: (ctypes.c_uint16, 0x7F80),
    torch.float16: (ctypes.c_uint16, 0x7C00),
}

# The index of the argument that is the table's number of rows, for kernels that look up rows.
_TABLE_ROWS = {"onward_gather_rows": 4, "onward_linear_rows": 1}


class ShapeProgram:
    """Runs one image, for one shape of tokens. It is not thread-safe: programs that share an arena share a lock."""

    def __init__(self, image: ProgramImage, signature: Signature, library: Library, arena: Arena) -> None:
        self.image = image
        self.signature = signature
        self._library = library
        self._addresses = Addresses(image, arena)
        kinds = [kind for kind in (Kind.TOKENS, Kind.OFFSETS, Kind.LOGITS_AT) if kind in signature.inputs]
        self._inputs = [signature.inputs[kind] for kind in kinds]
        self._logits = next(storage for storage in image.storages if storage.kind is Kind.LOGITS)
        self._failed = ctypes.c_int64(-1)
        self._end = image.segments[-1].end
        self._leaves: CacheLeaves | None = None  # the leaves of the bound cache
        self._seconds: list[float] | None = None  # the time of each call, while timing
        # The length of the rows of logits that a kernel can sample from: one for each row of tokens.
        one_each = signature.logits_shape[1] == 1 == signature.inputs[Kind.TOKENS].shape[1]
        samples = one_each and Kind.LOGITS_AT not in signature.inputs and signature.logits_dtype in DTYPES
        self._sampled_ids = signature.logits_shape[2] if samples else 0

    def step(self, batch: ForwardBatch, leaves: CacheLeaves, sampler: SamplingKernel | None = None) -> StepResult:
        """Run the program over a cache of its signature, with these leaves."""
        tokens, offsets, cache, logits_at, _ = batch
        signature, addresses = self.signature, self._addresses
        inputs = list(map(_as_input, self._inputs, (tokens, offsets, logits_at)))
        logits = torch.empty(signature.logits_shape, dtype=signature.logits_dtype)
        if leaves is not self._leaves or addresses.stale():
            self._bind(leaves)
        for array, tensor in zip(self._inputs, inputs, strict=True):
            addresses.point(array.storage, tensor)
        addresses.point(self._logits, logits)
        taps = {name: torch.empty(array.shape, dtype=array.dtype) for name, array in signature.taps.items()}
        for name, values in taps.items():
            addresses.point(signature.taps[name].storage, values)
        if sampler is None or not 0 < self._sampled_ids <= sampler.most_ids:
            self._run(offsets)
            return StepResult(logits, None, cache, taps)
        rows, _, columns = signature.logits_shape
        ids, operands = torch.empty(rows, dtype=torch.int64), sampler.operands(offsets)
        args = [rows, columns, logits.data_ptr(), DTYPES[signature.logits_dtype], columns]
        args += [operand.data_ptr() for operand in operands]
        words = [self._library.instructions[sampler.kernel], len(args) + 1, *args, ids.data_ptr()]
        assert len(words) <= SAMPLING_WORDS, f"{sampler.kernel} has too many arguments"
        addresses.words[self._end : self._end + len(words)] = words
        self._run(offsets, len(words))
        return StepResult(logits, ids if self._are_finite(logits, ids.tolist()) else None, cache, taps)

    def _are_finite(self, logits: Tensor, ids: list[int]) -> bool:
        """Whether all ids have finite logits. NaN wins every argmax, so this finds one anywhere in a row. Reading the
        bits takes a tenth of the time of indexing the tensor."""
        row, (word, exponent) = logits.data_ptr(), _EXPONENTS[self.signature.logits_dtype]
        size = ctypes.sizeof(word)
        for token in ids:
            in_row = 0 <= token < self._sampled_ids
            if not in_row or word.from_address(row + token * size).value & exponent == exponent:
                return False
            row += self._sampled_ids * size
        return True

    def _bind(self, leaves: CacheLeaves) -> None:
        self._leaves = None  # set last: an interrupt may leave the binding incomplete
        storages = [array.storage for array in self.signature.cache]
        self._addresses.bind(list(zip(storages, leaves.tensors(), strict=True)))
        self._leaves = leaves

    def timed(
        self, batch: ForwardBatch, leaves: CacheLeaves, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run the program once, then `rounds` times; return each call with its mean time in seconds."""
        self.step(batch, leaves)
        calls = self.image.calls
        self._seconds = [0.0] * len(calls)
        try:
            for _ in range(rounds):
                self.step(batch, leaves)
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
        node, leaves = call.node, () if self._leaves is None else self._leaves.tensors()
        whole = dict(zip(self.signature.cache, leaves, strict=True))  # which may have more blocks than were traced
        tensor = lambda array: whole[array] if array in whole else self._addresses.tensor(array)  # noqa: E731
        args, kwargs = pytree.tree_map_only(Array, tensor, (node.args, node.kwargs))
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


def _as_input(array: Array, tensor: Tensor | None) -> Tensor:
    """The tensor as the input that `array` describes."""
    assert tensor is not None, "logits_at is in the program's key"
    assert tensor.shape == array.shape, "an input has the shape that it was traced with"
    if tensor.dtype is array.dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", array.dtype).contiguous()


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
