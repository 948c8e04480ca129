"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

# Bytes to reckon with where the system does not say how much there is.
_UNKNOWN = 8 << 30


def memory_limit() -> int:
    """Bytes of memory that a cache may be measured by: all that there is for this process."""
    total, _ = machine_memory()
    return _UNKNOWN if total is None else total


def machine_memory() -> tuple[int | None, int | None]:
    """Bytes of memory, all and available; a control group may grant less than the machine has. None if unknown."""
    fields = system_fields("/proc/meminfo")
    if "MemTotal" not in fields:
        pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}) else None
        return (None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")), None
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    granted = _read("/sys/fs/cgroup/memory.max").strip()
    if granted.isdigit():
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total = min(total, int(granted))
        available = min(available, int(granted) - int(used or 0))
    return total, available


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
