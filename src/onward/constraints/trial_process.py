"""The process that compiles a grammar before this one does, and that may die of it.

It is run as a program, with llguidance alone. A line of JSON says the vocabulary, each line after it one grammar, and
the answer to each is an empty line. A grammar that takes too long, too much memory or too much stack ends the process.
"""

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import llguidance

# Less than other threads have, so that what is compiled here is compiled anywhere.
_STACK = 2**20
_MEMORY = 4 * 2**30


class Pieces:
    """A tokenizer of bytes as llguidance reads it; grammars are tried, and no text is encoded."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[str], special: Sequence[int], end: int) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids, self.eos_token_id = list(special), end

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts are str")
        return []


def _tokenizer(said: dict[str, Any]) -> llguidance.LLTokenizer:
    if "json" in said:
        return llguidance.LLTokenizer(said["json"], eos_token=said["end"])
    pieces = Pieces(said["tokens"], said["special"], said["end"])
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(pieces))


def _serve() -> None:
    tokenizer = _tokenizer(json.loads(sys.stdin.readline()))
    limits = llguidance.LLParserLimits(verbose_errors=False)
    while line := sys.stdin.readline():
        said = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, said["seconds"])  # whose signal ends a process, native code or not
        matcher = llguidance.LLMatcher(tokenizer, said["source"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
