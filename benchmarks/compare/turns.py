"""Contenders that take turns on one machine, and the machine's read bandwidth between them."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.process import Worker, WorkerError, worker_command


class Turns:
    """The workers that are compared. A worker that fails is left out from then on.

    failed: the reason, by name.
    """

    def __init__(self, threads: int, vocab_size: int, seed: int) -> None:
        self.failed: dict[str, str] = {}
        self.vocab_size, self.random = vocab_size, random.Random(seed)
        self._workers: dict[str, Worker] = {}
        self._meter = _start_meter(threads)

    def enter(self, name: str, command: list[str]) -> tuple[float, str]:
        """Start a contender and let it load; returns the seconds of it and its instructions, 0 and "" if it failed."""
        progress(f"loading {name}")
        self._workers[name] = Worker(name, command)
        loaded = 0.0, ""

        def load(worker: Worker) -> None:
            nonlocal loaded
            answer = worker.ask(do="load")
            loaded = answer["seconds"], answer["instructions"]

        self.attempt(name, load)
        return loaded

    def prompt(self, length: int) -> list[int]:
        """A fresh prompt, because the peers cache prompts."""
        return [self.random.randrange(self.vocab_size) for _ in range(length)]

    def everyone(self, turn: int = 0) -> list[str]:
        """Names in an order that rotates with the turn, so that no contender always follows the same one."""
        names = list(self._workers)
        shift = turn % max(1, len(names))
        return names[shift:] + names[:shift]

    def attempt(self, name: str, run: Callable[[Worker], None]) -> None:
        """Call a function with a contender, unless it has failed."""
        if name in self._workers:
            try:
                run(self._workers[name])
            except WorkerError as error:
                progress(str(error))
                self.failed[name] = str(error)
                self._workers.pop(name).quit()

    def read_bandwidth(self) -> float:
        """The current read bandwidth in bytes per second."""
        (seconds,) = self._meter.ask(do="more", count=1)["seconds"]
        return 1e9 / seconds

    def end(self) -> None:
        for worker in [*self._workers.values(), self._meter]:
            worker.quit()


def _start_meter(threads: int) -> Worker:
    meter = Worker("bandwidth", worker_command(Path(sys.executable), "bandwidth", Path(), "-", threads, 0))
    meter.ask(do="load")
    return meter


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
