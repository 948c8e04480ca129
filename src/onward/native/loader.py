"""Find, select and load the native library.

One shared library is built per instruction set (ISA): native/CMakeLists.txt lists them, and every library knows the
list. The best one that the processor supports is loaded when a kernel is first called; `ONWARD_ISA` or `select_isa`
select another, or none. Only the selected library runs threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from onward.errors import NativeError, NativeUnavailableError, RequestError
from onward.native.interface import SIGNATURES, Status
from onward.native.machine import MAX_THREADS, default_threads
from onward.util.process import module_lock


class _Instructions(dict[str, int]):
    """The instruction word that calls a kernel in a program (native/src/program.cpp), by the kernel's name."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __missing__(self, kernel: str) -> int:
        self[kernel] = self._library.onward_program_instruction(kernel.encode())
        assert self[kernel], f"{kernel} is not an instruction"
        return self[kernel]


class Library:
    """A loaded library, with its C functions as attributes: `library.onward_linear_many(...)`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        for name in SIGNATURES:
            getattr(self, name)
        self.isa: str = self.onward_isa_name().decode()
        self.instructions = _Instructions(self)

    def __getattr__(self, name: str) -> Any:
        """A declared C function. It becomes an attribute, so this runs once for each."""
        if name not in SIGNATURES:
            raise AttributeError(f"no function {name!r} of the native library is declared (onward.native.interface)")
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise NativeUnavailableError(
                f"{self.path} has no function {name}: it was built from other sources than this package; reinstall it"
            ) from None
        function.restype, function.argtypes = SIGNATURES[name]
        setattr(self, name, function)
        return function

    def check(self, status: int, name: str) -> None:
        """Raise NativeError if the kernel `name` did not return OK."""
        if status != Status.OK:
            raise NativeError(f"{name} failed: {Status(status).name.lower().replace('_', ' ')}")


# Sets that compute the bits of another one (docs/decisions/0025), as tests/native and the golden record check.
_BITS = {"avx512vnni": "avx2", "avxvnni": "avx2", "neon_i8mm": "neon"}

_lock = module_lock(globals())
_loaded: dict[str, Library] = {}
_current: Library | None = None
_chosen = False  # whether _current has been selected; it may be None
_threads: int | None = None  # set by `set_num_threads`; None for the default


def library_folder() -> Path:
    """The folder of the libraries: ONWARD_NATIVE_DIR, or lib/ in this package."""
    override = os.environ.get("ONWARD_NATIVE_DIR")
    if override:
        return Path(override)
    # An editable install has two package folders: the sources, and the build output in site-packages.
    folders = [Path(folder) / "lib" for folder in sys.modules["onward.native"].__path__]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def built_isas() -> list[str]:
    """The instruction sets that were built at installation, best first."""
    return [isa for isa in _isas() if _path(isa).exists()]


def available_isas() -> list[str]:
    """The built instruction sets that this processor supports, best first."""
    return [isa for isa, usable in _isas().items() if usable and _path(isa).exists()]


def library() -> Library | None:
    """The library in use, loaded at the first call. None if none was built, or "none" was selected."""
    if not _chosen:
        with _lock:
            if not _chosen:
                _choose(os.environ.get("ONWARD_ISA", "auto"))
    return _current


def isa() -> str:
    """The instruction set in use: one of `available_isas()`, or "none"."""
    current = library()
    return current.isa if current else "none"


def bits_of(isa: str) -> str:
    """The set that stands for all sets with the same bits as this one."""
    return _BITS.get(isa, isa)


def libraries_of(bits: str) -> list[Path]:
    """The libraries that were built for the instruction sets with these bits (`bits_of`)."""
    return [_path(isa) for isa in built_isas() if bits_of(isa) == bits]


def select_isa(name: str) -> None:
    """Use the library of an instruction set: one of `available_isas()`, "auto" for the best, or "none" for no kernels.

    Meant for tests and benchmarks: results may differ in their last bits between instruction sets.

    Raises:
        NativeUnavailableError: it was not built, or the processor doesn't support it.
        RequestError: an unknown name.
    """
    with _lock:
        _choose(name)


def num_threads() -> int:
    """The number of threads of a kernel call, including the calling thread."""
    current = library()
    return current.onward_num_threads() if current else configured_threads()[0]


def set_num_threads(count: int) -> None:
    """Set the number of threads of later kernel calls, 1 … 256. Results do not depend on it.

    More threads than cores are allowed but rarely help: waiting threads then sleep instead of spinning.
    """
    global _threads
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_THREADS:
        raise RequestError(f"the number of threads must be an integer in 1 … {MAX_THREADS}, got {count!r}")
    _threads = count  # before library(), which may load one: this number overrides the environment's
    current = library()
    if current:
        current.check(current.onward_set_num_threads(count), "onward_set_num_threads")


def _isas() -> dict[str, bool]:
    """Whether this processor supports each instruction set, best first: the list is the portable library's."""
    if not _path("portable").exists():
        return {}
    portable = _load("portable")
    usable: int = portable.onward_usable_isas()
    return {isa: bool(usable >> bit & 1) for bit, isa in enumerate(portable.onward_isas().decode().split())}


def _path(isa: str) -> Path:
    return library_folder() / f"libonward_{isa}.so"


def _load(isa: str) -> Library:
    if isa not in _loaded:
        _loaded[isa] = Library(_path(isa))
    return _loaded[isa]


def _choose(name: str) -> None:
    """Switch to the library of instruction set `name`. The caller holds the lock."""
    global _current, _chosen
    if name != "none":
        isas, available = _isas(), available_isas()
        if name == "auto":
            name = available[0] if available else "none"
        elif isas and name not in isas:
            raise RequestError(f"unknown instruction set {name!r}: choose one of {', '.join(isas)}, auto, none")
        elif name not in available:
            reason = "this processor cannot run it" if name in built_isas() else "it was not built"
            raise NativeUnavailableError(
                f"the instruction set {name!r} cannot be used: {reason}. "
                f"Available: {', '.join(available) or 'none'} (in {library_folder()})"
            )
    chosen = None if name == "none" else _load(name)
    if _current is not None and _current is not chosen:
        _current.onward_set_num_threads(1)  # stops its worker threads
    if chosen is not None:
        chosen.check(chosen.onward_set_num_threads(configured_threads()[0]), "onward_set_num_threads")
    _current, _chosen = chosen, True


def configured_threads() -> tuple[int, str]:
    """The configured number of kernel threads, and the setting that decided it."""
    return default_threads() if _threads is None else (_threads, "set by the program")
