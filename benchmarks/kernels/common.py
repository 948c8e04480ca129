"""Shared by the benchmarks of kernels: the command line, the report of the machine, and timing in turns."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.machine import description
from onward import native
from onward.native.interface import DType

CODES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}

Run = Callable[[], object]


def medians(runs: Sequence[Run], repeats: int, settle: float = 0.02) -> list[float]:
    """Seconds of each, taken in turns, the second of two calls. Between them a pause in which torch's threads stop
    spinning for more work: for some milliseconds they hold the cores that the next one needs."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, seconds, strict=True):
            time.sleep(settle)
            run()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seconds]


def repeated(run: Run, times: int) -> Run:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def argument_parser(doc: str | None, repeats: int) -> argparse.ArgumentParser:
    """A parser with the option --repeats, which all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def begin() -> tuple[native.Library, dict[str, object]]:
    """The library, with torch on as many threads; and the beginning of the result: the machine."""
    library = native.library()
    if library is None:
        raise SystemExit(f"there is no native library in {native.library_folder()}")
    torch.set_num_threads(native.num_threads())
    # As `onward.load` does: torch may keep the memory that it frees, instead of faulting in its pages at every call.
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
    print(f"{native.isa()}, {native.num_threads()} threads")
    return library, {"machine": description(), "isa": native.isa(), "threads": native.num_threads()}


def begin_with_dtype(
    doc: str | None, repeats: int
) -> tuple[native.Library, torch.dtype, argparse.Namespace, dict[str, object]]:
    """The library, the dtype asked for, the other options, and the beginning of the result."""
    parser = argument_parser(doc, repeats)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    library, result = begin()
    return library, getattr(torch, options.dtype), options, result | {"dtype": options.dtype}
