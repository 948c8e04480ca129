"""`onward serve` compared with llama.cpp's server over HTTP, on the same GGUF file in the shape of Qwen3-0.6B.

    make .benchmarks/peers/llama-server/.installed
    python -m benchmarks.http_peers [--recipe Q8_0] [--clients 1 8 32] [--rounds 3]

Every client sends 128 fresh ids, reads its stream to the end (64 new tokens, greedy), and sends the next request. The
two servers alternate, and the other one is stopped meanwhile. Tokens per second are those of all clients together.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.checkpoints import QWEN3_0_6B
from benchmarks.compare.contenders import GGUF_RECIPES, HOME, Contender
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth

PROMPT, NEW = 128, 64
WORKER = Path(__file__).parent / "compare" / "workers" / "llama_server.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=GGUF_RECIPES, default="Q8_0")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers that stand still have to be ended too
    print(description())
    peer = Contender("llama.cpp", options.recipe, "llama_cpp", "llama-server", options.recipe)
    file, buffer = peer.model(), bandwidth_buffer()
    most, threads = max(options.clients), str(torch.get_num_threads())
    at, at_peer = free_port(), free_port()
    ours = [sys.executable, "-m", "onward", "serve", str(file), "--port", str(at), "--no-access-log"]
    ours += ["--max-sequences", str(most), "--threads", threads]
    theirs = [str(peer.python), str(WORKER), str(file), str(at_peer), threads, str(most), str(PROMPT + NEW + 16)]
    with ExitStack() as stack:
        servers = {
            "onward": stack.enter_context(server("onward", ours, at)),
            "llama-server": stack.enter_context(server("llama-server", theirs, at_peer)),
        }
        for clients in options.clients:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            bandwidths = []
            for number in range(options.rounds + 1):
                bandwidths.append(read_bandwidth(buffer) / 1e9)
                for name, running in servers.items():
                    with running.turn():
                        rates[name].append(asyncio.run(rate(running.port, clients, options.requests, number)))
            medians = {name: round(statistics.median(of_one[1:]), 1) for name, of_one in rates.items()}
            ratio = statistics.median(a / b for a, b in zip(*(r[1:] for r in rates.values()), strict=True))
            bandwidth = round(statistics.median(bandwidths), 1)
            line = {"clients": clients, "tokens_s": medians, "ratio": round(ratio, 2), "read_GB_s": bandwidth}
            print(json.dumps(line), flush=True)


class Running:
    """A server's process and its port."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.process, self.port = process, port

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run within this block; outside the block it is stopped."""
        os.kill(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGSTOP)


@contextmanager
def server(name: str, command: list[str], port: int) -> Iterator[Running]:
    """A server's process, as soon as it answers on its port."""
    log = HOME / "logs" / f"{name}-http.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
    try:
        while not _answers(port):
            if process.poll() is not None:
                raise SystemExit(f"{name} ended: see {log}")
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGSTOP)
        yield Running(process, port)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
            process.communicate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def rate(port: int, clients: int, requests: int, seed: int) -> float:
    """Tokens per second of a round."""
    began = time.perf_counter()
    await asyncio.gather(*(client(port, requests, f"{seed} {number}") for number in range(clients)))
    return clients * requests * NEW / (time.perf_counter() - began)


async def client(port: int, requests: int, seed: str) -> None:
    draw = random.Random(seed)
    for _ in range(requests):
        ids = [draw.randrange(1000, QWEN3_0_6B["vocab_size"] - 1000) for _ in range(PROMPT)]
        body = {"prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True}
        await stream(port, body | {"stream_options": {"include_usage": True}})


async def stream(port: int, body: dict[str, object]) -> None:
    """Read one stream to its end; it must have all tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    received = await reader.read()
    writer.close()
    assert f'"completion_tokens":{NEW}'.encode() in received.replace(b": ", b":"), received[-2000:]


if __name__ == "__main__":
    main()
