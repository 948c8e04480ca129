"""The machine of a benchmark, and its limit for decoding: the memory's read bandwidth."""

import importlib.metadata
import os
import platform
import statistics
import time
from pathlib import Path

import torch


def read_bandwidth(buffer: torch.Tensor, repeats: int = 3) -> float:
    """Bytes per second at which torch's threads read a buffer too large for the caches; median of `repeats` sums."""
    words = buffer.view(torch.int64)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        words.sum()
        seconds.append(time.perf_counter() - began)
    return buffer.nbytes / statistics.median(seconds)


def bandwidth_buffer() -> torch.Tensor:
    """Half a gigabyte of written pages: an untouched page is not read from memory."""
    return torch.full((512 * 2**20,), 7, dtype=torch.uint8)


def description() -> dict[str, str | int]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("onward", "torch", "transformers")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
