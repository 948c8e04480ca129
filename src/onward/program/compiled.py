"""A forward with its programs: traced for the shapes it meets, when it meets them."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import ProgramError
from onward.native import Library
from onward.program.arrays import Kind
from onward.program.calls import KernelCall, TorchCall
from onward.program.encode import Image, encode
from onward.program.lower import fallbacks, is_whole, lower
from onward.program.lowering import INFER
from onward.program.memory import Arena
from onward.program.native import NativeProgram, Signature
from onward.program.shapes import FIRST, SECOND, Line, line_through
from onward.program.trace import trace

Forward = Callable[..., tuple[Tensor, Any]]

# Programs kept: of a prompt's odd lengths only the last ones matter.
_KEPT = 32


class MissingKernelsError(ProgramError):
    """A forward uses operators that have no kernel, and that was not allowed."""


@dataclass(eq=False)
class _Family:
    """Programs that differ in their number of tokens. line: one for all of them, once two were asked for."""

    seen: set[int] = field(default_factory=set)
    line: Line | None = None
    tried: bool = False


class CompiledForward:
    """Callable as (tokens int32 [B, T], offsets int32 [B], cache, logits_at or None) -> (logits, cache).

    forward, params: as of the contract in `onward.models.model`.
    selects_logits: whether forward takes the keyword `logits_at`.
    fallback: "eager" lets torch run the operators that have no kernel, "raise" refuses them.
    most_tokens: the largest T that one program for every T is made for.
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
    ) -> None:
        self._forward = forward
        self._params = params
        self._library = library
        self._selects_logits = selects_logits
        self._fallback = fallback
        self._most = most_tokens
        self._arena = Arena()
        self._programs: OrderedDict[Any, NativeProgram] = OrderedDict()
        self._families: dict[Any, _Family] = {}
        self._signatures: tuple[Any, Any] = (None, None)  # of the cache seen last
        self._lock = threading.Lock()  # one arena: one run at a time

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        with self._lock:
            program = self.program(tokens.shape[0], tokens.shape[1], cache, logits_at)
            return program(tokens, offsets, cache, logits_at if self._selects_logits else None), cache

    def timed(
        self, tokens: Tensor, offsets: Tensor, cache: Any, rounds: int
    ) -> list[tuple[KernelCall | TorchCall, float]]:
        """Run it `rounds` times; the mean seconds of each of its calls."""
        with self._lock:
            return self.program(tokens.shape[0], tokens.shape[1], cache).timed(tokens, offsets, cache, rounds)

    def program(self, batch: int, tokens: int, cache: Any, logits_at: Tensor | None = None) -> NativeProgram:
        """The program for these shapes, made where there is none."""
        wanted = None if logits_at is None or not self._selects_logits else logits_at.shape[1]
        key = (batch, tokens, wanted, self._cache_signature(cache))
        program = self._programs.get(key)
        if program is None:
            program = self._make(key, cache)
            self._programs[key] = program
            if len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(key)
        return program

    def _cache_signature(self, cache: Any) -> Any:
        if self._signatures[0] is not cache or not isinstance(cache, tuple):
            leaves = [leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, Tensor)]
            found = tuple((tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) for leaf in leaves)
            self._signatures = (cache, found)
        return self._signatures[1]

    def _make(self, key: Any, cache: Any) -> NativeProgram:
        batch, tokens, wanted, signature = key
        family = self._families.setdefault((batch, wanted, signature), _Family())
        if 1 < tokens <= self._most and tokens not in family.seen:
            family.seen.add(tokens)
            if len(family.seen) > 1 and not family.tried:
                family.tried = True
                family.line = self._line(batch, wanted, cache)
            if family.line is not None:
                return self._from_line(family.line, batch, tokens, wanted)
        image, made = self._traced(batch, tokens, wanted, cache)
        return NativeProgram(image, made, self._library, self._arena)

    def _from_line(self, line: Line, batch: int, tokens: int, wanted: int | None) -> NativeProgram:
        made = line.signature
        inputs = dict(made.inputs)
        inputs[Kind.TOKENS] = replace(inputs[Kind.TOKENS], shape=(batch, tokens), strides=(tokens, 1))
        shape = (batch, tokens if wanted is None else wanted, made.logits_shape[2])
        signature = replace(made, inputs=inputs, logits_shape=shape)
        return NativeProgram(line.image(tokens), signature, self._library, self._arena)

    def _line(self, batch: int, wanted: int | None, cache: Any) -> Line | None:
        at = (FIRST, SECOND, self._most)
        if self._most <= SECOND:
            return None
        (first, _), (second, _), (last, signature) = (self._traced(batch, tokens, wanted, cache) for tokens in at)
        return line_through((first, second, last), at, signature)

    def _traced(self, batch: int, tokens: int, wanted: int | None, cache: Any) -> tuple[Image, Signature]:
        traced = trace(self._forward, self._params, cache, batch, tokens, wanted, whole=is_whole, infer=INFER)
        calls = lower(traced)
        missing = fallbacks(calls)
        if missing and self._fallback == "raise":
            raise MissingKernelsError(f"no kernels for: {_listed(missing)}")
        assert traced.logits is not None
        made = Signature(traced.inputs, traced.cache, traced.logits.shape, traced.logits.dtype)
        return encode(calls, traced.storages, self._library), made


def _listed(calls: list[TorchCall]) -> str:
    return "; ".join(f"{call.node.name} at {call.node.where} ({call.why})" for call in calls[:8])
