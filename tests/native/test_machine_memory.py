"""The memory that a process may use under its control groups, tested with trees of files as on Linux."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.native.machine import machine_memory

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
