"""The default number of threads: no more than the process may use."""

import math
import os
from pathlib import Path

import pytest
from test_library import run_python

from onward.errors import RequestError
from onward.native import machine as cores

SAY = "from onward import native; print(native.num_threads(), *native.configured_threads())"


def test_omp_num_threads_limits_the_threads_and_onwards_variable_wins(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONWARD_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one = "1 1 OMP_NUM_THREADS" if cores.default_threads()[0] > 1 else "1 1 physical cores"  # the process may have one
    assert run_python(SAY, OMP_NUM_THREADS="1") == one
    assert run_python(SAY, OMP_NUM_THREADS="1,4") == one
    assert run_python(SAY, OMP_NUM_THREADS="1", ONWARD_NUM_THREADS="3") == "3 3 ONWARD_NUM_THREADS"
    set_too = "from onward import native; native.set_num_threads(5);" + SAY
    assert run_python(set_too, ONWARD_NUM_THREADS="²") == "5 5 set by the program"


@pytest.mark.parametrize("nothing", ["", "many", "0", "²", "-2", "10000"])
def test_an_omp_num_threads_that_limits_nothing(nothing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONWARD_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    without = cores.default_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", nothing)
    assert cores.default_threads() == without


@pytest.mark.parametrize("text", ["²", "٣", "", "0", "257", "1.5", " "])
def test_invalid_numbers_of_threads_are_an_onward_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_NUM_THREADS", text)
    with pytest.raises(RequestError, match="ONWARD_NUM_THREADS must be an integer in 1 … 256, got"):
        cores.default_threads()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


GROUPS = "sys/fs/cgroup"
VERSION_1 = "3:memory:/a\n4:cpu,cpuacct:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", f"{GROUPS}/a/b/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{GROUPS}/a/cpu.max": "100000 100000\n",
                f"{GROUPS}/a/b/cpu.max": "200000 100000\n",
            },
            1,
        ),
        # A container's own group, mounted where it sees no other.
        ({"proc/self/cgroup": "0::/docker/x\n", f"{GROUPS}/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": VERSION_1,
                f"{GROUPS}/cpu,cpuacct/a/b/cpu.cfs_quota_us": "300000\n",
                f"{GROUPS}/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
                f"{GROUPS}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                f"{GROUPS}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": VERSION_1,
                f"{GROUPS}/cpu/cpu.cfs_quota_us": "100000\n",
                f"{GROUPS}/cpu/cpu.cfs_period_us": "50000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "nonsense\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "100000 0\n"}, math.inf),
    ],
)
def test_the_quota_of_control_groups(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    assert cores.cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.0, 1), (1.5, 2)])
def test_a_quota_is_rounded_up(quota: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONWARD_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores, "_allowed_cores", lambda: 64)
    assert cores.default_threads() == (threads, "the control group's CPU quota")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a system without affinities")
def test_the_affinity_limits_the_threads(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONWARD_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    alone = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});" + SAY
    assert run_python(alone) == "1 1 physical cores"
