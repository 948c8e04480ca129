"""Receipts over HTTP: the texts of every endpoint are verified, including streams and many clients."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import MESSAGES, LiveServer

import onward
from demo_adapters import demo_adapter
from onward import Receipt
from onward.protocols import ResponseKey

Start = Callable[..., LiveServer]
CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0.9, "n": 3, "top_p": 0.9}),
    "logprobs": (CHAT, {"messages": MESSAGES, "max_tokens": 12, "seed": 7, "logprobs": True, "stop": ["."]}),
    "tool": (CHAT, {"messages": MESSAGES, "max_tokens": 20, "tools": [WEATHER], "tool_choice": "required"}),
    "prompts": (TEXT, {"prompt": ["Once", [17, 18]], "max_tokens": 12, "temperature": 1.0, "n": 2, "echo": True}),
    "greedy": (
        TEXT,
        {"prompt": "Once", "max_tokens": 12, "temperature": 0, "regex": "[a-z ]+", "top_k": 9},
    ),
    "responses": (RESPONSES, {"input": "Hi", "max_output_tokens": 12, "temperature": 1.0}),
    "messages": (ANTHROPIC, {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "stop_sequences": ["and"]}),
}


@pytest.fixture(scope="module")
def verifier() -> onward.LanguageModel:
    return onward.load("demo")


def whole(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of an answer that have receipts."""
    return answer.get("choices", [answer])


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for event in map(json.loads, filter(lambda each: each != "[DONE]", server.stream(path, body).events)):
        parts = [event, *event.get("choices", ()), *([event["response"]] if "response" in event else ())]
        yield from (part for part in parts if "receipt" in part)


def check(verifier: onward.LanguageModel, receipt: dict[str, Any]) -> None:
    result = verifier.verify(Receipt.from_json(json.dumps(receipt)))
    assert result.is_verified, result
    assert result.tokens == len(receipt["token_ids"]) > 0


@pytest.mark.parametrize("name", BODIES)
def test_texts_are_verified(server: LiveServer, verifier: onward.LanguageModel, name: str) -> None:
    path, body = BODIES[name]
    body = {"model": "demo", **body}
    assert not any("receipt" in part for part in whole(server.post(path, body).json()))
    answer = server.post(path, {**body, "receipt": True})
    assert answer.status_code == 200, answer.text
    parts = whole(answer.json())
    for part in parts:
        check(verifier, part["receipt"])
        assert (part["receipt"].get("logprobs") is not None) == (name == "logprobs")
    if name == "prompts":  # a stream of one text each
        body |= {"prompt": "Once", "echo": False}
    found = list(streamed(server, path, {**body, "receipt": True, "stream": True}))
    assert len(found) == (1 if len(parts) == 1 else len(parts) if name == "chat" else 2)
    for part in found:
        check(verifier, part["receipt"])
    assert not list(streamed(server, path, {**body, "stream": True}))


def test_texts_of_an_adapter_and_of_many_clients_are_verified(start: Start, tmp_path: Any) -> None:
    lm, verifier = onward.load("demo"), onward.load("demo")
    demo_adapter(tmp_path / "poet", 1)
    for each in (lm, verifier):
        each.load_adapter("poet", tmp_path / "poet")
    server = start({"demo": lm}, engine={"max_sequences": 4})
    bodies = [
        (path, {"model": model, **body, "receipt": True, "temperature": 1.0, "seed": seed})
        for path, body in (BODIES["chat"], BODIES["greedy"], BODIES["responses"], BODIES["messages"])
        for model in ("demo", "poet")
        for seed in range(2)
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: server.post(*each).json(), bodies))
    for (_, body), answer in zip(bodies, answers, strict=True):
        for part in whole(answer):
            check(verifier, part["receipt"])
            assert part["receipt"]["options"].get("adapter") == (body["model"] if body["model"] == "poet" else None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_of_several_weights_versions_has_no_receipt(start: Start, stream: bool) -> None:
    server = start({"demo": onward.load("demo")})
    weights = dict(onward.load("demo", trainable=True).named_parameters())
    path, body = BODIES["chat"]
    body = {"model": "demo", **body, "n": 1, "receipt": True, "seed": 3, "stream": stream}
    headers = {"idempotency-key": ResponseKey.new().text}

    def receipt() -> Any:
        text = server.post(path, body, headers=headers).text
        events = [line[6:] for line in text.split("\n") if line.startswith("data: {")] if stream else [text]
        (part,) = [part for event in events for part in whole(json.loads(event)) if "receipt" in part]
        return part["receipt"]

    before = receipt()
    assert before == receipt()
    server.engines["demo"].update_weights(weights)
    if not stream:  # a stream's ids are of one fingerprint
        assert receipt() is None  # these ids were computed with the earlier weights
    headers["idempotency-key"] = ResponseKey.new().text
    assert receipt() == before  # the weights are equal, only their number is not


def test_requests_without_receipts_are_refused(server: LiveServer) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "Once"})):
        answer = server.post(path, {"model": "demo", **body, "max_tokens": 2, "beams": 2, "receipt": True})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "receipt")
        assert "a beam search" in error["message"]
    for path, body in BODIES.values():
        answer = server.post(path, {"model": "demo", **body, "receipt": "yes"})
        assert answer.status_code == 400
        assert "receipt must be true or false" in answer.json()["error"]["message"]
    answer = server.post("/v1/embeddings", {"model": "demo", "input": "x", "receipt": True})
    assert answer.status_code == 400
