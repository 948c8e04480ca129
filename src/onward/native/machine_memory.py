"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from onward.native.cores import group_folders

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
