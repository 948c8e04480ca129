"""The CPU kernels: C++ behind a plain C interface, called through ctypes, without a dependency on torch.

An installation without a compiler has no libraries: this package still imports, `isa()` is "none" and `library()` is
None. The sources are in native/; its README shows how to add an op with a kernel.
"""

from onward.native.interface import DType, Format, Status
from onward.native.loader import (
    Library,
    available_isas,
    bits_of,
    built_isas,
    configured_threads,
    isa,
    libraries_of,
    library,
    library_folder,
    num_threads,
    select_isa,
    set_num_threads,
)
from onward.native.machine import advise_huge_pages, give_back_pages, last_level_cache_bytes

__all__ = [
    "DType", "Format", "Library", "Status", "advise_huge_pages", "available_isas", "bits_of", "built_isas",
    "configured_threads", "give_back_pages", "isa", "last_level_cache_bytes", "libraries_of", "library",
    "library_folder", "num_threads", "select_isa", "set_num_threads",
]  # fmt: skip
