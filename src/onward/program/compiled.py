"""A forward with its programs: traced for the shapes it meets, when it meets them."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from onward.errors import ProgramError
from onward.forks import renew_in_forks
from onward.native import Library
from onward.program.arrays import Kind
from onward.program.calls import KernelCall, TorchCall
from onward.program.encode import Image, encode
from onward.program.leaves import CacheLeaves, for_any_rows, imagined
from onward.program.lower import fallbacks, is_whole, lower
from onward.program.lowering import INFER
from onward.program.lowering.builder import contiguous_strides
from onward.program.memory import Arena
from onward.program.native import NativeProgram, Pick, Signature
from onward.program.shapes import MOST_ROWS, Grid, Shape, through
from onward.program.trace import trace

Forward = Callable[..., tuple[Tensor, Any]]
T = TypeVar("T")

# Programs kept, and families of them: of a prompt's odd lengths only the last ones matter.
_KEPT = 32
# Traced shapes that a family remembers, to confirm a grid with.
_REMEMBERED = 4

_log = logging.getLogger(__name__)


class MissingKernelsError(ProgramError):
    """A forward uses operators that have no kernel, and that was not allowed."""


@dataclass(eq=False)
class _Family:
    """Programs that differ in their numbers of rows and tokens. known: some that were traced. grids: for all shapes."""

    known: dict[Shape, tuple[Image, Signature]] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    tried: set[Hashable] = field(default_factory=set)


class Programs:
    """The programs of one forward and its params. They hold neither: `CompiledForward` does, or whoever calls.

    One arena, so one run at a time: `lock`. refused: why the forward cannot be traced, once that was tried.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.refused = ""
        self._clear()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child: a program that another thread was running, or making, is not run on."""
        if self.lock.locked():
            self._clear()
        self.lock = threading.Lock()

    def _clear(self) -> None:
        self.arena = Arena()
        self.families: OrderedDict[Hashable, _Family] = OrderedDict()
        self.by_shape: OrderedDict[Hashable, NativeProgram] = OrderedDict()
        self.leaves: CacheLeaves | None = None  # of the cache seen last
        self.last: tuple[CacheLeaves, Hashable, NativeProgram] | None = None  # what ran last, and for which shapes


class CompiledForward:
    """Callable as (tokens int32 [B, T], offsets int32 [B], cache, logits_at or None) -> (logits, cache).

    forward, params: as of the contract in `onward.models.model`.
    selects_logits: whether forward takes the keyword `logits_at`.
    fallback: "eager" lets torch run the operators that have no kernel, "raise" refuses them.
    most_tokens: the largest T that one program for every T is made for.
    programs: those that were made before, of the same forward and the same tensors in params.
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
        programs: Programs | None = None,
    ) -> None:
        self._forward = forward
        self._params = params
        self._library = library
        self._selects_logits = selects_logits
        self._fallback = fallback
        self._most = most_tokens
        self._programs = Programs() if programs is None else programs

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        with self._programs.lock:
            leaves = self._leaves(cache)
            program = self._program(tokens.shape[0], tokens.shape[1], cache, leaves, logits_at)
            return program(tokens, offsets, leaves, logits_at if self._selects_logits else None), cache

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Any, pick: Pick, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Any]:
        """As a call, with the ids int64 [B] that `pick` finds in the logits of a single token; None if it cannot."""
        with self._programs.lock:
            leaves = self._leaves(cache)
            program = self._program(tokens.shape[0], tokens.shape[1], cache, leaves)
            if not program.serves(pick):
                return program(tokens, offsets, leaves, None), None, cache
            return *program.picked(tokens, offsets, leaves, pick, positions), cache

    def timed(
        self, tokens: Tensor, offsets: Tensor, cache: Any, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it `rounds` times; the mean seconds of each of its calls."""
        with self._programs.lock:
            leaves = self._leaves(cache)
            # Of exactly this shape: the calls of a grid's program know the sizes of its largest only.
            image, made = self._traced(Shape(*tokens.shape), None, cache)
            program = NativeProgram(image, made, self._library, self._programs.arena)
            return program.timed(tokens, offsets, leaves, rounds)

    def prepare(self, batch: int, tokens: int, cache: Any) -> NativeProgram:
        """The program for these shapes, made where there is none."""
        with self._programs.lock:
            return self._program(batch, tokens, cache, self._leaves(cache))

    def _leaves(self, cache: Any) -> CacheLeaves:
        leaves = self._programs.leaves
        if leaves is None or not leaves.are_of(cache):
            leaves = self._programs.leaves = CacheLeaves(cache)
        return leaves

    def _program(
        self, batch: int, tokens: int, cache: Any, leaves: CacheLeaves, logits_at: Tensor | None = None
    ) -> NativeProgram:
        wanted = None if logits_at is None or not self._selects_logits else logits_at.shape[1]
        shape, last = (batch, tokens, wanted), self._programs.last
        # Mostly the same again. A signature is as long as the model is deep, and would be hashed at every step.
        if last is not None and last[0] is leaves and last[1] == shape:
            return last[2]
        key = (*shape, leaves.signature)
        program = _kept(self._programs.by_shape, key, lambda: self._make(Shape(batch, tokens), wanted, cache, leaves))
        self._programs.last = (leaves, shape, program)
        return program

    def _make(self, shape: Shape, wanted: int | None, cache: Any, leaves: CacheLeaves) -> NativeProgram:
        several = shape.batch > 1
        signature = for_any_rows(leaves.signature, shape.batch) if several else leaves.signature
        family = _kept(self._programs.families, (several, shape.tokens > 1, wanted, signature), _Family)

        def traced(shape: Shape) -> tuple[Image, Signature]:
            return self._traced(shape, wanted, imagined(cache, signature, shape.batch))

        grid = self._grid(family, shape, traced)
        if grid is not None:
            image, made = grid.image(shape), _resized(grid.signature, shape, wanted)
        else:
            image, made = family.known.get(shape) or traced(shape)
            if len(family.known) < _REMEMBERED:
                family.known[shape] = image, made
        return NativeProgram(image, made, self._library, self._programs.arena)

    def _grid(self, family: _Family, shape: Shape, traced: Callable[[Shape], tuple[Image, Signature]]) -> Grid | None:
        """The programs for all shapes of a family, this one among them, as soon as a second one is asked for."""
        for grid in family.grids:
            if grid.covers(shape):
                return grid
        if shape in family.known or shape.tokens > self._most or shape.batch > MOST_ROWS:
            return None
        for free in _axes(family, shape):
            fixed = Shape(0 if free[0] else shape.batch, 0 if free[1] else shape.tokens)
            if (free, fixed) not in family.tried:
                known = {each: image for each, (image, _) in family.known.items()}
                made = through(traced, fixed, free, self._most, known)
                family.tried.add((free, fixed))
                if made is not None:
                    family.grids.append(made)
                    return made
        return None

    def _traced(self, shape: Shape, wanted: int | None, cache: Any) -> tuple[Image, Signature]:
        began = time.perf_counter()
        traced = trace(self._forward, self._params, cache, *shape, wanted, whole=is_whole, infer=INFER)
        calls = lower(traced)
        missing = fallbacks(calls)
        if missing and self._fallback == "raise":
            raise MissingKernelsError(f"no kernels for: {_listed(missing)}")
        assert traced.logits is not None
        made = Signature(traced.inputs, traced.cache, traced.logits.shape, traced.logits.dtype)
        image = encode(calls, traced.storages, self._library)
        seconds = time.perf_counter() - began
        _log.debug("a program of %d calls for [%d, %d] tokens was made in %.3f s", len(calls), *shape, seconds)
        return image, made


def _axes(family: _Family, shape: Shape) -> list[tuple[bool, bool]]:
    """Along which axes, rows and tokens, shapes were asked for that differ from this one: both, or one alone."""
    differing = {(known.batch != shape.batch, known.tokens != shape.tokens) for known in family.known}
    both = {(True, True)} if any(rows for rows, _ in differing) and any(tokens for _, tokens in differing) else set()
    return sorted((differing | both) - {(False, False)}, reverse=True)


def _resized(made: Signature, shape: Shape, wanted: int | None) -> Signature:
    """The signature of a grid's largest program for another shape."""
    count = shape.tokens if wanted is None else wanted
    sizes = {Kind.TOKENS: shape, Kind.OFFSETS: (shape.batch,), Kind.LOGITS_AT: (shape.batch, count)}
    inputs = {
        kind: replace(array, shape=tuple(sizes[kind]), strides=contiguous_strides(sizes[kind]))
        for kind, array in made.inputs.items()
    }
    return replace(made, inputs=inputs, logits_shape=(shape.batch, count, made.logits_shape[2]))


def _kept(among: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """What was made for the key before, or is now; the one used longest ago makes room."""
    found = among.get(key)
    if found is None:
        found = among[key] = make()
        if len(among) > _KEPT:
            among.popitem(last=False)
    else:
        among.move_to_end(key)
    return found


def _listed(calls: list[TorchCall]) -> str:
    return "; ".join(f"{call.node.name} at {call.node.where} ({call.why})" for call in calls[:8])
