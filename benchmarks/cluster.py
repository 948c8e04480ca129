"""The cost of replicas on Ray: streams through the ingress, compared with `onward serve` alone.

    python -m benchmarks.cluster                              # the demo model, which is nearly all overhead
    python -m benchmarks.cluster --source my-model --ids      # random weights write ids without text

Each has one replica with one thread, as `onward serve` and `onward deploy` start it. The clients run in a separate
process; all contenders are running, and take turns. The time to the first token is that of a single client.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import description

CONTENDERS = {
    "server": ["serve", "--no-access-log"],
    "ingress": ["deploy", "--replicas", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--quantize")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", action="store_true", help="with token_ids: random weights write ids without text")
    options = parser.parse_args()
    flags = [options.source, "--max-sequences", str(options.clients), "--threads", "1"]
    flags += [] if options.quantize is None else ["--quantize", options.quantize]
    with ExitStack() as stack:
        started = {name: stack.enter_context(_started([*CONTENDERS[name], *flags])) for name in CONTENDERS}
        for url, _ in started.values():
            _wait_for(url)
        result = measured(started, options.clients, options.tokens, options.rounds, options.ids)
    print(json.dumps({"machine": description(), "source": options.source, "quantize": options.quantize, **result}))


def measured(started: dict[str, tuple[str, int]], clients: int, tokens: int, rounds: int, ids: bool) -> dict[str, Any]:
    """Medians over the rounds, of which the first of each is left out. started: the URL and the process of each.

    cpu_us: processor time for a token, in the process and in those that it has started.
    """
    urls = {name: url for name, (url, _) in started.items()}
    flags = ["--tokens", str(tokens), *(["--ids"] if ids else [])]
    many = {name: _Clients(url, [*flags, "--clients", str(clients)]) for name, url in urls.items()}
    one = {name: _Clients(url, ["--clients", "1", "--tokens", "8", *flags[2:]]) for name, url in urls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    first: dict[str, list[float]] = {name: [] for name in urls}
    cpu: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(rounds + 1):
        for name, (_, pid) in started.items():
            before = _cpu_seconds(pid)
            seconds[name].append(many[name].go()[0])
            cpu[name].append(_cpu_seconds(pid) - before)
            first[name] += [one[name].go()[1] for _ in range(5)]
    for each in (*many.values(), *one.values()):
        each.end()
    wall = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    return {
        "clients": clients,
        "tokens_s": {name: round(clients * tokens / taken, 1) for name, taken in wall.items()},
        "over_server": {name: round(wall["server"] / taken, 3) for name, taken in wall.items()},
        "cpu_us": {name: round(statistics.median(t[1:]) / clients / tokens * 1e6, 1) for name, t in cpu.items()},
        "first_token_ms": {name: round(statistics.median(taken[5:]), 1) for name, taken in first.items()},
    }


class _Clients:
    """A process of clients (`benchmarks.http --client`)."""

    def __init__(self, url: str, flags: list[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.http", "--client", url, *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def go(self) -> tuple[float, float]:
        """One round: its seconds, and the median milliseconds to a client's first token."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = time.perf_counter()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        first = json.loads(self._process.stdout.readline())["first_token_ms"]
        return time.perf_counter() - began, first

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _cpu_seconds(pid: int) -> float:
    """Of a process and all that descend from it and live."""
    ticks, parents = {}, {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(each)], ticks[int(each)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(each, 0) for each in family) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _started(command: list[str]) -> Iterator[tuple[str, int]]:
    """A command of `onward` that serves: its URL, and its process."""
    port = _free_port()
    whole = [sys.executable, "-m", "onward", *command, "--port", str(port)]
    with subprocess.Popen(whole, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str) -> None:
    end = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"{url}/v1/models").read()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    main()
