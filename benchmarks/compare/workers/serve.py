"""The worker's side: a `Service` is loaded once and then reads commands, one JSON object a line.

    {"do": "load"}                               -> {"seconds": 1.2, "instructions": "AVX2 FMA"}
    {"do": "memory"}                             -> {"peak": bytes}                   the peak memory of this process
    {"do": "quit"}

A `Session`, one text or one batch at a time, answers also

    {"do": "begin", "ids": [...]}                -> {"seconds": 0.4, "token": 17}     a fresh prompt, to its first token
    {"do": "more", "count": 3}                   -> {"seconds": [.02, .02, .02]}      each further token of that text
    {"do": "batch", "prompts": [...], "count": n} -> {"seconds": [...]}               each step of all rows

An answer {"error": "..."} stands for any of them. With --once a session loads, decodes one token after a prompt of
32, writes it and ends: that is how the time from process start is taken.
"""

import ctypes
import itertools
import json
import os
import re
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONCE_PROMPT = range(100, 132)
TOKENS_OF_ONE_TEXT = 512  # room for all further tokens that are asked for after one prompt


class Service(ABC):
    """One contender with its model. Greedy, no end of text; `capacity` positions suffice for a request.

    variant: a choice that only this contender knows; "" for its usual way.
    sequences: the most texts at a time.
    instructions: those that the program uses, as far as it reports them.
    """

    instructions = "of its own choice"

    def __init__(
        self, model: str, precision: str, threads: int, capacity: int, variant: str = "", sequences: int = 1
    ) -> None:
        self.model_path, self.precision, self.threads = model, precision, threads
        self.capacity, self.variant, self.sequences = capacity, variant, sequences

    @abstractmethod
    def load(self) -> None:
        """Get ready: what a program does before its first prompt."""

    @abstractmethod
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of its kind; ValueError for others."""


class Session(Service):
    """A contender that is asked for one text, or one batch, at a time."""

    @abstractmethod
    def begin(self, ids: list[int]) -> int:
        """Process a prompt, forgetting what came before; returns the first token."""

    @abstractmethod
    def more(self, count: int) -> list[float]:
        """Decode `count` further tokens; returns the seconds of each."""

    def batch(self, prompts: list[list[int]], count: int) -> list[float]:
        """Decode `count` tokens of several texts together; returns the seconds of each step after the first."""
        raise NotImplementedError(f"{type(self).__name__} is compared at batch 1 only")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        what = request["do"]
        if what == "begin":
            began = time.perf_counter()
            token = self.begin(request["ids"])
            return {"seconds": time.perf_counter() - began, "token": token}
        if what == "more":
            return {"seconds": self.more(request["count"])}
        if what == "batch":
            return {"seconds": self.batch(request["prompts"], request["count"])}
        raise ValueError(f"unknown request {what!r}")


class LlamaSession(Session):
    """A session through llama.cpp's C API, or a fork's: prompts in chunks, then one id at a time."""

    CHUNK = 512
    last: int

    @abstractmethod
    def clear(self) -> None:
        """Forget the text before."""

    @abstractmethod
    def decode(self, ids: list[int]) -> None:
        """Process the next ids."""

    @abstractmethod
    def pick(self) -> int:
        """Choose the next token, and remember it as `last`."""

    def begin(self, ids: list[int]) -> int:
        self.clear()
        for start in range(0, len(ids), self.CHUNK):
            self.decode(ids[start : start + self.CHUNK])
        return self.pick()

    def more(self, count: int) -> list[float]:
        return timed_steps(self._step, count)

    def _step(self) -> None:
        self.decode([self.last])
        self.pick()


def system_instructions(system_info: bytes) -> str:
    """The vector instructions of a line such as "AVX = 1 | AVX2 = 1 | AVX512 = 0 | LLAMAFILE = 1", by llama.cpp."""
    found = re.findall(r"\b(AVX\w*|FMA|F16C|AMX\w*|NEON|DOTPROD|MATMUL_INT8|SVE) = 1", system_info.decode())
    return " ".join(found)


def timed_steps(step: Callable[[], Any], count: int) -> list[float]:
    """The seconds of each of `count` calls."""
    times = [time.perf_counter()]
    for _ in range(count):
        step()
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def serve(kind: type[Service]) -> None:
    """Run a worker: MODEL PRECISION THREADS CAPACITY VARIANT SEQUENCES [--once]."""
    model, precision, threads, capacity, variant, sequences, *rest = sys.argv[1:]
    _end_with_parent()
    # Libraries write to standard output as they please: their lines go to standard error, ours to the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    service = kind(model, precision, int(threads), int(capacity), variant, int(sequences))
    if rest == ["--once"]:
        assert isinstance(service, Session), "only a session answers a single prompt"
        service.load()
        answers.write(f"{service.begin(list(ONCE_PROMPT))}\n")
        return
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            answer = _answer(service, request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # some peers take seconds to free a model


def _end_with_parent() -> None:
    """Ask to be killed when the parent ends: a stopped process would not notice, and holds gigabytes."""
    set_parent_death_signal = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _answer(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    what = request["do"]
    if what == "load":
        began = time.perf_counter()
        service.load()
        return {"seconds": time.perf_counter() - began, "instructions": service.instructions}
    if what == "memory":
        return {"peak": _peak_memory()}
    return service.answer(request)


def _peak_memory() -> int:
    """Bytes resident at the most. getrusage would count what this process was forked from."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)
