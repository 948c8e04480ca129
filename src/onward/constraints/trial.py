"""Grammars that llguidance's own limits do not hold are compiled in another process first, under a limit of time.

A thread that runs native code cannot be ended, and one that runs out of stack ends the whole process. So whatever is
long, or has what is not metered, is tried where it can do no harm: in a process that a timer ends.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance

from onward.errors import RequestError
from onward.util.process import renew_in_forks

SECONDS = 10.0
_PROGRAM = Path(__file__).with_name("trial_process.py")
# What is shorter nests less deep than any thread's stack, and llguidance's fuel bounds its time to a second or two.
_LONGEST_UNTRIED = 4_000
_MOST_REFUSALS = 256


def needs_trial(source: str) -> bool:
    """Whether a grammar may take long, or much stack."""
    may_hide = "%json" in source and "\\u" in source  # a key in escapes
    return len(source) > _LONGEST_UNTRIED or "multipleOf" in source or may_hide


class GrammarTrials:
    """The process that compiles first. It begins with the first grammar that needs it, and serves one at a time."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self.renew()
        renew_in_forks(self)
        weakref.finalize(self, _end, self._running)

    def renew(self) -> None:
        """A forked child has a process of its own: the parent's answers the parent."""
        self._lock = threading.Lock()
        for process in self._running:
            process.returncode = 0  # it is no child of this process, and nobody here waits for it
        self._running.clear()
        self._key: object = None
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def check(self, source: str, key: object, vocabulary: Callable[[], dict[str, Any]], name: str) -> None:
        """Compile a grammar in the other process.

        key: an object that tells vocabularies apart. It is kept, so no other one gets its id. name: of the grammar, for
        messages.

        Raises:
            RequestError: the process did not survive it; at once where the same grammar was refused before.
        """
        digest = hashlib.sha256(source.encode()).digest()
        with self._lock:
            refusal = self._refused.get(digest) or self._try(source, key, vocabulary)
            if refusal:
                self._refused[digest] = refusal
                if len(self._refused) > _MOST_REFUSALS:
                    self._refused.popitem(last=False)
                raise RequestError(f"{name} cannot be compiled: {refusal}")

    def _try(self, source: str, key: object, vocabulary: Callable[[], dict[str, Any]]) -> str:
        """Why not; empty if it can."""
        if not self._running or self._key != key or self._running[0].poll() is not None:
            _end(self._running)
            self._running.append(_start())
            self._key = key
            _write(self._running[0], vocabulary())
        process = self._running[0]
        _write(process, {"source": source, "seconds": SECONDS})
        assert process.stdout is not None
        if process.stdout.readline():
            return ""
        ended = process.wait()
        _end(self._running)
        if ended == -signal.SIGALRM:
            return f"that takes longer than {SECONDS:g} seconds. Make it smaller"
        return "it nests too deep, or needs too much memory. Make it smaller"


def _end(running: "list[subprocess.Popen[str]]") -> None:
    """End the process, if there is one."""
    while running:
        process = running.pop()
        process.kill()
        process.communicate()


def _start() -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(Path(llguidance.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _write(process: "subprocess.Popen[str]", said: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(said) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, as the next read says
