"""A program of native kernels: its image, bound to memory, and run."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library
from onward.native.interface import Status
from onward.program.arrays import Array, Kind, Storage
from onward.program.calls import KernelCall, TorchCall
from onward.program.encode import Image, Segment
from onward.program.memory import Addresses, Arena


@dataclass(frozen=True, eq=False)
class Signature:
    """What goes into a program and what comes out.

    inputs: tokens, offsets and perhaps logits_at. cache: the leaves, in order.
    """

    inputs: dict[Kind, Array]
    cache: list[Array]
    logits_shape: tuple[int, ...]
    logits_dtype: torch.dtype


class NativeProgram:
    """Runs one image. Not for two threads at once: whoever shares an arena shares its lock."""

    def __init__(self, image: Image, signature: Signature, library: Library, arena: Arena) -> None:
        self.image = image
        self.signature = signature
        self._library = library
        self._addresses = Addresses(image, arena)
        self._inputs = {kind: torch.empty(array.shape, dtype=array.dtype) for kind, array in signature.inputs.items()}
        self._input_storages = {kind: array.storage for kind, array in signature.inputs.items()}
        self._failed = ctypes.c_int64(-1)
        self._torch_calls: dict[int, _Prepared] = {}
        self._cache: Any = None
        self._cache_leaves: list[tuple[Storage, Tensor]] = []
        self._seconds: list[float] | None = None  # of each call, while it is timed

    def __call__(self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None) -> Tensor:
        """Run it; logits of their own memory."""
        logits = torch.empty(self.signature.logits_shape, dtype=self.signature.logits_dtype)
        self._inputs[Kind.TOKENS].copy_(tokens)
        self._inputs[Kind.OFFSETS].copy_(offsets)
        if logits_at is not None:
            self._inputs[Kind.LOGITS_AT].copy_(logits_at)
        self._bind(cache)
        self._addresses.point_logits(logits)
        self._run(offsets)
        return logits

    def _bind(self, cache: Any) -> None:
        if cache is not self._cache or not isinstance(cache, tuple):
            leaves = [leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, Tensor)]
            self._check_cache(leaves)
            arrays = self.signature.cache
            self._cache_leaves = [(array.storage, leaf) for array, leaf in zip(arrays, leaves, strict=True)]
            self._cache = cache
            moved = True
        else:
            moved = False
        if moved or self._addresses.stale():
            inputs = [(self._input_storages[kind], tensor) for kind, tensor in self._inputs.items()]
            self._addresses.bind([*inputs, *self._cache_leaves])
            self._torch_calls.clear()

    def _check_cache(self, leaves: Sequence[Tensor]) -> None:
        wanted = self.signature.cache
        fits = len(leaves) == len(wanted) and all(
            tuple(leaf.shape) == array.shape and leaf.dtype == array.dtype and tuple(leaf.stride()) == array.strides
            for leaf, array in zip(leaves, wanted, strict=True)
        )
        if not fits:
            raise ProgramError("the cache is not of the shapes and dtypes that the program was compiled for")

    def timed(
        self, tokens: Tensor, offsets: Tensor, cache: Any, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it `rounds` times after a first; each call with its mean seconds."""
        self(tokens, offsets, cache, None)
        calls = self.image.calls
        self._seconds = [0.0] * len(calls)
        try:
            for _ in range(rounds):
                self(tokens, offsets, cache, None)
            return [(call, seconds / rounds) for call, seconds in zip(calls, self._seconds, strict=True)]
        finally:
            self._seconds = None

    def _run(self, offsets: Tensor) -> None:
        done = 0
        for segment in self.image.segments:
            if segment.end > segment.begin:
                self._run_kernels(segment, done, offsets)
            done += segment.calls
            if segment.then is not None:
                began = time.perf_counter()
                self._run_torch(segment.then)
                if self._seconds is not None:
                    self._seconds[done] += time.perf_counter() - began
                done += 1

    def _run_kernels(self, segment: Segment, first: int, offsets: Tensor) -> None:
        nanoseconds = None if self._seconds is None else (ctypes.c_int64 * segment.calls)()
        status = self._library.onward_program_run(
            self._addresses.words.ctypes.data + 8 * segment.begin,
            segment.end - segment.begin,
            ctypes.addressof(self._failed),
            None if nanoseconds is None else ctypes.addressof(nanoseconds),
        )
        if status != Status.OK:
            self._fail(status, segment.begin + self._failed.value, offsets)
        if self._seconds is not None and nanoseconds is not None:
            for index, spent in enumerate(nanoseconds):
                self._seconds[first + index] += spent * 1e-9

    def _run_torch(self, call: TorchCall) -> None:
        prepared = self._torch_calls.get(id(call))
        if prepared is None:
            prepared = self._torch_calls[id(call)] = _Prepared(call, self._addresses)
        prepared.run()

    def _fail(self, status: int, place: int, offsets: Tensor) -> None:
        call = self._call_at(place)
        what = Status(status).name.lower().replace("_", " ")
        raise ProgramError(f"{call.kernel} failed ({what}) at {call.node.where}: {_likely_cause(call, offsets)}")

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
    if call.kernel in ("onward_gather_rows", "onward_linear_rows"):
        return "a token id outside the vocabulary"
    return "arguments it cannot take; this is a defect of onward, please report it"


class _Prepared:
    """An operator for torch with its tensors at hand."""

    def __init__(self, call: TorchCall, addresses: Addresses) -> None:
        node = call.node

        def real(leaf: Any) -> Any:
            return addresses.tensor(leaf) if isinstance(leaf, Array) else leaf

        self._op = node.op
        self._args, self._kwargs = pytree.tree_map(real, (node.args, node.kwargs))
        self._outputs = [addresses.tensor(array) for array in node.outputs]

    def run(self) -> None:
        made = pytree.tree_leaves(self._op(*self._args, **self._kwargs))
        results = [leaf for leaf in made if isinstance(leaf, Tensor)]
        for to, result in zip(self._outputs, results, strict=False):
            to.copy_(result)
