"""A client of a deployment that reads a stream event by event."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.replicas import pid_of

STORY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0.5, "seed": 10, "stream": True}


@dataclass
class Stream:
    """The stream that a client received. replica: id of the first replica. last_id: id of the last event."""

    status: int = 0
    replica: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    last_id: str = ""
    is_whole: bool = False

    @property
    def pid(self) -> int:
        """The process of the replica; 0 before there is one."""
        return pid_of(self.replica) if self.replica else 0

    @property
    def content(self) -> list[Any]:
        """All data of each text, independent of its division into events: the parts in order, then the usage."""
        texts: dict[int, list[Any]] = {}
        for choice in (choice for event in self.events for choice in event.get("choices", ())):
            parts = texts.setdefault(choice["index"], ["", [], None])
            parts[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            parts[1] += zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)
            parts[2] = choice["finish_reason"] or parts[2]
        others = [event.get("usage", event) for event in self.events if not event.get("choices")]
        for usage in others:
            usage.pop("prompt_tokens_details", None)  # cached tokens depend on the replica
        return [sorted(texts.items()), others]


def read(
    port: int,
    body: dict[str, Any],
    at: int = -1,
    act: Callable[[Stream], None] = lambda stream: None,
    headers: dict[str, str] | None = None,
    path: str = "/v1/completions",
) -> Stream:
    """Ask, and call `act` once `at` events have come. A connection that breaks ends the stream, and is no error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    stream = Stream()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        if at == 0:
            act(stream)
        answer = connection.getresponse()
        stream.status = answer.status
        stream.replica = answer.getheader("x-onward-replica") or ""
        while line := answer.readline():
            if line.startswith(b"id: "):
                stream.last_id = line[4:].decode().strip()
            elif line == b"data: [DONE]\n":
                stream.is_whole = True
            elif line.startswith(b"data: "):
                stream.events.append(json.loads(line[6:]))
                if len(stream.events) == at:
                    act(stream)
    except (http.client.HTTPException, OSError):
        pass
    finally:
        connection.close()
    return stream


@contextlib.contextmanager
def deployed(*options: str) -> Iterator[tuple[int, str]]:
    """`onward deploy demo`, with one replica: the port where it listens, and its output before."""
    port = free_port()
    command = [sys.executable, "-m", "onward", "deploy", "demo", "--replicas", "1", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        log = ""
        while f"127.0.0.1:{port}" not in (line := process.stdout.readline()):
            log += line
            assert process.poll() is None, log
        yield port, log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def signal_it(number: int) -> Callable[[Stream], None]:
    """Send a signal to the replica that serves the stream."""

    def act(stream: Stream) -> None:
        assert stream.replica, "the answer says who made it"
        os.kill(stream.pid, number)

    return act


def undisturbed(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Stream:
    """The answer of an undisturbed run. Replicas that were lost before may still be restarting."""
    end = time.monotonic() + 60
    while True:
        stream = read(port, body, path=path)
        if stream.is_whole or time.monotonic() > end:
            return stream
        time.sleep(0.5)


def check_same(got: Stream, expected: Stream) -> None:
    assert expected.is_whole
    assert "error" not in got.events[-1], got.events[-1]
    assert got.content == expected.content
    assert got.is_whole


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ancestors(pid: int) -> list[int]:
    """The processes that a process descends from, the nearest first."""
    found = []
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """The processes that descend from a process."""
    found = []
    for other in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended
            if pid in ancestors(other):
                found.append(other)
    return found
