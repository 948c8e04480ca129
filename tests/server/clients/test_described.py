"""The server answers as /openapi.json describes, for any request."""

import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SECONDS = 240


def test_schemathesis_finds_no_undocumented_answer(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("schemathesis")
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    command = ("-c", program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--max-examples", "25")
    seeded = ("--phases", "examples,fuzzing", "--seed", "1", "--generation-deterministic")
    monkeypatch.chdir(tmp_path)  # where it stores its findings
    done = subprocess.run(
        [sys.executable, *command, *seeded], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    server.wait_idle()
