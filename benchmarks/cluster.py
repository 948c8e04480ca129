"""What replicas on Ray cost: streams through the ingress, through a fused replica, and through `onward serve` alone.

    python -m benchmarks.cluster                              # the demo model, where all is overhead
    python -m benchmarks.cluster --source my-model --ids      # random weights write ids without text

One replica of one thread each. The clients are a process of their own; all contenders are up, and take turns. The time
to the first token is that of a client alone.
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
from typing import Any

from benchmarks.machine import description

CONTENDERS = ("server", "fused", "ingress")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--quantize")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", action="store_true", help="with token_ids: random weights write ids without text")
    options = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    load = {} if options.quantize is None else {"quantize": options.quantize}
    with ExitStack() as stack:
        urls = {"server": stack.enter_context(_server(options.source, options.quantize, options.clients))}
        urls |= stack.enter_context(_deployments(options.source, load, options.clients))
        result = measured(urls, options.clients, options.tokens, options.rounds, options.ids)
    print(json.dumps({"machine": description(), "source": options.source, **load, **result}))


def measured(urls: dict[str, str], clients: int, tokens: int, rounds: int, ids: bool) -> dict[str, Any]:
    """Medians over the rounds, of which the first of each is left out."""
    flags = ["--tokens", str(tokens), *(["--ids"] if ids else [])]
    many = {name: _Clients(url, [*flags, "--clients", str(clients)]) for name, url in urls.items()}
    one = {name: _Clients(url, ["--clients", "1", "--tokens", "8", *flags[2:]]) for name, url in urls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in urls}
    first: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(rounds + 1):
        for name in CONTENDERS:
            seconds[name].append(many[name].go()[0])
            first[name] += [one[name].go()[1] for _ in range(5)]
    for each in (*many.values(), *one.values()):
        each.end()
    wall = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    return {
        "clients": clients,
        "tokens_s": {name: round(clients * tokens / taken, 1) for name, taken in wall.items()},
        "over_server": {name: round(wall["server"] / taken, 3) for name, taken in wall.items()},
        "first_token_ms": {name: round(statistics.median(taken[5:]), 1) for name, taken in first.items()},
    }


class _Clients:
    """A process of clients (`benchmarks.http --client`)."""

    def __init__(self, url: str, flags: list[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.http", "--client", url, *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

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


@contextmanager
def _server(source: str, quantize: str | None, clients: int) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "onward", "serve", source, "--port", str(port), "--threads", "1"]
    command += ["--max-sequences", str(clients), "--no-access-log"]
    command += ["--quantize", quantize] if quantize else []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def _deployments(source: str, load: dict[str, Any], clients: int) -> Iterator[dict[str, str]]:
    from ray import serve

    from onward.cluster.deployment import DeployOptions, application
    from onward.cluster.running import running

    common: dict[str, Any] = {"source": source, "load": load, "engine": {"max_sequences": clients}, "threads": 1}
    port = _free_port()
    with running(DeployOptions(replicas=1, **common), port=port) as url:
        serve.run(application(DeployOptions(replicas=1, fused=True, **common)), name="fused", route_prefix="/fused")
        _wait_for(f"{url}/fused")
        yield {"ingress": url, "fused": f"{url}/fused"}


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
