"""A request repeated with its Idempotency-Key gets the same answer, and joins one that is still running."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from live_server import SECONDS, LiveServer
from test_operations import LONG, leave, opened, until

import onward
from onward.batches import BatchInput, BatchLine, EngineReplica, LineResult
from onward.protocols import BodyReader, ResponseKey
from onward.server.client import MemoryBudget
from onward.server.submission import ReplayRecords

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "n": 2}),
    (TEXT, {"prompt": ["The fox", "The owl"], "max_tokens": 8, "logprobs": 1}),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 8}),
]
Start = Callable[..., LiveServer]


def sent(server: LiveServer, url: str, body: Any, key: str, **headers: str) -> httpx2.Response:
    return server.post(url, body, headers={"idempotency-key": key, **headers})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("url", "body"), BODIES)
def test_the_same_body_gets_the_same_answer(server: LiveServer, url: str, body: dict[str, Any], stream: bool) -> None:
    body, key = {**body, "stream": stream}, ResponseKey.new().text
    tokens = server.engines["demo"].stats().tokens
    first = sent(server, url, body, key)
    assert first.status_code == 200
    decoded = server.engines["demo"].stats().tokens - tokens
    second = sent(server, url, body, key)
    if stream:
        assert data_of(second.text) == data_of(first.text) or url != RESPONSES
        assert ids_of(first.text) == ids_of(second.text)
    else:
        assert second.content == first.content
    assert server.engines["demo"].stats().tokens - tokens == decoded, "nothing is decoded again"
    other = server.post(url, body)
    assert ids_of(other.text) != ids_of(first.text)


def data_of(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith("data: ")]


def ids_of(text: str) -> set[str]:
    bodies = [line[6:] for line in data_of(text) if line != "data: [DONE]"] or [text]
    heads = [json.loads(body) for body in bodies]
    return {head.get("response", head)["id"] for head in heads if "id" in head.get("response", head)}


def test_concurrent_repeats_share_one_generation(server: LiveServer) -> None:
    key = ResponseKey.new().text
    with ThreadPoolExecutor() as pool:
        together = [pool.submit(sent, server, TEXT, {**LONG, "max_tokens": 300}, key) for _ in range(5)]
        answers = {future.result(SECONDS).content for future in together}
    assert len(answers) == 1
    server.wait_idle()
    assert server.engines["demo"].stats().running == 0


def test_another_body_is_refused(server: LiveServer) -> None:
    url, body = BODIES[0]
    assert sent(server, url, body, "a-key").status_code == 200
    for changed in ({**body, "max_tokens": 11}, {**body, "seed": 1}, {**body, "stream": True}):
        answer = sent(server, url, changed, "a-key")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert sent(server, RESPONSES, {"input": "Hi"}, "a-key").status_code == 422
    assert sent(server, url, {**body, "max_tokens": 11}, "another-key").status_code == 200
    # Another caller's keys are others.
    assert sent(server, url, {**body, "max_tokens": 11}, "a-key", authorization="Bearer x").status_code == 200


@pytest.mark.parametrize("key", ["", "with a space", "x" * 256])
def test_an_invalid_key_is_refused(server: LiveServer, key: str) -> None:
    url, body = BODIES[0]
    answer = sent(server, url, body, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_idempotency_key")


def test_a_refused_body_may_be_corrected(server: LiveServer) -> None:
    url, body = BODIES[0]
    assert sent(server, url, {**body, "n": 0}, "to-be-mended").status_code == 400
    assert sent(server, url, body, "to-be-mended").status_code == 200


def test_a_disconnected_client_finds_the_rest(server: LiveServer) -> None:
    """A disconnected client cancels its request; when repeated, emitted tokens are not decoded again."""
    key = ResponseKey.new().text
    engine = server.engines["demo"]
    with httpx2.stream(
        "POST",
        f"{server.url}{TEXT}",
        json={**LONG, "stream": True},
        headers={"idempotency-key": key},
        timeout=SECONDS,
    ) as stream:
        lines = stream.iter_lines()
        for _ in range(400):
            next(lines)
    server.wait_idle()
    before = engine.stats().tokens
    whole = sent(server, TEXT, {**LONG, "stream": True}, key)
    assert data_of(whole.text)[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in data_of(whole.text)[:-1])
    assert text == engine.lm.generate(LONG["prompt"], max_new_tokens=900, ignore_eos=True, temperature=1.0, seed=1).text
    assert engine.stats().tokens - before < 850


def test_a_broken_stream_is_resumed_without_decoding_it_again(server: LiveServer) -> None:
    engine = server.engines["demo"]
    response = opened(server, TEXT, LONG)
    last = ""
    for _ in range(600):
        line = response.readline().decode()
        last = line.removeprefix("id: ").strip() if line.startswith("id: ") else last
    leave(response)
    server.wait_idle()
    before = engine.stats().tokens
    rest = server.post(TEXT, {**LONG, "stream": True}, headers={"last-event-id": last})
    assert data_of(rest.text)[-1] == "data: [DONE]"
    assert engine.stats().tokens - before < 800


def test_one_of_two_clients_of_a_stream_leaves(server: LiveServer) -> None:
    key = ResponseKey.new().text
    body = {**LONG, "max_tokens": 400, "stream": True}
    with httpx2.stream(
        "POST", f"{server.url}{TEXT}", json=body, headers={"idempotency-key": key}, timeout=SECONDS
    ) as first:
        lines = first.iter_lines()
        next(lines)
        got: list[str] = []
        reader = threading.Thread(target=lambda: got.append(sent(server, TEXT, body, key).text))
        reader.start()
        until(lambda: any(len(request.subscribers) == 2 for request in server.app.service.live) or bool(got))
    reader.join(SECONDS)
    assert data_of(got[0])[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in data_of(got[0])[:-1])
    lm = server.engines["demo"].lm
    assert text == lm.generate(LONG["prompt"], max_new_tokens=400, ignore_eos=True, temperature=1.0, seed=1).text


def test_stored_answers_are_limited_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("onward.server.submission.time", SimpleNamespace(monotonic=lambda: now[0]))
    store = ReplayRecords(10.0, MemoryBudget(2**29))
    key = ResponseKey.new()
    assert store.get("a", key).key == key
    now[0] = 9.0
    assert store.get("a", ResponseKey.new()).key == key
    now[0] = 11.0
    assert store.get("a", ResponseKey.new()).key != key
    for number in range(20_000):
        store.get(str(number), key)
    assert len(store) <= 10_001
    store = ReplayRecords(10.0, budget := MemoryBudget(2**20))
    for number in range(100):
        store.get(str(number), key)
    assert len(store) <= 33
    assert budget.used <= 2**15


def test_keys_belong_to_one_server(start: Start, lm: onward.LanguageModel) -> None:
    url, body = BODIES[0]
    servers = [start({"demo": lm}, idempotency_seconds=0) for _ in range(2)]
    assert len({sent(server, url, body, "key").content for server in servers for _ in range(2)}) == 4


# ── the date ─────────────────────────────────────────────────────────────────────────────────────────────────────

# A date that changes with each call, unless the time comes from the request.
DATED = "{{ strftime_now('%A %d %B %Y %X.%f %Z') }} {{ messages[-1].content }}"


@pytest.fixture(scope="module")
def dated(lm: onward.LanguageModel) -> onward.LanguageModel:
    return onward.LanguageModel(lm.model, lm.tokenizer, onward.chat.ChatTemplate(DATED, {}))


def test_a_prompt_has_the_time_of_the_requests_arrival(dated: onward.LanguageModel) -> None:
    assert dated.tokenizer is not None
    reader = BodyReader(dated, "m")
    key = ResponseKey.new(1_770_282_000)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    request = reader.read(CHAT, body, key).requests[0]
    assert dated.decode(request.prompt) == "Thursday 05 February 2026 09:00:00.000000 UTC Hi"
    assert reader.read(CHAT, body, key).requests[0].prompt == request.prompt
    assert dated.chat_prompt(body["messages"], now=key.time) == list(request.prompt)
    assert dated.chat_request(body["messages"], now=key.time).prompt == request.prompt
    assert reader.read(CHAT, body, ResponseKey("f" * 32)).requests[0].prompt, "a key of the year 10889"


@pytest.mark.parametrize(("url", "body"), [BODIES[0], BODIES[2]])
def test_a_repeated_request_keeps_its_date(
    start: Start, dated: onward.LanguageModel, url: str, body: dict[str, Any]
) -> None:
    server, body = start({"demo": dated}), {**body, "ignore_eos": True, "temperature": 1}
    first = sent(server, url, body, "a")
    assert sent(server, url, body, "a").content == first.content
    single = {name: value for name, value in body.items() if name != "n"}  # whose events have ids
    begun = server.post(url, {**single, "stream": True})
    assert begun.status_code == 200, begun.text
    ids = [line[4:] for line in begun.text.split("\n") if line.startswith("id: ")]
    rest = server.post(url, {**single, "stream": True}, headers={"last-event-id": ids[1]})
    assert rest.status_code == 200
    assert [line[4:] for line in rest.text.split("\n") if line.startswith("id: ")][-1] == ids[-1]
    assert ids_of(rest.text) == ids_of(begun.text)


def test_lines_of_a_batch_have_the_date_of_their_file(dated: onward.LanguageModel) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    line = BatchLine.read(1, json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}), 1_770_282_000)

    with onward.Engine(dated) as engine:
        first, second = (json.loads(served(engine, line).text) for _ in range(2))
    assert first == second
    prompt = dated.chat_prompt(body["messages"], now=ResponseKey.new(1_770_282_000).time)
    assert first["response"]["body"]["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize("modified", [-86400.0, 0.0, float(2**38)])
def test_a_batch_file_of_any_date_is_served(dated: onward.LanguageModel, tmp_path: Path, modified: float) -> None:
    file = tmp_path / "batch.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    file.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}))
    os.utime(file, (modified, modified))
    (line,) = BatchInput(file).lines()

    with onward.Engine(dated) as engine:
        assert not served(engine, line).failed


def served(engine: onward.Engine, line: BatchLine) -> LineResult:
    (result,) = asyncio.run(EngineReplica(engine, BodyReader(engine.lm, "m")).serve([line]))
    return result
