"""The build backend (PEP 517): scikit-build-core; where the kernels cannot be compiled, a package without them.

scikit-build-core's own `if.failed` would compile everything while pip says "Preparing metadata".
"""

import sys
from collections.abc import Callable

from scikit_build_core import build as core
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str]
Build = Callable[[str, Settings | None, str | None], str]


def build_wheel(folder: str, settings: Settings | None = None, metadata: str | None = None) -> str:
    return _with_kernels_or_without(core.build_wheel, folder, settings, metadata)


def build_editable(folder: str, settings: Settings | None = None, metadata: str | None = None) -> str:
    return _with_kernels_or_without(core.build_editable, folder, settings, metadata)


def _with_kernels_or_without(build: Build, folder: str, settings: Settings | None, metadata: str | None) -> str:
    try:
        return build(folder, settings, metadata)
    except SystemExit:  # CMake or the compiler failed, and has said why
        print("*** onward is installed without native kernels: no C++17 compiler works here", file=sys.stderr)
        # The metadata that was prepared names the platform, and this package is of none.
        return build(folder, {**(settings or {}), "wheel.cmake": "false"}, None)
