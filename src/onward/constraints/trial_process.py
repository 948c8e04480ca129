"""The process that tries to compile grammars, and may crash.

It runs as a program that imports only llguidance. Its input is a line of JSON with the vocabulary, then one with each
grammar, answered by an empty line. A grammar that takes too long, too much memory or too much stack ends the process.
"""

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import llguidance

# Less than other threads have, so that a grammar that compiles here compiles anywhere.
_STACK = 2**20
_MEMORY = 4 * 2**30


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
    limits = llguidance.LLParserLimits(verbose_errors=False)
    while line := sys.stdin.readline():
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, message["seconds"])  # its signal ends the process even in native code
        matcher = llguidance.LLMatcher(tokenizer, message["source"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
