"""Grammars that llguidance's own limits may not bound are compiled in another process first, with a time limit.

Native code in a thread cannot be stopped, and a stack overflow crashes the whole process. So grammars that are long, or
use features that llguidance doesn't meter, are tried in a process that a timer kills.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import llguidance

from onward.util.process import renew_in_forks

# The most processor time of a trial, and the most time by the clock, which a busy machine needs.
SECONDS, WALL_SECONDS = 10.0, 120.0
# Trials that run at once.
PROCESSES = 2
_PROGRAM = Path(__file__).with_name("trial_process.py")
# Shorter grammars can't overflow a thread's stack, and llguidance's fuel bounds their time to a second or two.
_MAX_UNTRIED = 4_000


def needs_trial(source: str) -> bool:
    """Whether a grammar may take long, or much stack."""
    may_hide = "%json" in source and "\\u" in source  # a key in escapes
    return len(source) > _MAX_UNTRIED or "multipleOf" in source or may_hide


class Refusal(str):
    """Why a grammar cannot be used: an error without its subject; empty if it can. It is `lasting` if another trial
    would not help. nbytes: memory of a grammar that can be used."""

    lasting: bool
    nbytes: int

    def __new__(cls, problem: str, *, lasting: bool = True, nbytes: int = 0) -> "Refusal":
        refusal = super().__new__(cls, problem)
        refusal.lasting, refusal.nbytes = lasting, nbytes
        return refusal


# A process that has grown by more bytes for a grammar is not used again.
_MAX_GROWTH = 16 * 2**20


class Trial:
    """A grammar while it is tried and compiled, for all who wait for it.

    key: of the grammar and its vocabulary. future: its result, a matcher or a refusal; None if it was abandoned.
    """

    def __init__(self, key: object) -> None:
        self.key = key
        self.future: Future[llguidance.LLMatcher | Refusal | None] = Future()
        self.abandoned = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._process: subprocess.Popen[str] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the result inside. The trial is abandoned when the last one leaves before it."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting and not self.future.done():
                    self.abandoned = True
                    if self._process is not None:
                        self._process.kill()

    @contextmanager
    def running(self, process: "subprocess.Popen[str]") -> Iterator[None]:
        """The process of the trial runs inside."""
        with self._lock:
            self._process = process
            if self.abandoned:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class TrialPending(Exception):  # noqa: N818 (no error)
    """A grammar is being tried. What raised this can be called again once the trial has its result."""

    def __init__(self, trial: Trial) -> None:
        super().__init__("a grammar is being tried")
        self.trial = trial


class _Deferral:
    def __init__(self, client: str, trials: Iterable[Trial]) -> None:
        self.client, self.trials = client, {trial.key: trial for trial in trials}


_deferral: ContextVar[_Deferral | None] = ContextVar("deferral", default=None)


@contextmanager
def deferred(client: str, trials: Iterable[Trial] = ()) -> Iterator[None]:
    """Inside, a grammar that needs a trial raises `TrialPending` instead of blocking. client: trials of several take
    turns. trials: the results known by now."""
    token = _deferral.set(_Deferral(client, trials))
    try:
        yield
    finally:
        _deferral.reset(token)


def wait_for(key: object, start: Callable[[str], Trial]) -> "llguidance.LLMatcher | Refusal":
    """The result of a trial. start: begins it for a client, or joins one that runs. Raises `TrialPending` inside
    `deferred`, if it is not among the known ones."""
    deferral = _deferral.get()
    if deferral is not None:
        known = deferral.trials.get(key)
        if known is None or (result := known.future.result()) is None:
            raise TrialPending(start(deferral.client))
        return result
    while True:
        trial = start("")
        with trial.waiting():
            if (result := trial.future.result()) is not None:
                return result


class TrialProcesses:
    """The processes for trials. They start with the first grammars that need them, and each compiles one at a time."""

    def __init__(self) -> None:
        # All of them, each with the object that identifies its vocabulary; and those that run no trial.
        self._all: dict[subprocess.Popen[str], object] = {}
        self._idle: list[subprocess.Popen[str]] = []
        self.renew()
        renew_in_forks(self)
        weakref.finalize(self, _end_all, self._all)

    def renew(self) -> None:
        """Forget the processes, also in a forked child: they are the parent's."""
        self._lock = threading.Lock()
        for process in self._all:
            process.returncode = 0  # it is not a child of this process, so don't wait for it
        self._all.clear()
        self._idle.clear()

    def attempt(self, trial: Trial, source: str, key: object, vocabulary: Callable[[], Mapping[str, Any]]) -> Refusal:
        """Compile a grammar in another process. key: an object that identifies the vocabulary.

        Returns:
            Why it can't be compiled; empty if it can, or if the trial was abandoned.
        """
        process = self._process(key, vocabulary)
        message = {"source": source, "seconds": SECONDS, "wall_seconds": WALL_SECONDS}
        with trial.running(process):
            _write(process, message)
            assert process.stdout is not None
            answer = process.stdout.readline()
        if answer:
            nbytes = int(answer)
            if nbytes > _MAX_GROWTH:  # the process keeps that memory
                self._end(process)
            else:
                with self._lock:
                    self._idle.append(process)
            return Refusal("", nbytes=nbytes)
        returncode = process.wait()
        self._end(process)
        if trial.abandoned:
            return Refusal("")
        if returncode == -signal.SIGPROF:
            return Refusal(f"that takes longer than {SECONDS:g} seconds. Make it smaller")
        if returncode == -signal.SIGALRM:
            problem = f"that took longer than {WALL_SECONDS:g} seconds on a busy machine. Try again later"
            return Refusal(problem, lasting=False)
        return Refusal("it nests too deep, or needs too much memory. Make it smaller")

    def _process(self, key: object, vocabulary: Callable[[], Mapping[str, Any]]) -> "subprocess.Popen[str]":
        """An idle process with this vocabulary, or else a new one in the place of those with another."""
        with self._lock:
            same = [process for process in self._idle if self._all[process] is key and process.poll() is None]
            others = [process for process in self._idle if process not in same]
            self._idle[:] = same[1:]
        for process in others:
            self._end(process)
        if same:
            return same[0]
        process = _start()
        with self._lock:
            self._all[process] = key
        _write(process, vocabulary())
        return process

    def _end(self, process: "subprocess.Popen[str]") -> None:
        _end(process)
        with self._lock:
            self._all.pop(process, None)


def _end_all(processes: "dict[subprocess.Popen[str], object]") -> None:
    while processes:
        _end(processes.popitem()[0])


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _start() -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(Path(llguidance.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment, pipe = {**os.environ, "PYTHONPATH": path}, subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def _write(process: "subprocess.Popen[str]", message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, as the next read will show
