"""Output: spinners and dim notes on a terminal, text as it is generated, and text made safe to show."""

import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from onward.language_model import Completion, Piece

# Control characters, which untrained models emit and terminals obey, as the pictures that Unicode has for them.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

_BAR_WIDTH = 20
# "Faint", and neither faint nor bold, of ECMA-48.
_DIM, _NO_LONGER_DIM = "\x1b[2m", "\x1b[22m"

# The first column of a line of a table.
_LABEL = re.compile(r" +\S.*? {2,}(?=\S)")


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether `stream` is one; a closed standard stream is None."""
    return stream is not None and stream.isatty()


def write(text: str) -> None:
    """Text to stdout as it comes: exactly itself into a pipe, without live control characters on a terminal."""
    sys.stdout.write(text.translate(_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class TextWriter:
    """Text to stdout, a piece at a time, as `write` does.

    can_dim: whether the terminal can dim text.
    """

    def __init__(self) -> None:
        self._last = "\n"
        self.can_dim = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"

    def write(self, text: str, *, dim: bool = False) -> None:
        """dim: dim the text, where the terminal can."""
        self._last = text[-1:] or self._last
        if dim and text and self.can_dim:
            sys.stdout.write(f"{_DIM}{text.translate(_PICTURES)}{_NO_LONGER_DIM}")
            sys.stdout.flush()
        else:
            write(text)

    @property
    def at_line_start(self) -> bool:
        """Whether the text so far ends a line, or there is none."""
        return self._last == "\n"

    def end_line(self) -> None:
        """On a terminal, leave the cursor at the start of a line."""
        end_line(self._last)


def columns() -> int:
    """The width of the terminal as it is now; 80 where it does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def fitted(text: str) -> str:
    """Lines for stdout; on a terminal those that are too long go on below their second column, if they have one."""
    if not is_terminal(sys.stdout):
        return text
    lines = []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        indent = " " * (label.end() if label else len(line) - len(line.lstrip()))
        lines.append(_filled(line, columns(), indent))
    return "\n".join(lines)


def _filled(line: str, width: int, indent: str = "") -> str:
    if len(line) <= width:
        return line
    # Names of files are cut nowhere: a terminal lets one be copied whole.
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    wrapper.replace_whitespace = False
    return wrapper.fill(line)


def shortened(text: str, width: int) -> str:
    """The text on one line of `width` columns at most, with … where it was cut."""
    from wcwidth import wcswidth

    line = " ".join(text.split()).translate(_PICTURES)
    if wcswidth(line) <= width:
        return line
    while line and wcswidth(line) >= width:
        line = line[:-1]
    return f"{line.rstrip()}…"


def end_line(shown: str) -> None:
    """On a terminal, leave the cursor at the start of a line after `shown`."""
    if sys.stdout.isatty() and not shown.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def report(kind: str, text: str) -> None:
    """A line on stderr that is an "error" or a "warning"."""
    if sys.stderr is not None:  # which print would take for standard output
        with suppress(OSError):
            line = f"{kind}: {' '.join(text.split())}"
            width = shutil.get_terminal_size().columns
            print(_filled(line, width) if is_terminal(sys.stderr) else line, file=sys.stderr)


def note(text: str) -> None:
    """A line on stderr, dim on a terminal."""
    if sys.stderr is None:
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with suppress(OSError):
        console.print(text, style="dim", markup=False, soft_wrap=not is_terminal(sys.stderr))


class Show(Protocol):
    def __call__(self, fraction: float, counts: str = "") -> None: ...


@contextmanager
def waiting(what: str, *, delay_s: float = 0.2) -> Iterator[Show]:
    """A spinner on stderr while the block runs, once it has run for `delay_s`; nothing where that is no terminal.

    The block may call what it is given with the fraction that is done, from 0 to 1: a bar then stands beside, and
    `counts` after it.
    """
    if not is_terminal(sys.stderr):
        yield lambda fraction, counts="": None
        return
    from rich.console import Console
    from rich.markup import escape

    status = Console(stderr=True).status(escape(what))
    timer = threading.Timer(delay_s, status.start)
    timer.start()

    def show(fraction: float, counts: str = "") -> None:
        filled = round(fraction * _BAR_WIDTH)
        bar = f"{'━' * filled}[dim]{'─' * (_BAR_WIDTH - filled)}[/dim] {fraction:4.0%}"
        status.update(f"{escape(what)} {bar} {escape(counts)}".rstrip())

    try:
        yield show
    finally:
        timer.cancel()
        # A start under way must be over before it can be undone.
        timer.join()
        status.stop()


def follow(stream: "Generator[Piece, None, Completion]", emit: "Callable[[Piece], None]") -> "Completion":
    """Hand every piece to `emit` as it comes; a spinner turns until the first one is there."""
    try:
        with waiting("reading the prompt …"):
            piece = next(stream)
        while True:
            emit(piece)
            piece = next(stream)
    except StopIteration as end:
        completion: Completion = end.value
        return completion


def summary(completion: "Completion") -> str:
    """Such as '64 tokens (cut) · 250 tok/s · prefill 5 in 12 ms · seed 7', which fits 80 columns with any seed."""
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
