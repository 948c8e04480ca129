"""`onward.compile`: turn a forward into a program, one call per step; and `explain`, which profiles its calls."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import NativeUnavailableError, ProgramError, RequestError
from onward.native import last_level_cache_bytes
from onward.ops.operator import usable_library
from onward.program.compiled import MissingKernelsError, NativeExecutable, ProgramCache
from onward.program.cuda_graph import CudaGraphExecutable
from onward.program.graph import Forward, KernelCall, Kind, TorchCall
from onward.program.leaves import NamedDims, leaves_of
from onward.program.step import EagerExecutable, Executable, ForwardBatch
from onward.util.option_names import checks_option_names
from onward.util.text import described

_ROUNDS = 5
_WIDTH = 80
# Kernels that only read some rows of a table.
_LOOKUPS = ("onward_gather_rows", "onward_linear_rows")


@dataclass(frozen=True)
class Row:
    """All calls of one kernel for one operator. nbytes, seconds: total bytes of params read, and total time."""

    op: str
    kernel: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Missing:
    """An operator that torch runs, its place in the user's source, and the reason."""

    op: str
    where: str
    why: str


@dataclass(frozen=True)
class Report:
    """backend: the active backend. rows: sorted by time, the longest first. missing: operators that torch runs. note:
    why another backend is not used."""

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
            # Params that fit the processor's cache are not read from memory, so their rate is not a memory bandwidth.
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


def _report(times: Sequence[tuple[KernelCall | TorchCall, float]]) -> Report:
    """Group calls, each with its seconds, by operator and kernel."""
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


Backend = Literal["auto", "native", "cuda", "inductor", "eager"]
Fallback = Literal["eager", "inductor", "raise"]
BACKENDS, FALLBACKS = get_args(Backend), get_args(Fallback)


class Program:
    """A forward bound to its params: (tokens, offsets, cache) -> (logits, cache), as one call.

    It is compiled for one shape of tokens; other shapes are traced when they are first called.
    backend: "native", "cuda", "inductor" or "eager".
    """

    def __init__(self, backend: str, executable: Executable, fell_back: str = "") -> None:
        self.backend = backend
        self.executable = executable
        self.fell_back = fell_back

    def __repr__(self) -> str:
        return described(self, self.backend, f"fell back: {self.fell_back}" if self.fell_back else "")

    def __reduce__(self) -> NoReturn:
        raise ProgramError("a program belongs to its process and its params: compile the forward again")

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Run a step, without gradients.

        Args:
            tokens: int32 [B, T]. offsets: int32 [B].
            cache: a cache with the structure of the one in `compile`; written in place.
            logits_at: int64 [R, N], the positions in T of the first R rows to return logits for; only for forwards
                that take it.

        Returns:
            A new tensor of logits, [B, T, V] or [R, N, V]; and the cache.

        Raises:
            ProgramError: a cache of another structure, tokens past the end of the cache, ids outside the vocabulary.
        """
        _check_inputs(tokens, offsets)
        result = self.executable.step(ForwardBatch(tokens, offsets, cache, logits_at))
        return result.logits, result.cache

    def explain(self, cache: Any, batch: int = 1, tokens: int = 1, offset: int = 0) -> Report:
        """Report the calls for tokens [batch, tokens] over a cache of this shape, their times, and missing kernels.

        The program runs a few times on a scratch cache, at position `offset` of every row. Print the report for a
        table.
        """
        if not isinstance(self.executable, NativeExecutable):
            return Report(self.backend, [], [], self.fell_back)
        if isinstance(cache, NamedDims):
            scratch = cache.blank()
        else:
            scratch = pytree.tree_map_only(Tensor, torch.zeros_like, cache)
        ids = torch.zeros((batch, tokens), dtype=torch.int32)
        offsets = torch.full((batch,), offset, dtype=torch.int32)
        return _report(self.executable.timed(ForwardBatch(ids, offsets, scratch), _ROUNDS))


def _check_inputs(tokens: Tensor, offsets: Tensor) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int32 or offsets.shape != tokens.shape[:1]:
        raise ProgramError(
            f"a program expects tokens int32 [B, T] and offsets int32 [B]; got {tokens.dtype} {list(tokens.shape)} "
            f"and {offsets.dtype} {list(offsets.shape)}"
        )
    if not tokens.numel():
        raise ProgramError(f"a program expects at least one row and one token; got tokens {list(tokens.shape)}")
    if offsets.dtype != torch.int32:
        raise ProgramError(f"a program expects offsets int32 [B]; got {offsets.dtype}")


@checks_option_names
def compile(
    forward: Forward,
    *,
    params: Any,
    cache: Any,
    batch: int = 1,
    tokens: int = 1,
    backend: Backend = "auto",
    fallback: Fallback = "eager",
    frozen: bool = False,
    programs: ProgramCache | None = None,
) -> Program:
    """Compile a forward to a program: on the CPU a flat list of native kernel calls, on CUDA a graph.

    The forward is traced once, on tensors without memory, for `batch` rows of `tokens` tokens. No code is generated and
    nothing is written to disk. Programs give the same bits as eager calls of the same `onward.ops`, except `linear`
    with a plain tensor and `einsum`, which torch computes in eager calls.

    Args:
        forward: (tokens int32 [B, T], offsets int32 [B], cache, params) -> (logits [B, T, V], cache), shape-stable. It
            may take the keyword `logits_at` (`onward.models.model`).
        params: the weights; the program references them and sees later changes in place.
        cache: a cache with the shapes of later calls; it is not changed.
        batch, tokens: the shape to trace now, B and T. With tokens=0 nothing is traced before the first call.
        backend: "native" (CPU kernels), "cuda" (a CUDA graph), "inductor" (`torch.compile`), "eager"; "auto" selects
            the first that the machine and the params' device support.
        fallback: the handling of operators without a kernel: "eager" runs them with torch inside the program,
            "inductor" compiles the whole forward with `torch.compile`, "raise" raises an error.
        frozen: whether params never change while the program is in use. Native programs then multiply with packed
            copies of all matrices, which doubles their memory and makes tokens up to 1.8 times as fast.
        programs: the programs of the same forward and the same tensors (`programs_of`); new ones are added.

    Raises:
        ProgramError: the forward reads the value of a tensor, closes over tensors, or returns something other than
            (logits, cache of the same structure); with fallback="raise", it uses operators without a kernel.
        RequestError: an unknown option. NativeUnavailableError: "native" without native kernels.
    """
    if backend not in BACKENDS or fallback not in FALLBACKS:
        raise RequestError(
            f"backend is one of {', '.join(BACKENDS)} and fallback one of {', '.join(FALLBACKS)}; got {backend!r} and "
            f"{fallback!r}"
        )
    if backend == "auto":
        backend = _best_backend(params)
    if backend == "eager":
        return Program("eager", EagerExecutable(forward, params))
    if backend == "inductor":
        return _inductor_program(forward, params)
    if backend == "cuda":
        return Program("cuda", CudaGraphExecutable(forward, params))
    library = usable_library()
    if library is None:
        raise NativeUnavailableError(
            "no native kernels are in use here: install onward where there is a compiler, unset ONWARD_OPS, or choose "
            "another backend"
        )
    executable = NativeExecutable(
        forward, params, library, needs_kernels=fallback != "eager", frozen=frozen, programs=programs
    )
    try:
        if tokens:
            executable.prepare(batch, tokens, cache)
    except MissingKernelsError as missing:
        if fallback == "raise":
            raise
        return _inductor_program(forward, params, str(missing))
    return Program("native", executable)


def _inductor_program(forward: Forward, params: Any, fell_back: str = "") -> Program:
    return Program("inductor", EagerExecutable(torch.compile(forward, fullgraph=True), params, forward), fell_back)


def _best_backend(params: Any) -> Backend:
    devices = {leaf.device.type for leaf in leaves_of(params) if isinstance(leaf, Tensor)}
    if devices == {"cuda"}:
        return "cuda"
    return "native" if devices <= {"cpu"} and usable_library() is not None else "eager"
