"""Other clients of a server, in a separate process: how long they wait during an attack.

It reads lines from stdin: `{"model": …}` starts it, an empty line ends it. It prints the times as one line of JSON.
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PAUSE = 0.02  # seconds between two requests of one neighbour
PATIENCE = 10.0  # seconds that a neighbour waits for an answer
MEGABYTE = 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory(pid: int) -> float:
    """Resident memory of a process and its descendants, in MB; 0 where there is no /proc.

    A child that has not executed its program yet has its parent's memory, so only what it has beyond that counts.
    """
    try:
        own, program = _resident(pid), _program(pid)
        children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _words(file)]
    except (OSError, IndexError):  # it has ended
        return 0.0
    total = own
    for child in children:
        with suppress(OSError):
            shared = own if _program(child) == program else 0.0
            total += max(0.0, memory(child) - shared)
    return total


def _resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / MEGABYTE


def _program(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # the thread has ended
        return []


@dataclass(frozen=True)
class Waits:
    """Seconds that each request of the neighbours took, by kind; at least `PATIENCE` if it was not answered.

    faults: answers other than 200, and connections that broke. peak: most memory of the server, in MB.
    """

    seconds: dict[str, list[float]]
    faults: list[str]
    peak: float

    def worst(self, kind: str) -> float:
        return max(self.seconds[kind])

    def percentile(self, kind: str, percent: float) -> float:
        ordered = sorted(self.seconds[kind])
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Neighbours:
    """Starts the process. key: their API key, other than the attacker's; empty for none."""

    def __init__(self, port: int, pid: int, key: str) -> None:
        command = [sys.executable, __file__, str(port), str(pid), key]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, model: str) -> None:
        self._write(json.dumps({"model": model}))

    def end(self) -> Waits:
        """Every neighbour has been answered at least once, or has waited for `PATIENCE`."""
        self._write("")
        assert self._process.stdout is not None
        return Waits(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


def _main(port: int, pid: int, key: str) -> None:
    for line in sys.stdin:
        model = json.loads(line)["model"]
        over = threading.Event()
        waits: dict[str, Any] = {"seconds": {"health": [], "metrics": [], "chat": []}, "faults": [], "peak": 0.0}
        chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
        requests: dict[str, tuple[str, str, bytes | None]] = {
            "health": ("GET", "/health", None),
            "metrics": ("GET", "/metrics", None),
            "chat": ("POST", "/v1/chat/completions", json.dumps(chat).encode()),
        }
        threads = [
            threading.Thread(target=_repeat, args=(over, _asking(port, key, request), waits["seconds"][kind], waits))
            for kind, request in requests.items()
        ]
        threads.append(threading.Thread(target=_watch_memory, args=(over, pid, waits)))
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        over.set()
        for thread in threads:
            thread.join()
        print(json.dumps(waits), flush=True)


def _repeat(over: threading.Event, ask: Callable[[], str], seconds: list[float], waits: dict[str, Any]) -> None:
    while True:
        began = time.perf_counter()
        fault = ask()
        took = time.perf_counter() - began
        seconds.append(took if not fault else max(took, PATIENCE))
        if fault:
            waits["faults"].append(fault)
        if over.wait(PAUSE):
            return


def _asking(port: int, key: str, request: tuple[str, str, bytes | None]) -> Callable[[], str]:
    """A request on its own connection; its result describes the failure, if any."""
    method, path, body = request
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask() -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            return "" if answer.status == 200 else f"{path}: {answer.status} {content[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            return f"{path}: {error!r}"
        finally:
            connection.close()

    return ask


def _watch_memory(over: threading.Event, pid: int, waits: dict[str, Any]) -> None:
    while True:
        waits["peak"] = max(waits["peak"], memory(pid))
        if over.wait(PAUSE):
            return


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
