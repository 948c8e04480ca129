"""The memory that a process may use under its control groups, tested with trees of files as on Linux; huge pages."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.native.machine import (
    cache_in_huge_pages,
    file_mappings,
    has_huge_pages,
    machine_memory,
    read_in_huge_pages,
    replace_file_pages,
)

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {32 * GIB // 1024} kB\n"
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def memory(root: Path, files: dict[str, object]) -> tuple[int | None, int | None]:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return machine_memory(root)


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 64, 32),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max"}, 64, 32),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.current": 3 * GIB}, 8, 5),
        # The least of nested groups counts, also where an outer one is fuller.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/b/memory.max": 16 * GIB,
                f"{V2}/a/b/memory.current": 1 * GIB,
                f"{V2}/a/memory.max": 20 * GIB,
                f"{V2}/a/memory.current": 18 * GIB,
            },
            16,
            2,
        ),
        # Pages of files that were read are given back when they must be: weights that are mapped are such pages.
        (
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 8 * GIB,
                f"{V2}/memory.current": 8 * GIB,
                f"{V2}/memory.stat": f"anon {GIB}\nfile {7 * GIB}\ninactive_file {4 * GIB}\nactive_file {3 * GIB}",
            },
            8,
            7,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": 5 * GIB}, 4, 0),
        # Version 1: no limit is the largest number of pages.
        ({"proc/self/cgroup": "4:memory:/a", f"{V1}/a/memory.limit_in_bytes": 9223372036854771712}, 64, 32),
        (
            {
                "proc/self/cgroup": "11:cpu,cpuacct:/x\n4:memory:/docker/1",
                f"{V1}/memory.limit_in_bytes": 8 * GIB,  # in a container the group itself is mounted there
                f"{V1}/memory.usage_in_bytes": 6 * GIB,
                f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {1 * GIB}",
            },
            8,
            5,
        ),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, files: dict[str, object], total: int, available: int) -> None:
    assert memory(tmp_path, files) == (total * GIB, available * GIB)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_available_memory_is_between_zero_and_all(tmp_path_factory, limit, used, inactive, active):
    files = {
        "proc/self/cgroup": "0::/",
        f"{V2}/memory.max": limit * GIB,
        f"{V2}/memory.current": used * GIB,
        f"{V2}/memory.stat": f"inactive_file {inactive * GIB}\nactive_file {active * GIB}",
    }
    total, available = memory(tmp_path_factory.mktemp("root"), files)
    assert total == min(64, limit) * GIB
    assert 0 <= available <= total


def test_without_files_the_system_is_asked(tmp_path: Path) -> None:
    assert machine_memory(tmp_path)[1] is None


MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are known from /proc")
def test_pages_of_a_mapped_file_are_replaced_in_one_mapping_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\1" * (8 * MIB))
    maps = []
    with file.open("rb") as opened:
        for _ in range(2):
            maps.append(mmap.mmap(opened.fileno(), 8 * MIB, flags=mmap.MAP_PRIVATE))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
    first, last = 100, 8 * MIB - 100
    replace_file_pages(addresses[0] + first, last - first, file_mappings())
    start = -(addresses[0] + first) % (2 * MIB) + first
    whole = (last - start) // (2 * MIB) * 2 * MIB
    assert whole >= 4 * MIB
    assert maps[0][start : start + whole] == bytes(whole)
    assert maps[0][:start] == b"\1" * start
    assert maps[0][start + whole :] == b"\1" * (8 * MIB - start - whole)
    assert maps[1][:] == file.read_bytes() == b"\1" * (8 * MIB)
    mappings = file_mappings()
    maps[0][start : start + 3] = b"abc"
    replace_file_pages(addresses[0] + start, whole, mappings)  # no longer of a file
    assert maps[0][start : start + 3] == b"abc"


def test_files_in_huge_pages(tmp_path: Path) -> None:
    assert not has_huge_pages(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_bytes(content := bytes(range(256)) * (64 * MIB // 256))
    cache_in_huge_pages(file)
    assert file.read_bytes() == content
    memory = mmap.mmap(-1, 4 * MIB)
    assert read_in_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4 * MIB) == 0.0  # of no file
    if has_huge_pages(tmp_path):
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)
        share = read_in_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped))
        assert 0 <= share <= 1
        assert mapped[:] == content
