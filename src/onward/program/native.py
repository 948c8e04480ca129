"""A program of native kernels: its image, bound to memory, and run."""

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library
from onward.native.interface import Status
from onward.ops.operators import DTYPES
from onward.program.arrays import Array, Kind
from onward.program.calls import KernelCall, TorchCall
from onward.program.encode import ROOM_AT_END, Image, Segment
from onward.program.leaves import CacheLeaves
from onward.program.memory import Addresses, Arena


@dataclass(frozen=True, eq=False)
class Signature:
    """The inputs of a program and its result.

    inputs: tokens, offsets and perhaps logits_at. cache: its tensors, in order.
    """

    inputs: dict[Kind, Array]
    cache: list[Array]
    logits_shape: tuple[int, ...]
    logits_dtype: torch.dtype


class Pick(Protocol):
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


class NativeProgram:
    """Runs one image. It is not for two threads at once: programs that share an arena share a lock."""

    def __init__(self, image: Image, signature: Signature, library: Library, arena: Arena) -> None:
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

    def serves(self, pick: Pick) -> bool:
        """Whether `pick` takes the logits: one position a row, of a length and dtype that it can read."""
        shape, dtype = self.signature.logits_shape, self.signature.logits_dtype
        return len(shape) == 3 and shape[1] == 1 and 0 < shape[2] <= pick.most_ids and dtype in DTYPES

    def picked(
        self, tokens: Tensor, offsets: Tensor, leaves: CacheLeaves, pick: Pick, positions: Tensor
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
