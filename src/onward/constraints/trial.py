"""Grammars that llguidance's own limits may not bound are compiled in another process first, with a time limit.

Native code in a thread cannot be stopped, and a stack overflow crashes the whole process. So grammars that are long, or
use features that llguidance doesn't meter, are tried in a process that a timer kills.
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
# Shorter grammars can't overflow a thread's stack, and llguidance's fuel bounds their time to a second or two.
_MAX_UNTRIED = 4_000
_MAX_REFUSALS = 256


def needs_trial(source: str) -> bool:
    """Whether a grammar may take long, or much stack."""
    may_hide = "%json" in source and "\\u" in source  # a key in escapes
    return len(source) > _MAX_UNTRIED or "multipleOf" in source or may_hide


class GrammarTrials:
    """The process for trials. It starts with the first grammar that needs it, and compiles one at a time."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self.renew()
        renew_in_forks(self)
        weakref.finalize(self, _end, self._running)

    def renew(self) -> None:
        """Forget the process, also in a forked child: it is the parent's."""
        self._lock = threading.Lock()
        for process in self._running:
            process.returncode = 0  # it is not a child of this process, so don't wait for it
        self._running.clear()
        self._key: object = None
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def check(self, source: str, key: object, vocabulary: Callable[[], dict[str, Any]], name: str) -> None:
        """Compile a grammar in the other process.

        key: an object that identifies the vocabulary. name: of the grammar, for messages.

        Raises:
            RequestError: the process did not survive it; immediately for a grammar that was rejected before.
        """
        digest = hashlib.sha256(source.encode()).digest()
        with self._lock:
            refusal = self._refused.get(digest) or self._try(source, key, vocabulary)
            if refusal:
                self._refused[digest] = refusal
                if len(self._refused) > _MAX_REFUSALS:
                    self._refused.popitem(last=False)
                raise RequestError(f"{name} cannot be compiled: {refusal}")

    def _try(self, source: str, key: object, vocabulary: Callable[[], dict[str, Any]]) -> str:
        """The reason why it can't be compiled; empty if it can."""
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
        returncode = process.wait()
        _end(self._running)
        if returncode == -signal.SIGALRM:
            return f"that takes longer than {SECONDS:g} seconds. Make it smaller"
        return "it nests too deep, or needs too much memory. Make it smaller"


def _end(running: "list[subprocess.Popen[str]]") -> None:
    while running:
        process = running.pop()
        process.kill()
        process.communicate()


def _start() -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(Path(llguidance.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment, pipe = {**os.environ, "PYTHONPATH": path}, subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM)], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def _write(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, as the next read will show
