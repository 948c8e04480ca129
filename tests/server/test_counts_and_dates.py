"""Metrics equal the counts in answers, and a prompt that is rendered again has the same date."""

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from live_server import SECONDS, LiveServer

import onward
from onward.engine import Generation
from onward.engine.stats import COUNTS
from onward.protocols import ResponseKey
from onward.server.metrics import ModelMetrics
from onward.server.service import Service

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Tell me of a fox."}]
Start = Callable[..., LiveServer]
# Of every kind that is counted in its own way.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": ["The fox", "The owl"], "max_tokens": 7, "n": 2, "temperature": 1}),
    (TEXT, {"prompt": "Once upon a time", "max_tokens": 0, "echo": True}),
    (TEXT, {"prompt": "Once upon a time", "max_tokens": 30, "stop": "a"}),
    (TEXT, {"prompt": "Once upon a time", "max_tokens": 9, "beams": 3, "n": 2, "temperature": 0}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "prediction": {"type": "content", "content": "Once upon a time"}}),
    (RESPONSES, {"input": "Tell me of a fox.", "max_output_tokens": 9}),
]


def counters(text: str) -> dict[str, float]:
    """The numbers that may only grow."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in pairs if name.partition("{")[0].endswith(("_total", "_count"))}


def test_each_count_of_an_engine_is_in_the_metrics(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start({"demo": lm})
    counts = {name: number for number, name in enumerate(COUNTS, 3)}
    stats = dataclasses.replace(server.engines["demo"].stats(), **counts)
    monkeypatch.setattr(server.engines["demo"], "stats", lambda: stats)
    values = counters(server.get("/metrics").text)
    names = ("engine_steps", "engine_tokens", "preemptions", "prefix_disk_tokens", "prefix_disk_written_blocks")
    shown = [values[f'onward_{name}_total{{model="demo"}}'] for name in (*names, "prefix_disk_dropped_blocks")]
    assert shown == [counts[name] for name in COUNTS]


def test_counts_are_sums_of_usage_and_never_decrease(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    usages: list[dict[str, Any]] = []
    scrapes: list[dict[str, float]] = []
    stop = threading.Event()

    def ask(offset: int) -> None:
        for url, body in BODIES[offset:] + BODIES[:offset]:
            stream = url != RESPONSES and offset % 2 == 1 and "echo" not in body
            if stream:
                chunks = server.stream(url, {**body, "stream_options": {"include_usage": True}}).chunks
                usages.append(chunks[-1]["usage"])
            else:
                answer = server.post(url, body)
                assert answer.status_code == 200, answer.text
                usages.append(answer.json()["usage"])

    def scrape() -> None:
        while not stop.is_set():
            scrapes.append(counters(server.get("/metrics").text))

    watching = threading.Thread(target=scrape)
    asking = [threading.Thread(target=ask, args=[offset]) for offset in range(4)]
    watching.start()
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(SECONDS)
    stop.set()
    watching.join(SECONDS)
    server.wait_idle()
    last = counters(server.get("/metrics").text)
    for before, after in zip(scrapes, [*scrapes[1:], last], strict=True):
        assert all(after[name] >= value for name, value in before.items())

    def total(*names: str, of: str | None = None) -> int:
        parts = usages if of is None else [usage.get(f"{names[0]}_details") or {} for usage in usages]
        return sum(part.get(of or name, 0) for part in parts for name in (names if of is None else names[:1]))

    assert len(usages) == 4 * len(BODIES)
    assert last['onward_prompt_tokens_total{model="demo"}'] == total("prompt_tokens", "input_tokens")
    assert last['onward_output_tokens_total{model="demo"}'] == total("completion_tokens", "output_tokens")
    cached = total("prompt_tokens", of="cached_tokens") + total("input_tokens", of="cached_tokens")
    assert last['onward_cached_prompt_tokens_total{model="demo"}'] == cached
    accepted = total("completion_tokens", of="accepted_prediction_tokens")
    rejected = total("completion_tokens", of="rejected_prediction_tokens")
    assert last['onward_accepted_tokens_total{model="demo"}'] == accepted
    assert last['onward_drafted_tokens_total{model="demo"}'] == accepted + rejected


def test_a_repeated_answer_is_not_counted_again(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start({"demo": lm})
    finish = Service.finish

    def scraped(service: Service, *ended: Any) -> None:
        service.metrics.snapshot()
        finish(service, *ended)

    monkeypatch.setattr(Service, "finish", scraped)
    for stream in (True, False, True):
        for _ in range(3):
            body = {"prompt": "The fox", "max_tokens": 4, "stream": stream}
            assert server.post(TEXT, body, headers={"idempotency-key": str(stream)}).status_code == 200
    server.wait_idle()
    counted = counters(server.get("/metrics").text)
    assert counted['onward_time_to_first_token_seconds_count{model="demo"}'] == 2
    assert counted['onward_request_seconds_count{model="demo"}'] == 2
    assert not server.app.service.metrics.of("demo")._started, "ended requests leave nothing"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"n": 2, "temperature": 1.0, "seed": 1}])
def test_tokens_emitted_before_a_failure_are_counted_once(lm: onward.LanguageModel, options: dict[str, Any]) -> None:
    request = lm.request("The fox", max_new_tokens=9, ignore_eos=True, **options)
    with onward.Engine(lm) as engine:
        whole = engine.submit(request)
        texts = [text.token_ids for text in whole.result().choices]
        known = [ids[: 3 + at] for at, ids in enumerate(texts)]
        resumed = engine.resume(request, emitted=known)
        assert [text.token_ids for text in resumed.result().choices] == texts

    def counted(generation: Generation) -> int:
        metrics = ModelMetrics()
        metrics.record(generation, generation.result(), generation.submitted)
        return metrics.output_tokens

    assert counted(whole) == 9 * len(texts)
    assert counted(resumed) == 9 * len(texts) - sum(map(len, known))


# ── dates ────────────────────────────────────────────────────────────────────────────────────────────────────────

DATED = "{{ strftime_now('%A %d %B %Y %X.%f %Z') }} {{ today }} {{ messages[-1].content }}"


@pytest.fixture(scope="module")
def dated(lm: onward.LanguageModel) -> onward.LanguageModel:
    return onward.LanguageModel(lm.model, lm.tokenizer, onward.chat.ChatTemplate(DATED, {}))


def test_tokenize_gives_the_ids_of_a_chat_at_that_time(start: Start, dated: onward.LanguageModel) -> None:
    server = start({"demo": dated})
    chat = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0, "chat_template_kwargs": {"today": "Friday"}}
    answer = server.post(CHAT, chat).json()
    read = [int(next(iter(entry))) for entry in answer["prompt_logprobs"][1:]]
    body = {"messages": MESSAGES, "chat_template_kwargs": {"today": "Friday"}}
    tokens = server.post("/tokenize", {**body, "created": answer["created"]}).json()
    assert tokens["tokens"][1:] == read
    assert tokens["created"] == answer["created"]
    earlier = server.post("/tokenize", {**body, "created": 1_770_282_000}).json()
    text = server.post("/detokenize", {"tokens": earlier["tokens"]}).json()["prompt"]
    assert text == "Thursday 05 February 2026 09:00:00.000000 UTC Friday Tell me of a fox."
    now = server.post("/tokenize", body).json()
    assert server.post("/tokenize", {**body, "created": now["created"]}).json() == now
    for wrong in (-1, 1.5, "1", True, 10**15):
        refused = server.post("/tokenize", {**body, "created": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "created"), wrong
    of_text = server.post("/tokenize", {"prompt": "x", "created": 1})
    assert (of_text.status_code, of_text.json()["error"]["param"]) == (400, "created")


@pytest.mark.parametrize("name", ["strftime_now", "now", "datetime"])
def test_template_variables_that_replace_the_date_are_refused(
    start: Start, dated: onward.LanguageModel, name: str
) -> None:
    server = start({"demo": dated})
    for url in (CHAT, "/tokenize"):
        answer = server.post(url, {"messages": MESSAGES, "chat_template_kwargs": {name: "Friday"}})
        assert answer.status_code == 400, answer.text
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("created", [-(2**31), -1, 0, 1_770_282_000, 2**38, 2**60])
def test_a_file_of_any_date_has_a_key(created: int) -> None:
    key = ResponseKey.new(created)
    assert key.time.timestamp() == key.created == min(max(0, created), key.created)
    assert json.loads(json.dumps({"created": key.created}))["created"] >= 0
