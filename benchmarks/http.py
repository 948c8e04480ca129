"""The cost of HTTP: streams through the server, compared with the same requests to the engine.

    python -m benchmarks.http                     # the demo model, which is nearly all overhead
    python -m benchmarks.http --source my-model --clients 32 --tokens 128

The clients run in a separate process, which reads sockets and counts events. Rounds of both kinds alternate. The cost
of HTTP per token is the processor time of the thread that runs the server's loop, including requests.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from typing import Any

import onward
from onward.server import Settings, create_app
from onward.server.lifecycle import Server, address_of, bound, config_of

PROMPT = "Once upon a time there was"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--quantize")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", action="store_true", help="with token_ids: random weights write ids without text")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        more = {"return_token_ids": True} if arguments.ids else {}
        asyncio.run(_clients(arguments.client, arguments.clients, {"max_tokens": arguments.tokens} | more))
        return
    lm = onward.load(arguments.source, quantize=arguments.quantize)
    flags = ["--ids"] if arguments.ids else []
    print(json.dumps(measured(lm, arguments.clients, arguments.tokens, arguments.rounds, flags)))


def measured(lm: onward.LanguageModel, clients: int, tokens: int, rounds: int, flags: list[str]) -> dict[str, Any]:
    """Medians over the rounds, of which the first of each kind is left out. flags: of the clients."""
    engine = onward.Engine(lm, max_sequences=clients)
    app = create_app({"model": engine}, Settings(access_log=False))
    listener = bound("127.0.0.1", 0)
    server = Server(config_of(app))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    command = [sys.executable, "-m", "benchmarks.http", "--client", address_of(listener)]
    command += ["--clients", str(clients), "--tokens", str(tokens), *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert thread.ident is not None
    loop_clock = time.pthread_getcpuclockid(thread.ident)
    alone, served, first_bytes = [], [], []
    for _ in range(rounds + 1):
        alone.append(_timed(lambda: _engine_alone(engine, clients, tokens)))
        began, cpu = time.perf_counter(), time.clock_gettime(loop_clock)
        process.stdin.write("go\n")
        process.stdin.flush()
        first_bytes.append(json.loads(process.stdout.readline())["headers_ms"])
        served.append((time.perf_counter() - began, time.clock_gettime(loop_clock) - cpu))
    process.stdin.close()
    process.wait()
    scrape = min(_timed(app.service.metrics.snapshot()) for _ in range(20))
    server.should_exit = True
    thread.join()
    listener.close()
    engine.close()
    count = clients * tokens
    wall = [statistics.median(alone[1:]), statistics.median(seconds for seconds, _ in served[1:])]
    loop_s = statistics.median(seconds for _, seconds in served[1:])
    return {
        "clients": clients,
        "engine_tokens_s": round(count / wall[0], 1),
        "http_tokens_s": round(count / wall[1], 1),
        "ratio": round(wall[0] / wall[1], 3),
        "http_us_per_token": round(loop_s / count * 1e6, 1),
        "headers_ms": round(statistics.median(first_bytes[1:]), 1),
        "scrape_ms": round(scrape * 1e3, 2),
    }


def _timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _body(number: int) -> dict[str, Any]:
    return {"prompt": f"{PROMPT} {number}", "seed": number, "ignore_eos": True, "temperature": 1}


def _engine_alone(engine: onward.Engine, clients: int, tokens: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    generations = [engine.submit(f"{PROMPT} {number}", seed=number, **options) for number in range(clients)]
    for generation in generations:
        generation.result()


# ── the clients' process ────────────────────────────────────────────────────────────────────────────────────────────


async def _clients(url: str, clients: int, options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        streams = [_stream(url, _body(number) | options) for number in range(clients)]
        headers, first = zip(*await asyncio.gather(*streams), strict=True)
        medians = {"headers_ms": statistics.median(headers), "first_token_ms": statistics.median(first)}
        print(json.dumps(medians), flush=True)


async def _stream(url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Read one stream to its end; milliseconds until its headers and until its first token were there."""
    began = time.perf_counter()
    at = urllib.parse.urlsplit(url)
    host, path = at.hostname, f"{at.path}/v1/completions"
    reader, writer = await asyncio.open_connection(host, at.port)
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    received = await reader.read(2**16)
    headers_ms = (time.perf_counter() - began) * 1e3
    first_ms = 0.0
    while True:
        if not first_ms and b"data: " in received:
            first_ms = (time.perf_counter() - began) * 1e3
        if not (more := await reader.read(2**16)):
            break
        received += more
    assert received.count(b'"finish_reason":"length"') == 1, received[:2000]
    assert b"data: [DONE]" in received
    writer.close()
    return headers_ms, first_ms


if __name__ == "__main__":
    main()
