"""The machine of this process: usable cores, cache sizes, available memory, and madvise for large buffers."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from onward.errors import RequestError

MAX_THREADS = 256


def default_threads() -> tuple[int, str]:
    """The default number of kernel threads, and the limit that decided it.

    ONWARD_NUM_THREADS if it is set, else the number of physical cores available to this process, capped by
    OMP_NUM_THREADS and by the CPU quota of its control groups.

    Raises:
        RequestError: ONWARD_NUM_THREADS is not a valid number of threads.
    """
    text = os.environ.get("ONWARD_NUM_THREADS")
    if text is not None:
        if not _is_whole(text) or not 1 <= int(text) <= MAX_THREADS:
            raise RequestError(f"ONWARD_NUM_THREADS must be an integer in 1 … {MAX_THREADS}, got {text!r}")
        return int(text), "ONWARD_NUM_THREADS"
    limits = {
        "physical cores": _allowed_cores(),
        "OMP_NUM_THREADS": _omp_threads(),
        "the control group's CPU quota": cpu_quota(),
        "the maximum of the kernels": MAX_THREADS,
    }
    reason = min(limits, key=limits.__getitem__)
    return max(1, math.ceil(limits[reason])), reason


def _allowed_cores() -> int:
    """The number of physical cores in this process's CPU affinity. Hyperthreads of a core count once."""
    cpus = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return max(1, len({_siblings(cpu) for cpu in cpus}))


def _siblings(cpu: int) -> str:
    """A name shared by all hyperthreads of one core."""
    return _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).strip() or str(cpu)


def _omp_threads() -> float:
    """The threads that OMP_NUM_THREADS allows outermost loops; infinite if it is unset or not a number."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if _is_whole(outermost) and int(outermost) >= 1 else math.inf


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit too


def cpu_quota(root: Path = Path("/")) -> float:
    """The CPU quota of this process's control groups, in CPUs; infinite without a limit."""
    quotas = [math.inf]
    for folder in group_folders("cpu", root):
        quotas.append(_num_cpus(*(_read(folder / "cpu.max").split() or ("max", ""))))  # version 2
        quotas.append(_num_cpus(*(_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))))
    return min(quotas)


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of the control groups (cgroups, version 1 or 2) whose controller limits this process.

    Limits are nested, so the smallest one applies. In a container the process's own group is mounted as the outermost.
    """
    for mount, group in _mounts(controller, root):
        folder = mount / group.strip("/")
        while folder.is_relative_to(mount):
            yield folder
            if folder == mount:
                break
            folder = folder.parent


def _mounts(controller: str, root: Path) -> Iterator[tuple[Path, str]]:
    """Possible mount points of a controller's groups, each with the path of this process's group below it."""
    mounts = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            yield mounts, group
            yield mounts / "unified", group
        elif controller in controllers.split(","):
            yield mounts / controllers, group
            yield mounts / controller, group


def _num_cpus(quota: str, period: str = "") -> float:
    """quota / period. Infinite for the "max" of version 2, the -1 of version 1 and an absent file."""
    if not (_is_whole(quota) and _is_whole(period)) or int(period) == 0:
        return math.inf
    return int(quota) / int(period)


def _read(file: Path) -> str:
    """The text of a system file; empty if it is missing or unreadable."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of the first processor's largest cache in bytes; 0 if unknown."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        text = _read(file).strip()
        if text[-1:] in _UNITS and _is_whole(text[:-1]):
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes)


# The assumed amount of memory where the system does not report it.
_DEFAULT_MEMORY = 8 << 30
# The files of the limit and the usage in control groups of version 2 and 1, and the prefix of recursive sums in
# memory.stat.
_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def memory_limit() -> int:
    """The total memory available to this process in bytes, as a basis for cache sizes."""
    total, _ = machine_memory()
    return _DEFAULT_MEMORY if total is None else total


def machine_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Total and available memory in bytes, within the limits of control groups. None if unknown."""
    fields = system_fields(str(root / "proc/meminfo"))
    if "MemTotal" not in fields:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}) else None
        return (None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")), None
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder in group_folders("memory", root):
        for limit, usage, file_pages in _FILES:
            quota = _read(folder / limit).strip()
            if quota.isdigit():
                total = min(total, int(quota))
                available = min(available, int(quota) - _used(folder, usage, file_pages))
    return total, max(0, available)


def _used(folder: Path, usage: str, file_pages: str) -> int:
    """The memory in use by a group in bytes, without file pages, which the system drops under memory pressure."""
    used = _read(folder / usage).strip()
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    droppable = sum(int(stat.get(f"{file_pages}{kind}", "0")) for kind in ("inactive_file", "active_file"))
    return max(0, int(used) - droppable) if used.isdigit() else 0


def system_fields(path: str) -> dict[str, str]:
    """The `name : value` lines of a file under /proc; the first line of a name wins."""
    fields: dict[str, str] = {}
    for line in _read(Path(path)).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


_HUGE_PAGE = 2 << 20


def advise_huge_pages(address: int, count: int) -> bool:
    """Advise the system to back `count` bytes at `address` with huge pages (2 MB) where they span whole ones.

    Call it for weights of many MB before they are first written: reads then miss the TLB less often.
    Returns whether the system accepted the advice; results do not depend on it.
    """
    return _advise(address, count, _HUGE_PAGE, getattr(mmap, "MADV_HUGEPAGE", None))


_MADV_POPULATE_READ = 22  # Linux 5.14
ENOUGH_HUGE_PAGES = 0.75  # of a mapping: the kernels then lose a twentieth at most


def read_in_huge_pages(address: int, count: int) -> float:
    """Read all pages of a mapped file, which is one mapping of `count` bytes at `address`, in huge pages where the file
    system has them (ext4 from Linux 6.16 on). Returns the share of the mapping in huge pages."""
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_POPULATE_READ):
        if not _advise(address, count, mmap.PAGESIZE, advice):
            return 0.0
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        if any(line.startswith(f"{address:x}-") for line in lines):  # reads as far as the mapping
            kib = next((line.split()[1] for line in lines if line.startswith("FilePmdMapped:")), "0")
            return int(kib) * 1024 / count
    return 0.0


def has_huge_pages(folder: Path) -> bool:
    """Whether the system maps files of a folder in huge pages, tried with a temporary one of 8 MB."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(4 * _HUGE_PAGE))
        return _share_in_huge_pages(file.fileno()) > 0
    return False


def cache_in_huge_pages(file: Path) -> None:
    """Let the system's page cache have a file that is on the disk in huge pages, if it can: it may lack them for a file
    that is written, but makes room for one that is read."""
    with file.open("rb") as opened, suppress(AttributeError):  # of other systems
        if _share_in_huge_pages(opened.fileno()) < ENOUGH_HUGE_PAGES:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            _share_in_huge_pages(opened.fileno())


def _share_in_huge_pages(handle: int) -> float:
    if not sys.platform.startswith("linux"):
        return 0.0
    with mmap.mmap(handle, 0, flags=mmap.MAP_PRIVATE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return read_in_huge_pages(address, -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE)


def file_mappings(names: Collection[bytes] | None = None) -> list[tuple[int, int]]:
    """(address, bytes) of the mappings of files in this process: of the files with these resolved paths, or without
    `names`, those that are private and writable. Linux only; none elsewhere."""
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return []
    if names is None:
        fields = [line.split(maxsplit=5) for line in lines]
        found = [each[0] for each in fields if each[1].startswith(b"rw-p") and each[4] != b"0"]
    else:
        endings = tuple(names)
        fields = [line.split(maxsplit=5) for line in lines if line.endswith(endings)]
        found = [each[0] for each in fields if each[-1] in names]
    ends = (each.split(b"-") for each in found)
    return [(int(start, 16), int(end, 16) - int(start, 16)) for start, end in ends]


def replace_file_pages(address: int, count: int, mappings: Sequence[tuple[int, int]]) -> None:
    """Replace the whole huge pages among `count` bytes at `address` by zeros in huge pages, if they belong to one of
    the `file_mappings`. Call it before all of these bytes are written: the system would copy the file in small pages.
    """
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + count - start) // _HUGE_PAGE * _HUGE_PAGE
    if length <= 0 or not any(at <= start and start + length <= at + size for at, size in mappings):
        return
    system = ctypes.CDLL(None).mmap
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    system.restype = ctypes.c_void_p
    fixed = 0x10  # MAP_FIXED on Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    if system(start, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == start:
        advise_huge_pages(start, length)


def give_back_pages(address: int, count: int) -> bool:
    """Return the whole pages among `count` bytes at `address` to the system: they read as zeros afterwards.

    Only for private anonymous mappings. Returns whether the system freed them; otherwise the bytes are unchanged.
    """
    return _advise(address, count, mmap.PAGESIZE, getattr(mmap, "MADV_DONTNEED", None))


def trim_memory() -> None:
    """Return the free memory of malloc to the system, where it can (glibc)."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def _advise(address: int, count: int, page: int, advice: int | None) -> bool:
    """Call madvise for the whole pages of size `page` among `count` bytes at `address`."""
    start = -(-address // page) * page
    length = (address + count - start) // page * page
    # On other systems the constants of the same names mean something else.
    if length <= 0 or not sys.platform.startswith("linux") or advice is None:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, advice) == 0)
