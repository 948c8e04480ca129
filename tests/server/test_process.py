"""A real `onward serve demo`: it prints its address, drains at a signal, and ends at once at a second one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from onward.cli.main import run
from onward.cli.serve import _server_package
from onward.errors import RequestError

SECONDS = 60
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 1.0, "n": 8}


class Process:
    def __init__(self, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "onward", "serve", *flags, "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"} | environment
        )
        self.lines: list[str] = []
        self.url = self.until(r'"serves", "url": "([^"]*)"')

    def until(self, pattern: str) -> str:
        """Read the log up to a line like this."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1] if found.groups() else line
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines(keepends=True)
        return self.process.wait(SECONDS)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextmanager
def serving(*flags: str, **environment: str) -> Iterator[Process]:
    served = Process(*flags, **environment)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
        assert served.process.stderr is not None
        served.process.stderr.close()


def test_a_signal_lets_running_requests_end_and_exits_with_0() -> None:
    with serving("demo", "--drain", "30") as served:
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=SECONDS) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            served.until('"drains"')
            refused = httpx2.post(f"{served.url}/v1/completions", json=LONG, timeout=SECONDS)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.end() == 0
        assert not any(event["event"] in ("defect", "message") for event in served.events)


def test_requests_past_the_drain_time_are_cancelled_with_an_error() -> None:
    with serving("demo", "--drain", "0.1") as served:
        body = LONG | {"stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=SECONDS) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert "error" in json.loads(last.removeprefix("data: "))
        assert served.end() == 0
        assert any(event["event"] == "cancels" for event in served.events)


def test_a_second_signal_ends_the_server_at_once() -> None:
    with serving("demo", "--drain", "1000") as served:
        body = LONG | {"stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=SECONDS) as stream:
            next(stream.iter_lines())
            served.process.send_signal(signal.SIGTERM)
            served.until('"drains"')
            served.process.send_signal(signal.SIGTERM)
            assert served.end() == 128 + signal.SIGTERM, "not at the end of the drain, and not of the requests"


def test_flags_name_models_keys_and_hosts(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nfrom-file\n")
    flags = ("--model", "big=demo,quantize=int8,draft=lookup", "--model", "demo-draft", "--api-key-file", str(keys))
    with serving(*flags, "--max-new-tokens", "3", ONWARD_API_KEY="from-environment") as served:
        assert httpx2.get(f"{served.url}/v1/models").status_code == 401
        for key in ("from-file", "from-environment"):
            listed = httpx2.get(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()
            assert [model["id"] for model in listed["data"]] == ["big", "demo-draft"]
        body = {"model": "big", "prompt": "Once", "ignore_eos": True}
        headers = {"Authorization": "Bearer from-file"}
        answer = httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=SECONDS).json()
        assert answer["usage"]["completion_tokens"] == 3
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0


def test_an_address_in_use_is_reported_before_models_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert run(("serve", "no-such-model", "--port", str(other.getsockname()[1]))) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_an_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("onward.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("onward.server", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(RequestError, match=r"fastapi: pip install 'onward\[serve\]'"):
        _server_package()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "=demo"), "NAME="),
        (("--model", "a=demo,speed=9"), "OPTION=VALUE"),
        (("demo", "--model", "demo"), "models need different names"),
        (("demo", "--api-key-file", "/nonexistent"), "cannot be read"),
        (("demo", "--api-key", "a b"), "API key"),
        (("demo", "--host", "no.such.host.invalid"), "cannot listen"),
        (("demo", "--max-new-tokens", "-1"), "--max-new-tokens"),
        (("no-such-model", "--port", "0"), "no-such-model"),
    ],
)
def test_invalid_flags_are_one_line(flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("serve", *flags)) == 2
    stderr = capsys.readouterr().err
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in stderr


def test_a_batch_stopped_by_a_signal_continues_in_the_next_server(tmp_path: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    content = "".join(json.dumps({"custom_id": str(at), **line}) + "\n" for at in range(60))
    flags = ("demo", "--files-dir", str(tmp_path / "files"), "--max-sequences", "4")

    def state(url: str, id: str) -> dict[str, Any]:
        return httpx2.get(f"{url}/v1/batches/{id}", timeout=SECONDS).json()  # type: ignore[no-any-return]

    with serving(*flags) as served:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        file = httpx2.post(f"{served.url}/v1/files", timeout=SECONDS, **form).json()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx2.post(f"{served.url}/v1/batches", json=fields, timeout=SECONDS).json()
        while not state(served.url, batch["id"])["request_counts"]["completed"]:
            time.sleep(0.01)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        assert not any(event["event"] in ("defect", "message", "cancels") for event in served.events)
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    stored = json.loads((tmp_path / "files" / f"{batch['id']}.json").read_text())
    assert stored["status"] == "in_progress"
    with serving(*flags) as served:
        while (now := state(served.url, batch["id"]))["status"] in ("in_progress", "finalizing"):
            time.sleep(0.05)
        assert (now["status"], now["request_counts"]) == ("completed", {"total": 60, "completed": 60, "failed": 0})
        output = httpx2.get(f"{served.url}/v1/files/{now['output_file_id']}/content", timeout=SECONDS).text
        results = [json.loads(each) for each in output.splitlines()]
        assert [each["custom_id"] for each in results] == [str(at) for at in range(60)]
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
