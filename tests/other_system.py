"""Simulates on Linux a system without Linux's own features. Import this module before `onward`, and after packages that
read the real system. It hides /proc and /sys, and the names that Python has on Linux but not on macOS."""

import builtins
import io
import mmap
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import llguidance  # noqa: F401
import torch  # noqa: F401

_ONLY_LINUX = (
    *[(os, name) for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create", "eventfd")],
    *[(mmap, name) for name in dir(mmap) if name.startswith(("MADV_HUGE", "MADV_NOHUGE", "MAP_NORES", "MAP_POP"))],
    (resource, "prlimit"),
)


def _without_system_files(call: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **options)

    return refusing


for module, name in _ONLY_LINUX:
    delattr(module, name)
for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "scandir"), (os, "listdir")):
    setattr(module, name, _without_system_files(getattr(module, name)))


def _refuse_small_address_spaces(kind: int, limits: tuple[int, int]) -> None:
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    _setrlimit(kind, limits)


_setrlimit, resource.setrlimit = resource.setrlimit, _refuse_small_address_spaces
sys.platform = "darwin"
