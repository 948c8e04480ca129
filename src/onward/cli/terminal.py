"""What a terminal gets and a pipe does not: spinners, dim notes, and text made safe to show."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

# Control characters, which untrained models emit and terminals obey, as the pictures that Unicode has for them.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether `stream` is one; a closed standard stream is None."""
    return stream is not None and stream.isatty()


def write(text: str) -> None:
    """Text to stdout as it comes: exactly itself into a pipe, without live control characters on a terminal."""
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def end_line(shown: str) -> None:
    """On a terminal, leave the cursor at the start of a line after `shown`."""
    if sys.stdout.isatty() and not shown.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def report(kind: str, text: str) -> None:
    """A line on stderr that is an "error" or a "warning"."""
    if sys.stderr is not None:  # which print would take for standard output
        with suppress(OSError):
            print(f"{kind}: {' '.join(text.split())}", file=sys.stderr)


def note(text: str) -> None:
    """A line on stderr, dim on a terminal."""
    if sys.stderr is None:
        return
    from rich.console import Console

    with suppress(OSError):
        Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def waiting(what: str, *, delay_s: float = 0.2) -> Iterator[None]:
    """A spinner on stderr while the block runs, once it has run for `delay_s`; nothing where that is no terminal."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    status = Console(stderr=True).status(escape(what))
    timer = threading.Timer(delay_s, status.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A start under way must be over before it can be undone.
        timer.join()
        status.stop()
