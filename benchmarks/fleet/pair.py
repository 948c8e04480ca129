"""Two replicas of `onward deploy` that answer requests at random times, for the simulation to be held against.

The time of a step is measured in two engines side by side, of one thread each, as the replicas are.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import onward
from benchmarks.checkpoints import checkpoint_with_tokenizer
from benchmarks.fleet.measured import Asked, Run, measure, poisson

REPLICAS, SEQUENCES = 2, 16
_PROMPTS, _NEW = (16, 1024), (16, 96)


def measure_pair(file: Path, *, count: int, rate: float) -> None:
    """Add to a file of measurements: the steps of an engine beside another, and the requests of two replicas."""
    written = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    parts = [file.with_suffix(f".{number}") for number in range(REPLICAS)]
    command = [sys.executable, "-m", "benchmarks.fleet.pair", str(count // REPLICAS), str(rate / REPLICAS)]
    engines = [subprocess.Popen([*command, str(part)]) for part in parts]
    ended = [engine.wait() for engine in engines]
    if any(ended):
        raise SystemExit("an engine failed")
    written["runs"]["fit of the pair"] = json.loads(parts[0].read_text())
    for part in parts:
        part.unlink()
    written["runs"]["pair"] = asdict(_deployed(poisson(count, rate, 5, _PROMPTS, _NEW)))
    file.write_text(json.dumps(written))


def _engine(count: int, rate: float, file: Path) -> None:
    """One of the engines that are measured side by side. They get the same requests, so neither is alone for long."""
    torch.set_num_threads(1)
    lm = onward.load(checkpoint_with_tokenizer(), quantize="int8", device="cpu")
    with onward.Engine(lm, max_sequences=SEQUENCES) as engine:
        measure(engine, poisson(count // 2, 10 * rate, 10, _PROMPTS, _NEW), 10)  # programs are made
        # Somewhat more than what is predicted later, so that steps of many rows are seen too.
        run = measure(engine, poisson(count, 1.5 * rate, 20, _PROMPTS, _NEW), 20)
    file.write_text(json.dumps(asdict(run)))


def _deployed(asked: Sequence[Asked]) -> Run:
    """What two replicas make of the requests, as a client of the ingress sees it."""
    from onward.cluster.deployment import DeployOptions
    from onward.cluster.running import running

    os.environ["RAY_AUTH_MODE"] = "disabled"
    options = DeployOptions(
        replicas=REPLICAS,
        source=str(checkpoint_with_tokenizer()),
        load={"quantize": "int8"},
        engine={"max_sequences": SEQUENCES},
        threads=1,
    )
    with running(options, port=0) as url:
        warm = [Asked(0.05 * at, one.prompt, one.new) for at, one in enumerate(poisson(16, 1, 4, _PROMPTS, _NEW))]
        asyncio.run(_ask_all(url, warm, 4))  # programs are made
        return asyncio.run(_ask_all(url, asked, 5))


async def _ask_all(url: str, asked: Sequence[Asked], seed: int) -> Run:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 100_000, (one.prompt,), generator=generator).tolist() for one in asked]
    began = time.monotonic()
    answers = await asyncio.gather(*(_ask(url, began, one, prompt) for one, prompt in zip(asked, prompts, strict=True)))
    return Run([replaced for replaced, _ in answers], [tokens for _, tokens in answers], [])


async def _ask(url: str, began: float, one: Asked, prompt: Sequence[int]) -> tuple[Asked, list[float]]:
    """When a request was really made, and when each of its tokens was read."""
    await asyncio.sleep(max(0.0, began + one.at - time.monotonic()))
    made = time.monotonic() - began
    at = urllib.parse.urlsplit(url)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": one.new, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {at.hostname}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    tokens: list[float] = []
    async for line in reader:
        if line.startswith(b"data: {"):
            ids = [choice.get("token_ids") or () for choice in json.loads(line[6:])["choices"]]
            tokens += [time.monotonic() - began] * sum(map(len, ids))
    writer.close()
    assert len(tokens) == one.new, f"{len(tokens)} of {one.new} tokens came"
    return Asked(made, one.prompt, one.new), tokens


if __name__ == "__main__":
    _engine(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
