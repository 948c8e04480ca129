"""Native programs of a forward, which are traced, lowered to kernel calls and encoded when it is first called with a
shape."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onward import ops as _registered  # noqa: F401 - registers the kernels of ops
from onward.errors import ProgramError
from onward.native import Library
from onward.ops.kernel_calls import Unsupported
from onward.ops.operator import KERNELS

# Importing these modules registers their rules.
from onward.program import aten_matrices, aten_pointwise, aten_shapes  # noqa: F401
from onward.program.builder import RULES, Builder, named_arguments
from onward.program.encode import ProgramImage, encode
from onward.program.executable import Arena, ShapeProgram, Signature
from onward.program.fuse import FusedNode, FuseItem, rewrite
from onward.program.graph import Array, Forward, KernelCall, Kind, Node, PackedParams, ProgramCall, TorchCall, Trace
from onward.program.leaves import CacheLeaves, LeafCache, without_memory
from onward.program.shapes import MAX_ROWS, MAX_TOKENS, Grid, Shape, TraceShape, make_grid
from onward.program.step import ForwardBatch, SamplingKernel, StepResult
from onward.program.trace import trace
from onward.util.process import renew_in_forks, without_collections

T = TypeVar("T")

# The number of cached programs and of cached families. Steps have any number of tokens; only recent shapes recur.
_MAX_CACHED = 128
# The number of traced shapes that a family caches, to confirm a grid with.
_MAX_TRACED = 4

_log = logging.getLogger(__name__)


class MissingKernelsError(ProgramError):
    """A forward uses operators without a kernel, and the caller does not allow torch to run them."""


class LogitsSpec(NamedTuple):
    """The logits that a program computes: `per_row` of each of the first `rows` rows. rows: None for all rows."""

    rows: int | None
    per_row: int

    def shape(self, batch: int) -> tuple[int, int]:
        return batch if self.rows is None else self.rows, self.per_row


@dataclass(eq=False)
class _Family:
    """Programs that only differ in their numbers of rows and tokens.

    traced: programs of single shapes. grids: programs for ranges of shapes. tried: the (free axes, fixed sizes) of all
    attempted grids.
    """

    traced: dict[Shape, tuple[ProgramImage, Signature]] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    tried: set[Hashable] = field(default_factory=set)


class ProgramCache:
    """The programs of one forward and its params, which `NativeExecutable` or the caller owns.

    All share one arena, so `lock` serializes their runs. refused: why the forward could not be traced, if so.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.refused = ""
        self._clear()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: drop all programs if another thread was using them during the fork."""
        if self.lock.locked():
            self._clear()
        self.lock = threading.Lock()

    def _clear(self) -> None:
        self.arena = Arena()
        self.packed = PackedParams()
        self.families: OrderedDict[Hashable, _Family] = OrderedDict()
        self.by_shape: OrderedDict[Hashable, ShapeProgram] = OrderedDict()
        self.leaves = LeafCache()
        # By leaves and shape: a key of `by_shape` contains all layers' layouts, too many to hash at every step.
        self.recent: OrderedDict[Hashable, ShapeProgram] = OrderedDict()


class NativeExecutable:
    """An `Executable` of native programs, one for each shape of tokens, logits and cache.

    forward, params: as in `onward.compile`.
    needs_kernels: refuse operators without a kernel instead of running them with torch.
    frozen: params will not change, so products with matrices may use packed copies.
    programs: the programs of the same forward and the same tensors in params; new ones are added.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        library: Library,
        *,
        needs_kernels: bool,
        frozen: bool,
        programs: ProgramCache | None,
    ) -> None:
        self._forward = forward
        self._params = params
        self._library = library
        self._needs_kernels = needs_kernels
        self._frozen = frozen
        self._programs = ProgramCache() if programs is None else programs

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        tokens, _, cache, logits_at, taps = batch
        with self._programs.lock:
            if sampler is None:
                self._programs.arena.calls += 1
            leaves = self._programs.leaves.of(cache)
            program = self._program(tokens.shape[0], tokens.shape[1], cache, leaves, logits_at, taps)
            return program.step(batch, leaves, sampler)

    def timed(self, batch: ForwardBatch, rounds: int) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it `rounds` times; return its kernel and torch calls with their mean times in seconds."""
        with self._programs.lock:
            leaves = self._programs.leaves.of(batch.cache)
            # Traced for exactly this shape: the calls of a grid's program have the sizes of its largest shape.
            image, signature = self._traced(Shape(*batch.tokens.shape), None, (), batch.cache)
            program = ShapeProgram(image, signature, self._library, self._programs.arena)
            return program.timed(batch, leaves, rounds)

    def prepare(self, batch: int, tokens: int, cache: Any) -> ShapeProgram:
        """The program for these shapes, created if necessary."""
        with self._programs.lock:
            return self._program(batch, tokens, cache, self._programs.leaves.of(cache))

    def _program(
        self,
        batch: int,
        tokens: int,
        cache: Any,
        leaves: CacheLeaves,
        logits_at: Tensor | None = None,
        taps: tuple[str, ...] = (),
    ) -> ShapeProgram:
        spec = None
        if logits_at is not None:
            rows, per_row = logits_at.shape
            spec = LogitsSpec(None if rows == batch else rows, per_row)
        shape = batch, tokens, spec, taps

        def create() -> ShapeProgram:
            with without_collections():
                return self._create(Shape(batch, tokens), spec, taps, cache, leaves)

        def by_shape() -> ShapeProgram:
            return _get_or_create(self._programs.by_shape, (*shape, leaves.signature), create)

        return _get_or_create(self._programs.recent, (leaves, shape), by_shape)

    def _create(
        self, shape: Shape, spec: LogitsSpec | None, taps: tuple[str, ...], cache: Any, leaves: CacheLeaves
    ) -> ShapeProgram:
        layouts = leaves.for_any_rows(shape.batch)
        key = shape.batch > 1, shape.tokens > 1, spec, taps, layouts
        family = _get_or_create(self._programs.families, key, _Family)

        def trace_shape(shape: Shape) -> tuple[ProgramImage, Signature]:
            return self._traced(shape, spec, taps, without_memory(cache, layouts, shape.batch))

        grid = _covering_grid(family, shape, trace_shape)
        if grid is not None:
            image, signature = grid.image(shape), _resized(grid.signature, shape, spec)
        else:
            image, signature = family.traced.get(shape) or trace_shape(shape)
            if len(family.traced) < _MAX_TRACED:
                family.traced[shape] = image, signature
        return ShapeProgram(image, signature, self._library, self._programs.arena)

    def _traced(
        self, shape: Shape, spec: LogitsSpec | None, taps: tuple[str, ...], cache: Any
    ) -> tuple[ProgramImage, Signature]:
        start = time.perf_counter()
        logits_at = None if spec is None else spec.shape(shape.batch)
        traced = trace(self._forward, self._params, cache, *shape, logits_at, taps)
        calls = lower(traced, self._programs.packed if self._frozen else None)
        missing = [call for call in calls if isinstance(call, TorchCall)]
        if missing and self._needs_kernels:
            names = "; ".join(f"{call.node.name} at {call.node.where} ({call.why})" for call in missing[:8])
            raise MissingKernelsError(f"no kernels for: {names}")
        assert traced.logits is not None
        signature = Signature(traced.inputs, traced.cache, traced.logits.shape, traced.logits.dtype, traced.taps)
        image = encode(calls, traced.storages, self._library)
        seconds = time.perf_counter() - start
        _log.debug("created a program of %d calls for [%d, %d] tokens in %.3f s", len(calls), *shape, seconds)
        return image, signature


def _covering_grid(family: _Family, shape: Shape, trace_shape: TraceShape) -> Grid | None:
    """A grid of the family that covers the shape. It is created for the second shape of the family."""
    for grid in family.grids:
        if grid.covers(shape):
            return grid
    if shape in family.traced or shape.tokens > MAX_TOKENS or shape.batch > MAX_ROWS:
        return None
    for free in _free_axes(family, shape):
        fixed = Shape(0 if free[0] else shape.batch, 0 if free[1] else shape.tokens)
        if (free, fixed) not in family.tried:
            images = {traced_shape: image for traced_shape, (image, _) in family.traced.items()}
            new_grid = make_grid(trace_shape, fixed, free, images)
            family.tried.add((free, fixed))
            if new_grid is not None:
                family.grids.append(new_grid)
                return new_grid
    return None


def _free_axes(family: _Family, shape: Shape) -> list[tuple[bool, bool]]:
    """The axes (rows, tokens) along which traced shapes differ from this one: both axes first, then one axis."""
    differing = {(traced.batch != shape.batch, traced.tokens != shape.tokens) for traced in family.traced}
    both = {(True, True)} if any(rows for rows, _ in differing) and any(tokens for _, tokens in differing) else set()
    return sorted((differing | both) - {(False, False)}, reverse=True)


def _resized(largest: Signature, shape: Shape, spec: LogitsSpec | None) -> Signature:
    """The signature of a grid's largest program, resized to another shape."""
    logits = tuple(shape) if spec is None else spec.shape(shape.batch)
    sizes = {Kind.TOKENS: shape, Kind.OFFSETS: (shape.batch,), Kind.LOGITS_AT: logits}
    inputs = {kind: array.reshaped(sizes[kind]) for kind, array in largest.inputs.items()}
    taps = {name: values.reshaped((*shape, *values.shape[2:])) for name, values in largest.taps.items()}
    return replace(largest, inputs=inputs, logits_shape=(*logits, largest.logits_shape[2]), taps=taps)


def _get_or_create(entries: OrderedDict[Hashable, T], key: Hashable, create: Callable[[], T]) -> T:
    """The entry of the key, created if necessary. A new entry evicts the least recently used one."""
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = create()
        if len(entries) > _MAX_CACHED:
            entries.popitem(last=False)
    else:
        entries.move_to_end(key)
    return entry


def lower(trace: Trace, packed: PackedParams | None = None) -> list[ProgramCall]:
    """The calls of a traced forward, in order: by the kernel functions of Onward's ops, and a rule for each operator of
    torch. The logits are contiguous in a storage of kind LOGITS,
    the values of each tap in one of kind TAP.

    packed: packed copies of frozen params; None if params may change.
    """
    builder = Builder(trace)
    for item in rewrite(trace, packed):
        _lower(builder, item)
    _return_cache(builder)
    assert trace.logits is not None
    trace.logits = _return(builder, trace.logits, Kind.LOGITS)
    trace.taps = {name: _return(builder, values, Kind.TAP) for name, values in trace.taps.items()}
    return builder.calls


def _lower(builder: Builder, item: FuseItem) -> None:
    if isinstance(item, FusedNode):
        builder.node = item.nodes[0]
        item.lower(builder)
        return
    builder.node = item
    before = len(builder.calls)
    try:
        if item.op in KERNELS:
            out = item.outputs if len(item.outputs) > 1 else next(iter(item.outputs), None)
            KERNELS[item.op](builder, out, *(named_arguments(item).values() if item.kwargs else item.args))
        elif item.op in RULES:
            RULES[item.op](builder, item)
        else:
            raise Unsupported("no kernel for this operator")
    except Unsupported as reason:
        del builder.calls[before:]
        builder.calls.append(TorchCall(item, str(reason)))


def _return_cache(builder: Builder) -> None:
    """Copy the values of a returned cache into the input cache, where the forward made new tensors."""
    trace = builder.trace
    changed = [(old, new) for old, new in zip(trace.cache, trace.returned_cache, strict=True) if old != new]
    # Copy to temporaries first: a forward may return the tensors of its cache in another order.
    copies = []
    for old, new in changed:
        builder.node = _return_node(old)
        copies.append((old, builder.cast(new, new.dtype)))
    for old, copy in copies:
        builder.node = _return_node(old)
        builder.copy(copy, old)


def _return(builder: Builder, result: Array, kind: Kind) -> Array:
    """The result as a contiguous array in a storage of this kind."""
    storage = result.storage
    if storage.kind is not Kind.TEMPORARY or not result.is_contiguous() or result.nbytes != storage.nbytes:
        builder.node = _return_node(result)
        result = builder.cast(result, result.dtype)
    result.storage.kind = kind
    return result


def _return_node(array: Array) -> Node:
    return Node(torch.ops.aten.copy_.default, (array, array), {}, (), (array,), "the forward's return value")
