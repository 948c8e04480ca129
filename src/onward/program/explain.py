"""What a program does and where its time goes, as a table."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import NamedDims
from onward.native import last_level_cache_bytes
from onward.program.arrays import Kind
from onward.program.calls import KernelCall, TorchCall
from onward.program.compiled import CompiledForward

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


def explain_native(run: CompiledForward, cache: Any, batch: int, tokens: int, offset: int) -> Report:
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
