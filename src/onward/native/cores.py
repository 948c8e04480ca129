"""How many threads this process should use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path


def allowed_cores() -> int:
    """Physical cores this process may run on: its CPU affinity, hyperthreads counted once, and no
    more than the CPU quota of its control group."""
    if sys.platform == "linux":
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, int(min(len(cores), _quota())))


def _siblings(cpu: int) -> str:
    """A name shared by all hyperthreads of one core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return topology.read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    """CPUs that the control group (v2) grants, rounded up; infinite without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else math.ceil(int(limit) / int(period))
    except (OSError, ValueError):
        return math.inf
