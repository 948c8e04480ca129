"""`onward batch --replicas`: the output of one machine, whichever processes are killed.

ONWARD_KILLS sets the number of kills (2; 8 with ONWARD_TESTS=full). Each takes half a minute on two cores, mostly to
start Ray.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-cluster")

PROGRAM = [sys.executable, "-c", "from onward.cli.main import main; main()"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
KILLS = int(os.environ.get("ONWARD_KILLS", "8" if os.environ.get("ONWARD_TESTS") == "full" else "2"))

pytestmark = pytest.mark.timeout(420 + 60 * KILLS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of all kinds, including failing ones. They take two replicas a few seconds."""
    lines: list[Any] = []
    for at in range(400):
        body: dict[str, Any] = {"prompt": f"Once upon a time there were {at}", "max_tokens": 40 + at % 160}
        body |= {"temperature": 0} if at % 3 == 0 else {"n": 2} if at % 10 == 1 else {}
        body |= {"no_such_option": 1} if at % 50 == 7 else {}
        lines.append({"custom_id": f"line {at}", "method": "POST", "url": "/v1/completions", "body": body})
    lines[11] = "{"
    file = tmp_path_factory.mktemp("batch") / "in.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> bytes:
    """The output of one process without Ray."""
    out = source.with_name("undisturbed.jsonl")
    assert _run(source, out).returncode == 2, "some lines fail"
    return out.read_bytes()


def test_replicas_write_the_same_file_as_one_process(source: Path, undisturbed: bytes) -> None:
    out = source.with_name("replicas.jsonl")
    run = _run(source, out, "--replicas", "2")
    assert run.returncode == 2
    assert run.stderr == f"error: 9 of 400 lines failed: their results in '{out}' say why\n"
    assert run.stdout.startswith("400 lines: 391 served, 9 failed · ")
    assert out.read_bytes() == undisturbed
    assert _run(source, out, "--replicas", "1").stdout.startswith("400 lines: 391 done before, 0 served, 9 failed")
    assert out.read_bytes() == undisturbed


def test_randomly_killed_jobs_end_with_the_same_file(source: Path, undisturbed: bytes) -> None:
    """In turns the driver dies, which ends all, or a replica, which is replaced."""
    generator = random.Random(5)
    out = source.with_name("killed.jsonl")
    killed = {"driver": 0, "replica": 0}
    done: list[int] = []
    while sum(killed.values()) < KILLS:
        with subprocess.Popen([*PROGRAM, "batch", str(source), str(out), "--replicas", "2"], **_QUIET) as run:
            kind = min(killed, key=killed.__getitem__)
            replicas = _replicas(run)
            time.sleep(generator.uniform(0, 4))
            with suppress(ProcessLookupError):
                os.kill(generator.choice(replicas) if kind == "replica" else run.pid, signal.SIGKILL)
                killed[kind] += 1
            if kind == "replica":
                run.wait()
            else:
                run.communicate()
        if out.exists():
            assert out.read_bytes() == undisturbed
            out.unlink()
        parts = out.with_name("killed.jsonl.parts")
        done.append(sum(file.read_bytes().count(b"\n") for file in parts.glob("*.jsonl")) if parts.exists() else 400)
    assert _run(source, out, "--replicas", "2").returncode == 2
    assert out.read_bytes() == undisturbed
    print(f"killed {killed}; lines done after each: {done}")


def test_a_missing_model_is_a_one_line_error(source: Path) -> None:
    out = source.with_name("none.jsonl")
    run = _run(source, out, "--replicas", "2", "--max-sequences", "0")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "--max-sequences must be" in run.stderr
    run = _run(source, out, "--replicas", "2", "--address", "127.0.0.1:1")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "no Ray cluster answers at '127.0.0.1:1'" in run.stderr
    assert not out.exists()


_QUIET: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}


def _run(source: Path, out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PROGRAM, "batch", str(source), str(out), *options], timeout=280, **_QUIET)


def _replicas(run: "subprocess.Popen[str]") -> list[int]:
    """The processes of its replicas, once there are some."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        found = [pid for pid in _descendants(run.pid) if b"_Actor" in _command(pid)]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no replica came: {run.communicate()}")


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
