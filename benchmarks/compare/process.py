"""The parent's side of a worker: starts it, sends requests, and stops it while another one is measured."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import HOME


class WorkerError(RuntimeError):
    """A worker answered with an error or died."""


class Worker:
    """A contender's process. It is stopped (SIGSTOP) after an answer, and runs only inside `ask`.

    So the threads of an idle contender, which may spin or poll, take nothing from the one that is measured, and each
    contender keeps its own waiting policy.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.log = HOME / "logs" / f"{name.replace(' ', '-')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            # In a session of its own: when a shell leaves, the system wakes what is stopped in the shell's.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request; all other contenders are stopped meanwhile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"{self.name} ended (status {self._process.wait()}) at {request['do']}: see {self.log}")
        os.kill(self._process.pid, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}, at {request['do']}: {answer['error']}: see {self.log}")
        return answer

    def quit(self) -> None:
        """End the process in any state."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def worker_command(
    python: Path,
    worker: str,
    model: Path,
    precision: str,
    threads: int,
    capacity: int,
    variant: str = "",
    sequences: int = 1,
    package: str = "benchmarks.compare.workers",
) -> list[str]:
    # Not resolved: a virtual environment's python is a link, and what it is called tells it where it is.
    return [
        str(python.absolute()),
        "-m",
        f"{package}.{worker}",
        str(model.absolute()),
        precision,
        str(threads),
        str(capacity),
        variant,
        str(sequences),
    ]


def seconds_to_first_token(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """From process start to the first token on standard output, in turns; a first round warms the page cache."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name in list(seconds):
            log = HOME / "logs" / f"{name.replace(' ', '-')}-start.log"
            began = time.perf_counter()
            try:
                taken = _until_first_line([*commands[name], "--once"], log)
            except WorkerError as error:
                print(error, file=sys.stderr)
                del seconds[name]
                continue
            if turn:
                seconds[name].append(taken - began)
    return seconds


def _until_first_line(command: Iterable[str], log: Path) -> float:
    log.parent.mkdir(parents=True, exist_ok=True)
    # With the compiled modules that an installation has; the first round, which does not count, may write them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("w") as errors:
        process = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        with process, process.stdout:
            line = process.stdout.readline()
            arrived = time.perf_counter()
            # Ending well is no part of the time, and some peers take seconds for it.
            process.kill()
    if not line.strip().isdigit():
        raise WorkerError(f"no first token from {' '.join(command)}: see {log}")
    return arrived
