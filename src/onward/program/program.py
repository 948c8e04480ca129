"""`onward.compile`: turn a forward into a program, one call a step; and `explain`, which shows where its time goes."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import NativeUnavailableError, ProgramError, RequestError
from onward.native import last_level_cache_bytes
from onward.ops.operator import usable_library
from onward.program.compiled import MissingKernelsError, ProgramCache, TracedForward
from onward.program.cuda_graph import CudaGraphExecutable
from onward.program.executable import SamplingKernel
from onward.program.graph import KernelCall, Kind, TorchCall
from onward.program.leaves import NamedDims, leaves_of
from onward.util.text import described

_ROUNDS = 5
_WIDTH = 80
# Kernels that read some rows of a table, not all of it.
_LOOKUPS = ("onward_gather_rows", "onward_linear_rows")


@dataclass(frozen=True)
class Row:
    """All calls of one kernel for one operator. nbytes, seconds: params read and time spent by all of them."""

    op: str
    kernel: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Missing:
    """An operator that torch runs, where it stands in the user's source, and why."""

    op: str
    where: str
    why: str


@dataclass(frozen=True)
class Report:
    """backend: the one that runs. rows: those with most time first. missing: operators that torch runs. note: why
    another backend was not taken."""

    backend: str
    rows: Sequence[Row]
    missing: Sequence[Missing]
    note: str = ""

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        lines = [f"backend {self.backend}" + (f" ({self.note})" if self.note else "")]
        if self.rows:
            lines.append(f"{'op':<24} {'kernel':<16} {'calls':>5} {'MB':>8} {'us':>9} {'share':>6} {'GB/s':>6}")
            total = self.seconds or 1.0
            # Params that stay in the processor's cache are not read from memory: their rate says nothing about it.
            cached = sum(row.nbytes for row in self.rows) <= last_level_cache_bytes()
            for row in self.rows:
                rate = f"{row.nbytes / row.seconds / 1e9:6.1f}" if row.nbytes and row.seconds else " " * 6
                rate = " cache" if cached and row.nbytes else rate
                lines.append(
                    f"{row.op:<24.24} {row.kernel:<16.16} {row.calls:>5} {row.nbytes / 1e6:>8.2f} "
                    f"{row.seconds * 1e6:>9.1f} {row.seconds / total:>6.1%} {rate}"
                )
            lines.append(f"{'sum':<24} {'':<16} {sum(r.calls for r in self.rows):>5} "
                         f"{sum(r.nbytes for r in self.rows) / 1e6:>8.2f} {self.seconds * 1e6:>9.1f}")  # fmt: skip
        for m in self.missing:
            text = f"run by torch: {m.op} at {m.where}: {m.why}"
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 4, break_long_words=False)
        return "\n".join(lines)


def explain_native(run: TracedForward, cache: Any, batch: int, tokens: int, offset: int) -> Report:
    """Run the program of these shapes a few times, on a scratch cache, and time its calls."""
    scratch = cache.blank() if isinstance(cache, NamedDims) else pytree.tree_map(_zeros_like, cache)
    ids = torch.zeros((batch, tokens), dtype=torch.int32)
    offsets = torch.full((batch,), offset, dtype=torch.int32)
    times = run.timed(ids, offsets, scratch, _ROUNDS)
    return _report(times)


def _zeros_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _report(times: Sequence[tuple[KernelCall | TorchCall, float]]) -> Report:
    groups: dict[tuple[str, str], list[tuple[KernelCall | TorchCall, float]]] = {}
    for call, seconds in times:
        kernel = call.kernel.removeprefix("onward_") if isinstance(call, KernelCall) else "(torch)"
        groups.setdefault((call.node.name.removeprefix("onward."), kernel), []).append((call, seconds))
    rows = [
        Row(op, kernel, len(calls), sum(_nbytes(call) for call, _ in calls), sum(seconds for _, seconds in calls))
        for (op, kernel), calls in groups.items()
    ]
    missing = [Missing(c.node.name, c.node.where, c.why) for c, _ in times if isinstance(c, TorchCall)]
    return Report("native", sorted(rows, key=lambda row: -row.seconds), missing)


def _nbytes(call: KernelCall | TorchCall) -> int:
    """The bytes of weights that the call reads."""
    if isinstance(call, KernelCall) and call.kernel in _LOOKUPS:
        return sum(array.nbytes for array in call.node.outputs)
    return sum(storage.nbytes for storage in set(call.storages()) if storage.kind is Kind.PARAM)


Forward = Callable[..., tuple[Tensor, Any]]
Backend = Literal["auto", "native", "cuda", "inductor", "eager"]
Fallback = Literal["eager", "inductor", "raise"]
BACKENDS, FALLBACKS = get_args(Backend), get_args(Fallback)


class _Run(Protocol):
    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]: ...


class Program:
    """A forward bound to its params: (tokens, offsets, cache) -> (logits, cache), as one call.

    It is made for one shape of tokens and serves others too: a shape that it cannot serve yet is traced when it comes.
    backend: the one that runs it, "native", "cuda", "inductor" or "eager".
    """

    def __init__(self, backend: str, run: _Run, fell_back: str = "") -> None:
        self.backend = backend
        self.fell_back = fell_back
        self._run = run

    def __repr__(self) -> str:
        return described(self, self.backend, f"fell back: {self.fell_back}" if self.fell_back else "")

    def __reduce__(self) -> NoReturn:
        raise ProgramError("a program belongs to its process and its params: compile the forward again")

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Run a step, without gradients.

        Args:
            tokens: int32 [B, T]. offsets: int32 [B]. cache: of the structure compiled with; written in place.
            logits_at: int64 [R, N], the places in T of the first R rows to return logits for; for forwards that take
                it.

        Returns:
            A new tensor of logits, [B, T, V] or [B, N, V]; and the cache.

        Raises:
            ProgramError: another cache than compiled for, tokens past the cache, ids outside the vocabulary.
        """
        _check_inputs(tokens, offsets)
        return self._run(tokens, offsets, cache, logits_at)

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Any, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run a step of one token a row and, in the same native call, let `pick` pick the next ids from its logits.

        It goes on with texts that a call has begun: other memory assigned to a weight's `data` is seen by the next call
        at the latest, and until then the weight's former memory is read as long as someone keeps it.

        Args:
            tokens: int32 [B, 1]. positions: int [B], the positions of the tokens that are picked.

        Returns:
            logits [B, 1, V]; the ids int64 [B], or None where a backend other than native runs; the cache.
        """
        _check_inputs(tokens, offsets)
        if isinstance(self._run, TracedForward):
            return self._run.picked(tokens, offsets, cache, pick, positions)
        logits, cache = self._run(tokens, offsets, cache, None)
        return logits, None, cache

    def explain(self, cache: Any, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """Report what runs for [batch, tokens] over a cache of this shape, how long it takes, and what has no kernel.

        It is run a few times on a scratch cache, at position `offset` of every row. Print the report for a table.
        """
        if isinstance(self._run, TracedForward):
            return explain_native(self._run, cache, batch, tokens, offset)
        return Report(self.backend, [], [], self.fell_back)


def _check_inputs(tokens: Tensor, offsets: Tensor) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int32 or offsets.shape != tokens.shape[:1]:
        raise ProgramError(
            f"a program wants tokens int32 [B, T] and offsets int32 [B]; got {tokens.dtype} {list(tokens.shape)} "
            f"and {offsets.dtype} {list(offsets.shape)}"
        )
    if not tokens.numel():
        raise ProgramError(f"a program wants at least one row and one token; got tokens {list(tokens.shape)}")
    if offsets.dtype != torch.int32:
        raise ProgramError(f"a program wants offsets int32 [B]; got {offsets.dtype}")


def compile(
    forward: Forward,
    *,
    params: Any,
    cache: Any,
    batch: int = 1,
    tokens: int = 1,
    backend: Backend = "auto",
    fallback: Fallback = "eager",
    selects_logits: bool = False,
    frozen: bool = False,
    programs: ProgramCache | None = None,
) -> Program:
    """A forward as a program: on the CPU a flat list of native kernel calls, on CUDA a graph.

    The forward is traced once, on tensors without memory, for `batch` rows of `tokens` tokens. Nothing is compiled and
    nothing is written to disk. Programs give the same bits as eager calls of the same `onward.ops`.

    Args:
        forward: (tokens int32 [B, T], offsets int32 [B], cache, params) -> (logits [B, T, V], cache), shape-stable.
        params: its weights; the program keeps them and sees later changes in place.
        cache: one of the shapes that it will be called with; it is not changed.
        batch, tokens: the shape to trace now, B and T. With tokens=0 nothing is traced before the first call.
        backend: "native" (CPU kernels), "cuda" (a CUDA graph), "inductor" (`torch.compile`), "eager"; "auto" takes the
            first that the machine and the params' device allow.
        fallback: what to do with operators that have no kernel: "eager" has torch run them in the middle of the
            program, "inductor" compiles the whole forward with `torch.compile`, "raise" refuses.
        selects_logits: whether forward takes the keyword `logits_at` (`onward.models.model`).
        frozen: whether params stay as they are as long as the program lives. Then each matrix that a native program
            multiplies with is packed for the kernels, once, beside the stock one: its memory once more, and tokens
            up to 1.8 times as fast.
        programs: programs of the same forward and the same tensors (`programs_of`), used and added to.

    Raises:
        ProgramError: the forward reads the value of a tensor, closes over tensors, or returns something other than
            (logits, cache of the same structure); with fallback="raise", it uses operators without a kernel.
        RequestError: an unknown option. NativeUnavailableError: "native" where there are no kernels.
    """
    if backend not in BACKENDS or fallback not in FALLBACKS:
        raise RequestError(
            f"backend is one of {', '.join(BACKENDS)} and fallback one of {', '.join(FALLBACKS)}; got {backend!r} and "
            f"{fallback!r}"
        )
    if backend == "auto":
        backend = _best_backend(params)
    eager = partial(_run_eager, forward, params, selects_logits)
    if backend == "eager":
        return Program("eager", eager)
    if backend == "inductor":
        return Program("inductor", partial(_run_eager, torch.compile(forward, fullgraph=True), params, selects_logits))
    if backend == "cuda":
        return Program("cuda", CudaGraphExecutable(forward, params, selects_logits))
    return _native_program(forward, params, cache, batch, tokens, fallback, selects_logits, frozen, programs)


def _native_program(
    forward: Forward,
    params: Any,
    cache: Any,
    batch: int,
    tokens: int,
    fallback: Fallback,
    selects_logits: bool,
    frozen: bool,
    programs: ProgramCache | None,
) -> Program:
    library = usable_library()
    if library is None:
        raise NativeUnavailableError(
            "no native kernels are in use here: install onward where there is a compiler, unset ONWARD_OPS, or choose "
            "another backend"
        )
    run = TracedForward(
        forward,
        params,
        library,
        selects_logits=selects_logits,
        fallback="eager" if fallback == "eager" else "raise",
        frozen=frozen,
        programs=programs,
    )
    try:
        if tokens:
            run.prepare(batch, tokens, cache)
    except MissingKernelsError as missing:
        if fallback == "raise":
            raise
        compiled = partial(_run_eager, torch.compile(forward, fullgraph=True), params, selects_logits)
        return Program("inductor", compiled, str(missing))
    return Program("native", run)


def _best_backend(params: Any) -> Backend:
    devices = {leaf.device.type for leaf in leaves_of(params) if isinstance(leaf, Tensor)}
    if devices == {"cuda"}:
        return "cuda"
    return "native" if devices <= {"cpu"} and usable_library() is not None else "eager"


@torch.no_grad()
def _run_eager(
    forward: Forward,
    params: Any,
    selects_logits: bool,
    tokens: Tensor,
    offsets: Tensor,
    cache: Any,
    logits_at: Tensor | None = None,
) -> tuple[Tensor, Any]:
    if selects_logits:
        logits, cache = forward(tokens, offsets, cache, params, logits_at=logits_at)
    else:
        logits, cache = forward(tokens, offsets, cache, params)
    return logits, cache
