"""Many clients at once, some of which disconnect or read slowly: every complete stream equals a single run."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from live_server import LiveServer

import onward

CLIENTS, SEEDS, TOKENS = 200, 8, 24


def body(seed: int) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": TOKENS, "seed": seed, "ignore_eos": True, "stream": True}


async def client(port: int, number: int, chance: random.Random) -> tuple[str, str]:
    """(what it did, the text that it got)"""
    kind = chance.choices(["reads", "leaves", "dawdles", "hangs up at once"], [6, 2, 1, 1])[0]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
    content = json.dumps(body(number % SEEDS)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    events = 0
    text = b""
    try:
        while kind != "hangs up at once" and (part := await reader.read(256 if kind == "dawdles" else 2**16)):
            text += part
            events += part.count(b"data: ")
            if kind == "leaves" and events > chance.randrange(TOKENS):
                return kind, ""
            if kind == "dawdles":
                await asyncio.sleep(0.005)
    finally:
        writer.close()
    return kind, text.decode()


def text_of(stream: str) -> str:
    """Of the chunks, whatever HTTP's own chunks cut."""
    content = stream.partition("\r\n\r\n")[2]
    parts = content.split("\r\n")
    events = "".join(parts[1::2])
    assert events.endswith("data: [DONE]\n\n"), events[-200:]
    chunks = [json.loads(line[6:]) for line in events.split("\n") if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("limits", [{"max_sequences": 16}, {"max_sequences": 8, "overcommit": 4.0}], ids=len)
def test_every_finished_stream_equals_the_solo_run(lm: onward.LanguageModel, limits: dict[str, Any]) -> None:
    prompt = "Once upon a time"
    alone = [lm.generate(prompt, max_new_tokens=TOKENS, seed=seed, ignore_eos=True).text for seed in range(SEEDS)]
    chance = random.Random(5)

    async def all_of_them(port: int) -> list[tuple[str, str]]:
        return await asyncio.gather(*(client(port, number, chance) for number in range(CLIENTS)))

    with LiveServer({"demo": lm}, limits) as server:
        ended = asyncio.run(asyncio.wait_for(all_of_them(server.port), 120))
        server.wait_idle()
        counts = Counter(kind for kind, _ in ended)
        assert all(counts[kind] > 5 for kind in ("reads", "leaves", "dawdles", "hangs up at once")), counts
        for number, (kind, stream) in enumerate(ended):
            if kind in ("reads", "dawdles"):
                assert text_of(stream) == alone[number % SEEDS]
        served = server.app.service.metrics.of("demo").ended
        assert served["length"] >= counts["reads"] + counts["dawdles"]
        assert served["error"] == 0
