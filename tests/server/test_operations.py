"""Limits, keys, disconnects, silence, several models, and reports of the server's state."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import torch
from live_server import MESSAGES, SECONDS, LiveServer, text_of

import onward

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# As long a text as the demo model writes.
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "temperature": 1.0, "seed": 1}
Start = Callable[..., LiveServer]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def opened(server: LiveServer, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """A stream of which nothing but the headers has been read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    content = json.dumps({"stream": True, **body}).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.connection = connection  # type: ignore[attr-defined]
    return response


def leave(response: http.client.HTTPResponse) -> None:
    response.close()
    response.connection.close()  # type: ignore[attr-defined]


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes 5 ms more."""
    accept = onward.decoding.sequence.Sequence.accept

    def slowly(sequence: Any, *token: Any) -> str:
        time.sleep(0.005)
        return accept(sequence, *token)

    monkeypatch.setattr(onward.decoding.sequence.Sequence, "accept", slowly)


@pytest.mark.usefixtures("slow_tokens")
def test_a_disconnected_client_cancels_its_request_and_frees_blocks(server: LiveServer) -> None:
    engine = server.engines["demo"]
    response = opened(server, TEXT, LONG)
    assert response.read(4) == b"id: "
    assert engine.stats().running == 1
    before = engine.stats().tokens
    leave(response)
    server.wait_idle()
    assert engine.stats().tokens - before < 100  # of some 900


def test_a_client_that_leaves_before_its_whole_answer_cancels_too(server: LiveServer) -> None:
    engine = server.engines["demo"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", TEXT, json.dumps(LONG | {"n": 8}), {"Content-Type": "application/json"})
    until(lambda: engine.stats().running == 1)
    connection.close()
    server.wait_idle()


def test_headers_are_sent_at_once_and_comments_while_waiting(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, engine={"max_sequences": 1}, keep_alive=0.02)
    first = opened(server, TEXT, LONG | {"stop": ["nothing of the kind"]})
    began = time.monotonic()
    second = opened(server, TEXT, {"prompt": "The fox", "max_tokens": 4, "seed": 1})  # returns with the headers
    assert second.status == 200
    assert server.engines["demo"].stats().waiting == 1
    assert time.monotonic() - began < SECONDS / 2
    until(lambda: second.readline() == b": waiting\n")
    leave(first)
    lines = second.read().decode().split("\n")
    assert "data: [DONE]" in lines
    leave(second)
    server.wait_idle()


def test_a_full_queue_is_429_with_retry_after(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, engine={"max_sequences": 1, "max_waiting": 1})
    running = [opened(server, TEXT, LONG)]
    until(lambda: server.engines["demo"].stats().running == 1)
    running.append(opened(server, TEXT, LONG))
    answer = server.post(TEXT, LONG)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert 'onward_refusals_total{reason="engine_busy"} 1.0' in server.get("/metrics").text
    for response in running:
        leave(response)
    server.wait_idle()


def test_a_closed_engine_is_503(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    assert server.get("/ready").status_code == 200
    server.engines["demo"].close()
    answer = server.post(TEXT, LONG)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert server.get("/health").status_code == 503
    assert server.get("/ready").status_code == 503


def test_a_draining_server_refuses_with_a_message(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    server.app.service.draining = True
    answer = server.post(TEXT, LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200


def test_requests_cancelled_at_shutdown_get_an_error(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    stream = opened(server, TEXT, LONG)
    whole: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: whole.append(server.post(TEXT, LONG | {"n": 4})))
    thread.start()
    until(lambda: server.engines["demo"].stats().sequences == 5)
    server.app.service.cancel_all()
    *_, last = stream.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    thread.join(SECONDS)
    assert whole[0].status_code == 503
    leave(stream)
    server.wait_idle()


def test_a_hanging_engine_is_not_healthy(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, hang_seconds=0.05)
    hangs, resume = threading.Event(), threading.Event()

    def stop_when(ids: Any, text: str) -> bool:
        hangs.set()
        resume.wait(SECONDS)
        return True

    generation = server.engines["demo"].submit("Once", stop_when=stop_when)
    assert hangs.wait(SECONDS)
    until(lambda: server.get("/health").status_code == 503)
    assert server.get("/health").json()["models"]["demo"]["state"] == "hangs"
    resume.set()
    generation.result(SECONDS)
    until(lambda: server.get("/health").json()["models"]["demo"]["state"] == "idle")


def test_keys_are_required(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=("first", "second"))
    for path in ("/health", "/ready", "/", "/docs", "/page/page.js", "/openapi.json"):
        assert server.get(path).status_code == 200, path
    for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}, {"Authorization": ""}):
        for path in ("/v1/models", "/metrics", "/stats"):
            answer = server.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.post(CHAT, {"messages": MESSAGES}, headers=headers).status_code == 401
    for key in ("first", "second"):
        assert server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    with server.openai("second") as client:
        assert client.models.retrieve("demo").id == "demo"


def test_unknown_host_names_are_refused(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, hosts=("localhost", "127.0.0.1", "::1"))
    assert server.get("/v1/models").status_code == 200
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:5", "[::1]:8000", "10.0.0.7:8000", "[fe80::1]"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "localhost.evil.example:8000", "10.0.0.7.evil.example", "10.0.0", ""):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 403, host


def test_bodies_are_limited(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, max_body=2000)
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 3000}).encode()
    headers = {"Content-Type": "application/json"}
    assert server.post(TEXT, None, content=body, headers=headers).status_code == 413

    def in_parts() -> Any:
        for at in range(0, len(body), 500):
            yield body[at : at + 500]

    answer = server.post(TEXT, None, content=in_parts(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_type"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b"\xff\xfe\xfd", "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (b'{"max_tokens": ' + b"9" * 10_000 + b"}", "invalid_json"),
    ],
    ids=["empty", "cut", "list", "nan", "bytes", "deep", "number"],
)
def test_invalid_json_is_a_clear_error(server: LiveServer, content: bytes, code: str) -> None:
    answer = server.post(TEXT, None, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_lone_surrogate_is_refused_in_every_field(server: LiveServer) -> None:
    headers = {"Content-Type": "application/json"}
    for path, body in (
        (TEXT, {"prompt": "x", "\ud800": 1}),
        (TEXT, {"prompt": "\ud800"}),
        (TEXT, {"prompt": "x", "model": "\ud800"}),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "metadata": {"a": "\ud800"}}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "user": "\ud800", "stream": True}),
    ):
        answer = server.post(path, None, content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 400, body
        assert "a lone surrogate (U+D800) at position 0" in answer.json()["error"]["message"]


def test_a_body_must_be_declared_as_json(server: LiveServer) -> None:
    answer = server.post(TEXT, None, content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_that_does_not_arrive_times_out(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, body_seconds=0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 100\r\n\r\n{")
        answer = half.recv(4096).decode()
        assert answer.startswith("HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", server.port)) as half:  # and one that leaves
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 100\r\n\r\n{")
    server.wait_idle()


def test_too_many_requests_at_once_are_refused(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, max_requests=1)
    running = opened(server, TEXT, LONG)
    answer = server.post(TEXT, LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_requests")
    leave(running)
    server.wait_idle()


def test_a_client_that_reads_nothing_is_disconnected(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, stalled_seconds=0.1)
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps({**LONG, "stream": True, "n": 8, "logprobs": 5, "max_tokens": 500}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        slow.sendall(head.encode() + body)
        until(lambda: server.engines["demo"].stats().running == 1)
        until(lambda: server.engines["demo"].stats().running == 0)
        assert server.engines["demo"].stats().tokens < 8 * 500


def test_several_models_are_distinguished(start: Start, lm: onward.LanguageModel) -> None:
    draft = onward.load("demo-draft")
    server = start({"big": lm, "org/small": draft})
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["big", "org/small"]
    assert server.get("/v1/models/org/small").json()["id"] == "org/small"
    assert server.get("/v1/models/other").status_code == 404
    for name, model in (("big", lm), ("org/small", draft)):
        body = {"prompt": "The fox", "max_tokens": 8, "seed": 1, "model": name}
        answer = server.post(TEXT, body).json()
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == model.generate("The fox", max_new_tokens=8, seed=1).text
    answer = server.post(TEXT, {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_models_are_listed_with_the_defaults_of_their_options(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    (model,) = server.get("/v1/models").json()["data"]
    assert model["max_model_len"] == lm.model.max_seq_len
    assert model["chat_template"] is True
    assert "parent" not in model
    options = model["default_options"]
    assert options["max_new_tokens"] is None, "up to the context length"
    assert options["temperature"] == lm.defaults.temperature == 0.7
    for name, value in options.items():
        assert value == (None if name == "max_new_tokens" else getattr(lm.defaults, name))
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    assert set(model) | {"parent", "size_bytes"} == set(schemas["ModelEntry"]["properties"])
    assert model["status"] == "loaded"
    asked = {"prompt": "The fox", "max_tokens": 8, "seed": 1}
    chosen = {name: value for name, value in options.items() if name != "max_new_tokens"}
    texts = [server.post(TEXT, body).json()["choices"][0]["text"] for body in (asked, {**asked, **chosen})]
    assert texts[0] == texts[1]
    (model,) = start({"demo": lm}, max_new_tokens=77).get("/v1/models").json()["data"]
    assert model["default_options"]["max_new_tokens"] == 77


def test_metrics_count_served_requests(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    server.post(TEXT, {"prompt": "The fox", "max_tokens": 9, "seed": 1, "ignore_eos": True})
    text_of(server.stream(TEXT, {"prompt": "The fox", "max_tokens": 5, "seed": 1, "ignore_eos": True}).chunks)
    server.wait_idle()
    metrics = server.app.service.metrics.snapshot()()
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    assert values['onward_output_tokens_total{model="demo"}'] == "14.0"
    assert values['onward_prompt_tokens_total{model="demo"}'] == "4.0"
    assert values['onward_requests_total{end="length",model="demo"}'] == "2.0"
    assert values['onward_time_to_first_token_seconds_count{model="demo"}'] == "2.0"
    assert values['onward_time_between_tokens_seconds_count{model="demo"}'] == "12.0"
    assert values['onward_http_responses_total{status="200"}'] == "2.0"
    assert values['onward_requests_running{model="demo"}'] == "0.0"
    assert b"onward_cache_blocks" in metrics
    assert server.get("/stats").json()["demo"]["tokens"] == 14


@pytest.mark.usefixtures("slow_tokens")
def test_a_first_token_is_counted_while_its_request_runs(start: Start, lm: onward.LanguageModel) -> None:
    name = 'onward_time_to_first_token_seconds_count{model="demo"}'

    def counted() -> str:
        lines = server.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))[name]

    server = start({"demo": lm})
    running = opened(server, TEXT, LONG)
    until(lambda: counted() == "1.0")
    assert server.engines["demo"].stats().running == 1
    leave(running)
    server.wait_idle()
    assert counted() == "1.0"


def test_tokenize_equals_the_model(server: LiveServer, lm: onward.LanguageModel) -> None:
    answer = server.post("/tokenize", {"prompt": "The fox"}).json()
    assert answer == {"tokens": lm.encode("The fox"), "count": 2, "max_model_len": lm.model.max_seq_len}
    chat = server.post("/v1/tokenize", {"messages": MESSAGES}).json()
    assert chat["tokens"] == lm.chat_prompt(MESSAGES)
    closed = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert closed["count"] < chat["count"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": lm.decode(answer["tokens"])}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ],
)
def test_invalid_tokenize_requests_are_refused(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    content = json.dumps(body).encode()
    answer = server.post(path, None, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_every_answer_has_an_id(server: LiveServer) -> None:
    assert server.get("/health").headers["x-request-id"].startswith("req_")
    request_headers = {"X-Request-Id": "mine-1"}
    assert server.get("/nothing", headers=request_headers).headers["x-request-id"] == "mine-1"
    assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")


def test_internal_errors_are_logged_but_not_sent(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start({"demo": lm}, access_log=True)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.app.service.models, "find", fails)
    with caplog.at_level("INFO", logger="onward.server"):
        answer = server.post(TEXT, {"prompt": "x"})
        server.wait_idle()
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "ZeroDivisionError" not in answer.text
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "onward.server"]
    assert any("secret detail" in line.get("traceback", "") for line in lines)
    assert [line["status"] for line in lines if line["event"] == "request"] == [500]


def test_an_internal_error_in_a_stream_ends_it_with_an_error(
    start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start({"demo": lm})
    accept = onward.decoding.sequence.Sequence.accept

    def fails(sequence: Any, *token: Any) -> str:
        if len(sequence.token_ids) == 3:
            raise ZeroDivisionError("secret detail")
        return accept(sequence, *token)

    monkeypatch.setattr(onward.decoding.sequence.Sequence, "accept", fails)
    stream = server.stream(TEXT, {"prompt": "Once", "max_tokens": 9, "ignore_eos": True})
    error = json.loads(stream.events[-1])["error"]
    assert error["type"] == "server_error"
    assert "secret" not in stream.text
    assert server.post(TEXT, {"prompt": "Once", "max_tokens": 9, "ignore_eos": True}).status_code == 500
    server.wait_idle()
    assert server.app.service.metrics.of("demo").ended == {"error": 2}


def test_the_log_has_no_prompts_by_default(
    start: Start, lm: onward.LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    for log_prompts in (False, True):
        server = start({"demo": lm}, access_log=True, log_prompts=log_prompts)
        caplog.clear()
        with caplog.at_level("INFO", logger="onward.server"):
            server.post(TEXT, {"prompt": "a secret prompt", "max_tokens": 2, "ignore_eos": True})
            server.wait_idle()
        (line,) = [json.loads(record.getMessage()) for record in caplog.records if record.name == "onward.server"]
        assert ("a secret prompt" in json.dumps(line)) == log_prompts
        assert (line["path"], line["status"], line["completion_tokens"]) == (TEXT, 200, 2)
        assert (line["model"], line["finish"]) == ("demo", ["length"])


def test_only_allowed_origins_may_call_from_browsers(start: Start, lm: onward.LanguageModel) -> None:
    closed, open_to_one = start({"demo": lm}), start({"demo": lm}, cors_origins=("https://a.example",))
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx2.options(f"{open_to_one.url}{CHAT}", headers=ask)
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx2.options(f"{open_to_one.url}{CHAT}", headers=ask | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=ask).headers
    with_key = start({"demo": lm}, cors_origins=("*",), api_keys=("key",))
    refused = with_key.get("/v1/models", headers=ask)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"
    assert "x-onward-ignored" in refused.headers["access-control-expose-headers"]
    assert httpx2.options(f"{with_key.url}{CHAT}", headers=ask).status_code == 200


def test_unknown_paths_and_methods_are_clear_errors(server: LiveServer) -> None:
    assert server.get("/nothing").json()["error"]["code"] == "unknown_url"
    assert server.get(CHAT).status_code == 405
    assert server.get(CHAT).headers["allow"] == "POST"
    assert server.get("/").headers["content-type"].startswith("text/html")
    assert server.get("/redoc").status_code == 404, "a page of the framework"


def test_tokens_of_a_continued_message_equal_those_of_the_chat(server: LiveServer, lm: onward.LanguageModel) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    continued = server.post("/tokenize", {"messages": begun, "continue_final_message": True}).json()
    assert lm.decode(continued["tokens"]).endswith("assistant\nOnce upon")
    body = {"messages": begun, "continue_final_message": True, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == continued["count"]
    assert (
        answer["choices"][0]["message"]["content"]
        == lm.generate(continued["tokens"], max_new_tokens=8, temperature=0).text
    )
    stream = server.stream("/v1/chat/completions", body)
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in stream.chunks]
    assert "".join(parts) == answer["choices"][0]["message"]["content"]
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    refused = server.post("/tokenize", both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_the_version_describes_the_running_build(server: LiveServer) -> None:
    found = server.get("/version").json()
    assert (found["version"], found["torch"]) == (onward.__version__, torch.__version__)
    assert found["build"] == server.engines["demo"].fingerprint.split("-")[2]
    choice = onward.ops.choice()
    assert found["instruction_set"] == (choice.isa if choice.form == "native" else None)
