"""Run a command that prints too much, or nothing for minutes, and say on one line what it is doing.

    python native/progress.py "installing Onward" pip install --verbose --editable .

What pip, CMake and Ninja print goes to build/progress.log. On a terminal one line shows the current step and is
rewritten in place; in a log a line is written every five seconds. If the command fails, the end of its output follows.
It runs before anything is installed, so it uses the standard library alone.
"""

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

LOG = Path("build/progress.log")
SECONDS_BETWEEN_LINES = 5
LINES_AFTER_A_FAILURE = 40

# The first pattern that matches an output line gives the step to show.
STEPS = [
    (r"\s*Collecting ([\w.-]+)", "finding {}"),
    (r"\s*Downloading (?:\S*/)?(\S+)(?: \((.+)\))?$", "downloading {} ({})"),
    (r"\s*Processing \S*?([^/\s]+\.whl)", "reading {}"),
    (r"\s*WARNING: Retrying .*: (\S+)$", "no answer for {}, trying again"),
    (r"\s*\[(\d+/\d+)\] Building \S+ object \S*onward_(\w+)\.dir/(?:src/)?(\S+)\.\w+$", "compiling [{}] {} {}"),
    (r"\s*\[(\d+/\d+)\] Linking .*?(\S+)$", "linking [{}] {}"),
    (r"\s*\[ *(\d+%)\] Building \S+ object \S*onward_(\w+)\.dir/(?:src/)?(\S+)\.\w+$", "compiling [{}] {} {}"),
    (r"\s*(?:Running command|Building \w+ for) (.+?)(?: \(pyproject\.toml\).*)?$", "{}"),
    (r"\s*Installing collected packages: (.+)", "unpacking {}"),
]
# What native/backend.py has to say is for the reader.
MESSAGE = re.compile(r"\s*(\*\*\* onward .*)")


def step_in(line: str) -> str:
    """What the command does, from a line of its output; empty if the line does not say."""
    for pattern, text in STEPS:
        found = re.match(pattern, line)
        if found:
            groups = [group or "" for group in found.groups()]
            if text.startswith("unpacking"):
                names = groups[0].split(", ")
                groups = [names[0] if len(names) == 1 else f"{len(names)} packages"]
            return text.format(*groups).replace(" ()", "")
    return ""


class Display:
    """The line that says what is going on."""

    def __init__(self, title: str) -> None:
        self.title, self.step, self.began = title, "", time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.shown_at = 0.0

    @property
    def seconds(self) -> int:
        return int(time.monotonic() - self.began)

    def message(self, text: str) -> None:
        self._clear()
        print(text, flush=True)

    def show(self) -> None:
        """Show the step again, if it is time to."""
        now = time.monotonic()
        if now - self.shown_at < (0.1 if self.terminal else SECONDS_BETWEEN_LINES):
            return
        self.shown_at = now
        text = f"{self.seconds:5d} s  {self.step or self.title}"
        if self.terminal:
            self._clear()
            print(text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        else:
            print(text, flush=True)

    def _clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="")


def main(title: str, *command: str) -> int:
    display = Display(title)
    display.message(f"{title} …")
    display.shown_at = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    last: list[str] = []
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n# {title}: {' '.join(command)}\n")
        while True:
            try:
                data = lines.get(timeout=0.5)
            except queue.Empty:
                display.show()
                continue
            if data is None:
                break
            line = data.decode("utf-8", errors="replace").rstrip()
            log.write(f"{line}\n")
            log.flush()
            last = [*last, line][-LINES_AFTER_A_FAILURE:]
            found = MESSAGE.match(line)
            if found:
                display.message(found.group(1))
            display.step = step_in(line) or display.step
            display.show()
    status = process.wait()
    if status:
        display.message("\n".join(["", *last, "", f"{title}: failed with status {status}. All of its output: {LOG}"]))
    else:
        display.message(f"{title}: done in {display.seconds} s")
    return status


def _read(stream, lines: "queue.Queue[bytes | None]") -> None:  # type: ignore[no-untyped-def]
    for line in stream:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    try:
        raise SystemExit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
