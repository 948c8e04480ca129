"""The machine that this process runs on: usable cores, cache sizes, available memory, and advice on large buffers."""

from __future__ import annotations

import ctypes
import math
import mmap
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


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The bytes of the first processor's largest cache; 0 where the system does not say."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes)


# Bytes to reckon with where the system does not say how much there is.
_UNKNOWN = 8 << 30
# Of control groups of version 2 and 1: the limit, the use, and the prefix of sums over a group and those inside it.
_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def memory_limit() -> int:
    """Bytes of memory that a cache may be measured by: all that there is for this process."""
    total, _ = machine_memory()
    return _UNKNOWN if total is None else total


def machine_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes of memory, all and available; control groups may grant less than the machine has. None if unknown."""
    fields = system_fields(str(root / "proc/meminfo"))
    if "MemTotal" not in fields:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}) else None
        return (None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")), None
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder in group_folders("memory", root):
        for limit, usage, file_pages in _FILES:
            granted = _read(str(folder / limit)).strip()
            if granted.isdigit():
                total = min(total, int(granted))
                available = min(available, int(granted) - _used(folder, usage, file_pages))
    return total, max(0, available)


def _used(folder: Path, usage: str, file_pages: str) -> int:
    """Bytes that a group uses and cannot give back: without the pages of files, which the system drops when it must."""
    used = _read(str(folder / usage)).strip()
    stat = dict(line.split() for line in _read(str(folder / "memory.stat")).splitlines() if len(line.split()) == 2)
    droppable = sum(int(stat.get(f"{file_pages}{kind}", "0")) for kind in ("inactive_file", "active_file"))
    return max(0, int(used) - droppable) if used.isdigit() else 0


def system_fields(path: str) -> dict[str, str]:
    """The `name : value` lines of a file under /proc, the first of each name."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _read(path: str) -> str:
    """Empty where the system has no such file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


_HUGE_PAGE = 2 << 20


def advise_huge_pages(address: int, count: int) -> bool:
    """Ask the system to use huge pages (2 MB) for the whole ones among `count` bytes at `address`.

    Call it for weights of many MB, before they are first written: reading them then misses the TLB less.
    Returns whether the system took the advice; results do not depend on it.
    """
    return _advise(address, count, _HUGE_PAGE, getattr(mmap, "MADV_HUGEPAGE", None))


def give_back_pages(address: int, count: int) -> bool:
    """Let the system take the whole pages among `count` bytes at `address`: they hold zeros when they are next read.

    Only for private maps of no file. Returns whether the system took any; where it cannot the bytes stay as they are.
    """
    return _advise(address, count, mmap.PAGESIZE, getattr(mmap, "MADV_DONTNEED", None))


def _advise(address: int, count: int, page: int, advice: int | None) -> bool:
    """Advise the system about the whole pages, of this size, among `count` bytes at `address`."""
    start = -(-address // page) * page
    length = (address + count - start) // page * page
    # Elsewhere the advices of the same names do other things.
    if length <= 0 or not sys.platform.startswith("linux") or advice is None:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, advice) == 0)
