"""Terminal output: streamed text, notes, errors and spinners; control characters are made visible."""

import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.language_model import Completion, Piece

# Unicode pictures for control characters: untrained models emit them, and a terminal would obey them.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_BAR_WIDTH = 20
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"  # ECMA-48

# The first column of a table row.
_LABEL = re.compile(r" +\S.*? {2,}(?=\S)")


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal; a closed standard stream is None."""
    return stream is not None and stream.isatty()


def write(text: str) -> None:
    """Write and flush text to stdout: unchanged to a pipe, with visible control characters to a terminal."""
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class TextWriter:
    """Write text to stdout in pieces, as `write` does. can_dim: whether the terminal supports dim text."""

    def __init__(self) -> None:
        self._last = "\n"
        self.can_dim = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"

    def write(self, text: str, *, dim: bool = False) -> None:
        self._last = text[-1:] or self._last
        if dim and text and self.can_dim:
            sys.stdout.write(f"{_DIM}{text.translate(_PICTURES)}{_NORMAL}")
            sys.stdout.flush()
        else:
            write(text)

    @property
    def at_line_start(self) -> bool:
        """Whether the text so far is empty or ends with a newline."""
        return self._last == "\n"

    def end_line(self) -> None:
        """On a terminal, end the last line."""
        if sys.stdout.isatty() and not self.at_line_start:
            write("\n")


def columns() -> int:
    """Return the current width of the terminal, or 80 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fitted(text: str) -> str:
    """Wrap lines to the terminal's width."""
    if not is_terminal(sys.stdout):
        return text
    return "\n".join(wrapped(line, columns()) for line in text.split("\n"))


def wrapped(line: str, width: int) -> str:
    """Wrap a line; a table row continues below its second column. Paths stay whole, so that they can be copied."""
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    indent = " " * (label.end() if label else len(line) - len(line.lstrip()))
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.fill(line, width, subsequent_indent=indent, **options)


def shortened(text: str, width: int) -> str:
    """Return the text as one line of at most `width` columns, cut with an ellipsis."""
    from wcwidth import wcswidth

    line = " ".join(text.split()).translate(_PICTURES)
    if wcswidth(line) <= width:
        return line
    while line and wcswidth(line) >= width:
        line = line[:-1]
    return f"{line.rstrip()}…"


def report(kind: str, text: str) -> None:
    """Print an "error" or a "warning" as one line to stderr."""
    if sys.stderr is not None:  # print would fall back to standard output
        with suppress(OSError):
            line = f"{kind}: {' '.join(text.split())}"
            width = shutil.get_terminal_size().columns
            print(wrapped(line, width) if is_terminal(sys.stderr) else line, file=sys.stderr)


def note(text: str) -> None:
    """Print a line to stderr, dim on a terminal."""
    if sys.stderr is None:
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with suppress(OSError):
        console.print(text, style="dim", markup=False, soft_wrap=not is_terminal(sys.stderr))


@contextmanager
def waiting(message: str, *, delay_s: float = 0.2) -> Iterator[Callable[..., None]]:
    """Show a spinner on stderr while the block runs, after `delay_s`, if it is a terminal.

    Yields a function that adds a progress bar: it takes the completed fraction, from 0 to 1, and a text after the bar.
    """
    if not is_terminal(sys.stderr):
        yield lambda fraction, counts="": None
        return
    from rich.console import Console
    from rich.markup import escape

    status = Console(stderr=True).status(escape(message))
    timer = threading.Timer(delay_s, status.start)
    timer.start()

    def show(fraction: float, counts: str = "") -> None:
        filled = round(fraction * _BAR_WIDTH)
        bar = f"{'━' * filled}[dim]{'─' * (_BAR_WIDTH - filled)}[/dim] {fraction:4.0%}"
        status.update(f"{escape(message)} {bar} {escape(counts)}".rstrip())

    try:
        yield show
    finally:
        timer.cancel()
        timer.join()  # a start in progress must finish before the stop
        status.stop()


def follow(stream: "Generator[Piece, None, Completion]", emit: "Callable[[Piece], None]") -> "Completion":
    """Pass each piece to `emit`, and show a spinner until the first one."""
    try:
        with waiting("reading the prompt …"):
            piece = next(stream)
        while True:
            emit(piece)
            piece = next(stream)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def summary(completion: "Completion") -> str:
    """Return '64 tokens (cut) · 250 tok/s · prefill 5 in 12 ms · seed 7'; it fits 80 columns with any seed."""
    timing = completion.timing
    parts = [
        count(len(completion.token_ids), "token") + (" (cut)" if completion.finish_reason == "length" else ""),
        f"{timing.tokens_per_second:.0f} tok/s" if timing.per_token_ms else "",
        f"prefill {completion.prompt_tokens - completion.cached_tokens:,} in {timing.prefill_ms:.0f} ms",
        "greedy" if completion.seed is None else f"seed {completion.seed}",
    ]
    return " · ".join(part for part in parts if part)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
