"""The process that tries to compile grammars, and may crash.

It runs as a program that imports only llguidance. Its input is a line of JSON with the vocabulary, then one with each
grammar, answered by the number of bytes that it takes. A grammar that takes too long, too much memory or too much stack
ends the process. It yields the processor to its parent.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import llguidance

# Less than other threads have, so that a grammar that compiles here compiles anywhere.
_STACK = 2**20
# Bytes of the whole process, and of a grammar: large ones of practice take 15 MB.
_MEMORY, _ROOM = 2 * 2**30, 96 * 2**20
_NICE = 5
_PAUSE = 0.5  # seconds between looks at the parent


class Pieces:
    """A tokenizer for llguidance that is never used to encode text."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[str], special: Sequence[int], end: int) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids, self.eos_token_id = list(special), end

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts are str")
        return []


def _tokenizer(message: dict[str, Any]) -> llguidance.LLTokenizer:
    if "json" in message:
        return llguidance.LLTokenizer(message["json"], eos_token=message["end"])
    pieces = Pieces(message["tokens"], message["special"], message["end"])
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(pieces))


def _serve() -> None:
    tokenizer = _tokenizer(json.loads(sys.stdin.readline()))
    if (data := _memory(_DATA)) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data + _ROOM, resource.RLIM_INFINITY))
    limits = llguidance.LLParserLimits(verbose_errors=False)
    while line := sys.stdin.readline():
        message = json.loads(line)
        before = _memory(_RESIDENT)
        # Their signals end the process even in native code.
        signal.setitimer(signal.ITIMER_PROF, message["seconds"])
        signal.setitimer(signal.ITIMER_REAL, message["wall_seconds"])
        matcher = llguidance.LLMatcher(tokenizer, message["source"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(max(0, (_memory(_RESIDENT) or 0) - (before or 0)), flush=True)


_RESIDENT, _DATA = 1, 5  # fields of /proc/self/statm


def _memory(field: int) -> int | None:
    """Bytes of this process by a field of /proc/self/statm; None where there is no such file."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[field]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    with suppress(ValueError, OSError):  # macOS refuses limits below its address space; time is limited everywhere
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.stack_size(_STACK)
    thread, parent = threading.Thread(target=_serve, daemon=True), os.getppid()
    thread.start()
    while thread.is_alive() and os.getppid() == parent:  # else nobody waits for the grammar
        thread.join(_PAUSE)
    os._exit(0)
