"""The same bodies as lines of `onward batch`: each gets a result or an error, and the run reaches its end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.hostile.attacks import ATTACKS, TEXT
from tests.hostile.bodies import Operation
from tests.hostile.neighbours import memory
from tests.hostile.program import Standing, bound_memory
from tests.hostile.running import GROWTH
from tests.hostile.sending import whole
from tests.hostile.test_fuzz import FULL, Fuzzed, drawn

from onward.protocols import PROTOCOLS

SECONDS = 1200.0 if FULL else 120.0  # of a run
BODIES = 5_000 if FULL else 100  # of each kind
SOUND = b'{"prompt":"Once","max_tokens":2}'


pytestmark = pytest.mark.timeout(2 * SECONDS + 60)


def test_every_line_is_answered(keyed: Standing, tmp_path: Path) -> None:
    lines = [*_attacks(), *_drawn(Fuzzed(keyed.program.target)), (TEXT, SOUND)]
    most = _batch(tmp_path, lines)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(results) == len(lines)
    by_id = {result["custom_id"]: result for result in results}
    assert by_id[f"line {len(lines) - 1}"]["response"]["status_code"] == 200
    for result in results:
        answer, error = result["response"], result["error"]
        assert (answer is None) != (error is None), result
        if answer is not None and answer["status_code"] != 200:
            assert answer["status_code"] < 500, result
            assert answer["body"]["error"]["message"], result
        if error is not None:
            assert error["message"], result
    assert most - keyed.program.idle_memory < GROWTH  # an idle server needs at least as much as an idle batch


def _attacks() -> list[tuple[str, bytes]]:
    """A third of the small ones of the table; in full all, and the large ones."""
    chosen = [
        each
        for each in ATTACKS
        if each.path in PROTOCOLS and each.send is whole and each.model == "demo" and not each.headers
        if FULL or not callable(each.body)
    ]
    bodies = [(each.path, body) for each in chosen[:: 1 if FULL else 3] for body in each.bodies()[:1]]
    return [(path, body) for path, body in bodies if b"\n" not in body]


def _drawn(fuzzed: Fuzzed) -> list[tuple[str, bytes]]:
    found: list[tuple[Operation, bytes]] = []
    for bodies in (fuzzed.sound(), fuzzed.hostile()):
        drawn(bodies, BODIES, found.append)
    return [(operation.path, body) for operation, body in found if operation.path in PROTOCOLS]


def _batch(folder: Path, lines: list[tuple[str, bytes]]) -> float:
    """Run it, and return the most memory that it had, in MB."""
    head = '{{"custom_id":"line {}","method":"POST","url":"{}","body":'
    content = [head.format(at, path).encode() + (body or b"?") + b"}\n" for at, (path, body) in enumerate(lines)]
    (folder / "in.jsonl").write_bytes(b"".join(content))
    command = [sys.executable, "-m", "onward", "batch", str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        bound_memory(process.pid)
        try:
            most = _until_end(process)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read()
    unanswered = "" if most else f"no end within {SECONDS:g} s; {_unanswered(folder)} lines have no result\n"
    assert not unanswered, unanswered + output
    assert "Traceback" not in output, output
    assert process.returncode in (0, 2), output  # 2: some lines could not be served
    return most


def _until_end(process: subprocess.Popen[bytes]) -> float:
    """The most memory that it had, in MB; 0 if it does not end."""
    # Not `ru_maxrss`: on Linux that of a child begins with its parent's, however large pytest is.
    end, most = time.monotonic() + SECONDS, 0.0
    while time.monotonic() < end:
        most = max(most, memory(process.pid))
        if process.poll() is not None:
            return most
        time.sleep(0.05)
    return 0.0


def _unanswered(folder: Path) -> int:
    results = folder / "out.jsonl"
    answered = len(results.read_bytes().splitlines()) if results.exists() else 0
    return len((folder / "in.jsonl").read_bytes().splitlines()) - answered
