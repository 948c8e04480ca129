"""A forward with its programs: it is traced for a shape when it is first called with it."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from onward.errors import ProgramError
from onward.native import Library
from onward.program.encode import ProgramImage, encode
from onward.program.executable import Arena, NativeExecutable, SamplingKernel, Signature
from onward.program.graph import Forward, KernelCall, Kind, PackedParams, TorchCall, contiguous_strides
from onward.program.leaves import CacheLeaves, LeafCache, without_memory
from onward.program.lower import INFER, fallbacks, is_whole, lower
from onward.program.shapes import MOST_ROWS, Grid, Shape, TraceShape, make_grid
from onward.program.trace import trace
from onward.util.process import renew_in_forks, without_collections

T = TypeVar("T")

# How many programs, and how many families, are kept. Steps have all numbers of tokens, and only the last ones matter.
_MOST_KEPT = 128
# How many traced shapes a family keeps, to confirm a grid with.
_MOST_TRACED = 4

_log = logging.getLogger(__name__)


class MissingKernelsError(ProgramError):
    """A forward uses operators that have no kernel, and the caller refused to let torch run them."""


class LogitsSpec(NamedTuple):
    """Which logits a program computes: so many of `each` row, of the first `rows` rows; None: of all."""

    rows: int | None
    each: int

    def shape(self, batch: int) -> tuple[int, int]:
        return batch if self.rows is None else self.rows, self.each


@dataclass(eq=False)
class _Family:
    """Programs that differ in their numbers of rows and tokens only.

    traced: programs of single shapes. grids: programs for all shapes. tried: the (free axes, fixed sizes) of grids that
    were tried.
    """

    traced: dict[Shape, tuple[ProgramImage, Signature]] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    tried: set[Hashable] = field(default_factory=set)


class ProgramCache:
    """The programs of one forward and its params. They hold neither: `TracedForward` or the caller does.

    All share one arena, so `lock` lets one run at a time. refused: why the forward could not be traced, if so.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.refused = ""
        self._clear()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: drop all programs if another thread was running or making one during the fork."""
        if self.lock.locked():
            self._clear()
        self.lock = threading.Lock()

    def _clear(self) -> None:
        self.arena = Arena()
        self.packed = PackedParams()
        self.families: OrderedDict[Hashable, _Family] = OrderedDict()
        self.by_shape: OrderedDict[Hashable, NativeExecutable] = OrderedDict()
        self.leaves = LeafCache()
        # What ran last, by leaves and shape: a key of `by_shape` has all layers' layouts, to be hashed at every step.
        self.recent: OrderedDict[Hashable, NativeExecutable] = OrderedDict()


class TracedForward:
    """Callable as (tokens int32 [B, T], offsets int32 [B], cache, logits_at or None) -> (logits, cache).

    forward, params: as `onward.models.model` describes them.
    selects_logits: whether forward takes the keyword `logits_at`.
    fallback: "eager" lets torch run the operators that have no kernel, "raise" refuses them.
    most_tokens: the largest T that the one program for every T serves.
    frozen: params will not change, and products with matrices may take packed copies of them.
    programs: programs made before, of the same forward and the same tensors in params; new ones are added to them.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        library: Library,
        *,
        selects_logits: bool = False,
        fallback: str = "eager",
        most_tokens: int = 512,
        frozen: bool = False,
        programs: ProgramCache | None = None,
    ) -> None:
        self._forward = forward
        self._params = params
        self._library = library
        self._selects_logits = selects_logits
        self._fallback = fallback
        self._most_tokens = most_tokens
        self._frozen = frozen
        self._programs = ProgramCache() if programs is None else programs

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        with self._programs.lock:
            self._programs.arena.calls += 1
            leaves = self._programs.leaves.of(cache)
            program = self._program(tokens.shape[0], tokens.shape[1], cache, leaves, logits_at)
            return program(tokens, offsets, leaves, logits_at if self._selects_logits else None), cache

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Any, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Call it for one token a row; also return the ids int64 [B] that `pick` picks, or None if it cannot."""
        with self._programs.lock:
            leaves = self._programs.leaves.of(cache)
            program = self._program(tokens.shape[0], tokens.shape[1], cache, leaves)
            if not program.serves(pick):
                return program(tokens, offsets, leaves, None), None, cache
            return *program.picked(tokens, offsets, leaves, pick, positions), cache

    def timed(
        self, tokens: Tensor, offsets: Tensor, cache: Any, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it `rounds` times; return its kernel and torch calls, each with its mean seconds."""
        with self._programs.lock:
            leaves = self._programs.leaves.of(cache)
            # Traced for exactly this shape: the calls of a grid's program know the sizes of its largest shape only.
            image, signature = self._traced(Shape(*tokens.shape), None, cache)
            program = NativeExecutable(image, signature, self._library, self._programs.arena)
            return program.timed(tokens, offsets, leaves, rounds)

    def prepare(self, batch: int, tokens: int, cache: Any) -> NativeExecutable:
        """The program for these shapes; it is made if there is none."""
        with self._programs.lock:
            return self._program(batch, tokens, cache, self._programs.leaves.of(cache))

    def _program(
        self, batch: int, tokens: int, cache: Any, leaves: CacheLeaves, logits_at: Tensor | None = None
    ) -> NativeExecutable:
        wanted = None
        if logits_at is not None and self._selects_logits:
            rows, each = logits_at.shape
            wanted = LogitsSpec(None if rows == batch else rows, each)
        shape = batch, tokens, wanted

        def make() -> NativeExecutable:
            with without_collections():
                return self._make(Shape(batch, tokens), wanted, cache, leaves)

        def by_shape() -> NativeExecutable:
            return _get_or_make(self._programs.by_shape, (*shape, leaves.signature), make)

        return _get_or_make(self._programs.recent, (leaves, shape), by_shape)

    def _make(self, shape: Shape, wanted: LogitsSpec | None, cache: Any, leaves: CacheLeaves) -> NativeExecutable:
        several = shape.batch > 1
        layouts = leaves.for_any_rows(shape.batch)
        family = _get_or_make(self._programs.families, (several, shape.tokens > 1, wanted, layouts), _Family)

        def trace_shape(shape: Shape) -> tuple[ProgramImage, Signature]:
            return self._traced(shape, wanted, without_memory(cache, layouts, shape.batch))

        grid = self._grid(family, shape, trace_shape)
        if grid is not None:
            image, signature = grid.image(shape), _resized(grid.signature, shape, wanted)
        else:
            image, signature = family.traced.get(shape) or trace_shape(shape)
            if len(family.traced) < _MOST_TRACED:
                family.traced[shape] = image, signature
        return NativeExecutable(image, signature, self._library, self._programs.arena)

    def _grid(self, family: _Family, shape: Shape, trace_shape: TraceShape) -> Grid | None:
        """A grid of the family that covers the shape. It is made when a second shape of the family is asked for."""
        for grid in family.grids:
            if grid.covers(shape):
                return grid
        if shape in family.traced or shape.tokens > self._most_tokens or shape.batch > MOST_ROWS:
            return None
        for free in _free_axes(family, shape):
            fixed = Shape(0 if free[0] else shape.batch, 0 if free[1] else shape.tokens)
            if (free, fixed) not in family.tried:
                images = {traced_shape: image for traced_shape, (image, _) in family.traced.items()}
                new_grid = make_grid(trace_shape, fixed, free, self._most_tokens, images)
                family.tried.add((free, fixed))
                if new_grid is not None:
                    family.grids.append(new_grid)
                    return new_grid
        return None

    def _traced(self, shape: Shape, wanted: LogitsSpec | None, cache: Any) -> tuple[ProgramImage, Signature]:
        began = time.perf_counter()
        logits_at = None if wanted is None else wanted.shape(shape.batch)
        traced = trace(self._forward, self._params, cache, *shape, logits_at, whole=is_whole, infer=INFER)
        calls = lower(traced, self._programs.packed if self._frozen else None)
        missing = fallbacks(calls)
        if missing and self._fallback == "raise":
            raise MissingKernelsError(f"no kernels for: {_named(missing)}")
        assert traced.logits is not None
        signature = Signature(traced.inputs, traced.cache, traced.logits.shape, traced.logits.dtype)
        image = encode(calls, traced.storages, self._library)
        seconds = time.perf_counter() - began
        _log.debug("a program of %d calls for [%d, %d] tokens was made in %.3f s", len(calls), *shape, seconds)
        return image, signature


def _free_axes(family: _Family, shape: Shape) -> list[tuple[bool, bool]]:
    """The axes (rows, tokens) along which traced shapes differ from this one: both together, then one alone."""
    differing = {(traced.batch != shape.batch, traced.tokens != shape.tokens) for traced in family.traced}
    both = {(True, True)} if any(rows for rows, _ in differing) and any(tokens for _, tokens in differing) else set()
    return sorted((differing | both) - {(False, False)}, reverse=True)


def _resized(largest: Signature, shape: Shape, wanted: LogitsSpec | None) -> Signature:
    """The signature of a grid's largest program, changed to another shape."""
    logits = tuple(shape) if wanted is None else wanted.shape(shape.batch)
    sizes = {Kind.TOKENS: shape, Kind.OFFSETS: (shape.batch,), Kind.LOGITS_AT: logits}
    inputs = {
        kind: replace(array, shape=tuple(sizes[kind]), strides=contiguous_strides(sizes[kind]))
        for kind, array in largest.inputs.items()
    }
    return replace(largest, inputs=inputs, logits_shape=(*logits, largest.logits_shape[2]))


def _get_or_make(entries: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The entry of the key, made if there is none. The entry that was used longest ago makes room for a new one."""
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = make()
        if len(entries) > _MOST_KEPT:
            entries.popitem(last=False)
    else:
        entries.move_to_end(key)
    return entry


def _named(calls: list[TorchCall]) -> str:
    return "; ".join(f"{call.node.name} at {call.node.where} ({call.why})" for call in calls[:8])
