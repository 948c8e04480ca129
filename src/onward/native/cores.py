"""How many threads this process should use."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from onward.errors import RequestError

MOST_THREADS = 256


def default_threads() -> tuple[int, str]:
    """The number of threads that kernels use where the program sets none, and the limit that decided it.

    ONWARD_NUM_THREADS if it is set. Else one thread for each physical core that this process may run on, but no more
    than OMP_NUM_THREADS and than the CPU quota of its control groups.

    Raises:
        RequestError: ONWARD_NUM_THREADS is not a number of threads.
    """
    text = os.environ.get("ONWARD_NUM_THREADS")
    if text is not None:
        if not _is_whole(text) or not 1 <= int(text) <= MOST_THREADS:
            raise RequestError(f"ONWARD_NUM_THREADS must be an integer in 1 … {MOST_THREADS}, got {text!r}")
        return int(text), "ONWARD_NUM_THREADS"
    limits = {
        "physical cores": _allowed_cores(),
        "OMP_NUM_THREADS": _omp_threads(),
        "the control group's CPU quota": cpu_quota(),
        "the most that kernels can use": MOST_THREADS,
    }
    reason = min(limits, key=limits.__getitem__)
    return max(1, math.ceil(limits[reason])), reason


def _allowed_cores() -> int:
    """How many physical cores this process may run on, by its CPU affinity. Hyperthreads of a core count once."""
    if sys.platform == "linux":
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    return max(1, len({_siblings(cpu) for cpu in cpus}))


def _siblings(cpu: int) -> str:
    """A name shared by all hyperthreads of one core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return topology.read_text().strip()
    except OSError:
        return str(cpu)


def _omp_threads() -> float:
    """The threads that OMP_NUM_THREADS gives the outermost loops; infinite where it names no number of threads."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if _is_whole(outermost) and int(outermost) >= 1 else math.inf


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit, too


def cpu_quota(root: Path = Path("/")) -> float:
    """How many CPUs the control groups of this process grant; infinite without a limit."""
    quotas = [quota for folder in group_folders("cpu", root) for quota in (_quota_v2(folder), _quota_v1(folder))]
    return min(quotas, default=math.inf)


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of the control groups (cgroups, version 1 or 2) that limit this process by a controller.

    A group has no more than the groups around it, so the least limit counts. In a container the process's own group is
    mounted as the outermost one.
    """
    for mount, group in _mounts(controller, root):
        folder = mount / group.strip("/")
        while folder.is_relative_to(mount):
            yield folder
            if folder == mount:
                break
            folder = folder.parent


def _mounts(controller: str, root: Path) -> Iterator[tuple[Path, str]]:
    """Folders where groups of a controller may be mounted, each with this process's path below it."""
    mounts = root / "sys/fs/cgroup"
    for line in (_read_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            yield mounts, group
            yield mounts / "unified", group
        elif controller in controllers.split(","):
            yield mounts / controllers, group
            yield mounts / controller, group


def _quota_v2(folder: Path) -> float:
    return _num_cpus(*(_read_text(folder / "cpu.max").split() or ("max", "")))


def _quota_v1(folder: Path) -> float:
    return _num_cpus(_read_text(folder / "cpu.cfs_quota_us").strip(), _read_text(folder / "cpu.cfs_period_us").strip())


def _num_cpus(quota: str, period: str = "") -> float:
    """quota / period. Infinite for the "max" of version 2, the -1 of version 1 and an absent file."""
    if not (_is_whole(quota) and _is_whole(period)) or int(period) == 0:
        return math.inf
    return int(quota) / int(period)


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
