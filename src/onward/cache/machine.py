"""How much memory the machine has."""

import mmap
import os


def machine_memory() -> int:
    """Bytes of memory of this machine; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30


def has_lazy_memory() -> bool:
    """Whether memory can be asked for that takes nothing until it is written."""
    return hasattr(mmap, "MAP_PRIVATE")
