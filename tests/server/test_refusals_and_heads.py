"""HEAD, bodies that are not plain JSON in UTF-8, and the reason for a refusal in the log."""

import gzip
import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from live_server import SECONDS, LiveServer

import onward
from onward.server.gate import Gate

Start = Callable[..., LiveServer]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def paths_of(server: LiveServer, method: str) -> set[str]:
    schema = server.app.routes.openapi()
    return {path.replace("{name}", "demo") for path, methods in schema["paths"].items() if method in methods}


def test_head_is_get_without_the_body(server: LiveServer) -> None:
    paths = {
        "/",
        "/docs",
        "/health",
        "/ready",
        "/metrics",
        "/stats",
        "/v1/models",
        "/v1/models/demo",
        "/openapi.json",
        "/nothing",
    }
    for path in paths | paths_of(server, "get"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
        answers = []
        for method in ("GET", "HEAD", "GET"):  # on one connection: a body that is left over would spoil the next answer
            connection.request(method, path)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            answers.append((answer.status, headers, answer.read()))
        connection.close()
        (status, headers, body), (head_status, head_headers, nothing), (again, _, _) = answers
        assert head_status == status == again, path
        assert nothing == b""
        assert set(head_headers) == set(headers)
        changing = {"x-request-id", "request-id", "date"} | (
            {"content-length"} if path in ("/metrics", "/stats", "/health") else set()
        )
        assert {name: head_headers[name] for name in headers if name not in changing} == {
            name: value for name, value in headers.items() if name not in changing
        }
        assert body or status == 404


def test_head_has_the_requirements_of_get(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=("key",))
    assert httpx2.head(f"{server.url}/v1/models").status_code == 401
    assert httpx2.head(f"{server.url}/v1/models", headers={"authorization": "Bearer key"}).status_code == 200
    wrong = httpx2.head(f"{server.url}{TEXT}", headers={"authorization": "Bearer key"})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert server.post("/health", {}, headers={"authorization": "Bearer key"}).headers["allow"] == "GET, HEAD"
    allow = server.post("/openapi.json", {}, headers={"authorization": "Bearer key"}).headers["allow"]
    assert sorted(allow.split(", ")) == ["GET", "HEAD"], "a framework's own route lists HEAD itself"


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-Encoding": "gzip"}, "unsupported_content_encoding"),
        ({"Content-Encoding": "identity, zstd"}, "unsupported_content_encoding"),
        ({"Content-Encoding": "BR"}, "unsupported_content_encoding"),
        ({"Content-Type": "application/json; charset=utf-16"}, "unsupported_charset"),
        ({"Content-Type": "application/x-json"}, "unsupported_media_type"),
        ({"Content-Type": ""}, "unsupported_media_type"),
    ],
    ids=str,
)
def test_other_encodings_are_refused_by_name(server: LiveServer, path: str, headers: dict[str, str], code: str) -> None:
    content = gzip.compress(BODY) if "Content-Encoding" in headers else BODY
    answer = server.post(path, content=content, headers={"Content-Type": "application/json", **headers})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, code)
    assert answer.headers["accept-encoding"] == "identity"
    named = headers.get("Content-Encoding", "").split(", ")[-1].lower()
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Encoding": "identity"},
        {"Content-Encoding": ""},
        {"Content-Type": 'application/JSON; charset="UTF-8"'},
        {"Content-Type": "application/json;charset=us-ascii"},
    ],
    ids=str,
)
def test_headers_without_effect_are_accepted(server: LiveServer, headers: dict[str, str]) -> None:
    answer = server.post(TEXT, content=BODY, headers={"Content-Type": "application/json", **headers})
    assert answer.status_code == 200


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, server: LiveServer) -> Iterator[list[dict[str, Any]]]:
    """The lines of requests that are written within the block."""
    lines: list[dict[str, Any]] = []
    caplog.clear()
    with caplog.at_level("INFO", logger="onward.server"):
        yield lines
        server.wait_idle()
    found = [json.loads(record.getMessage()) for record in caplog.records if record.name == "onward.server"]
    lines += [line for line in found if line["event"] == "request"]


SECRET = "a secret prompt"
REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (TEXT, {"prompt": SECRET, "temperature": SECRET}, "temperature"),
    (TEXT, {"prompt": SECRET, "nonsense": 1}, "nonsense"),
    (CHAT, {"messages": SECRET}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": SECRET}], "regex": f"({SECRET}"}, "regex"),
    (RESPONSES, {"input": [SECRET]}, "input[0]"),
    ("/tokenize", {"prompt": [SECRET]}, "prompt"),
    ("/nothing", {"prompt": SECRET}, None),
]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_the_reason_of_a_refusal(
    start: Start, lm: onward.LanguageModel, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    server = start({"demo": lm}, access_log=True, log_prompts=log_prompts)
    for path, body, param in REFUSED:
        with logged(caplog, server) as lines:
            answer = server.post(path, body)
        (line,) = lines
        error = answer.json()["error"]
        assert line["status"] == answer.status_code >= 400
        assert (line["error"].get("param"), line["error"]["code"]) == (param, error["code"])
        assert len(json.dumps(line["error"])) < 1000
        if path != "/nothing":
            assert line["error"]["reason"].split("…")[0] in error["message"]
        if not log_prompts:
            assert SECRET not in json.dumps(line)
    with logged(caplog, server) as lines:
        server.post(TEXT, {"prompt": "x", "max_tokens": 1})
    assert "error" not in lines[0]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_bodies_are_logged_on_request(
    start: Start, lm: onward.LanguageModel, caplog: pytest.LogCaptureFixture, log_prompts: bool
) -> None:
    server = start({"demo": lm}, access_log=True, log_prompts=log_prompts, management=True)
    posted = {path for path, methods in server.get("/openapi.json").json()["paths"].items() if "post" in methods}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": SECRET, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}),
        (RESPONSES, {"input": SECRET, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/embeddings", {"input": SECRET}),
        ("/v1/rerank", {"query": SECRET, "documents": [SECRET]}),
        ("/v1/tokenize", {"prompt": SECRET}),
        ("/v1/tokenize", {"prompt": SECRET, "nonsense": 1}),
        ("/v1/detokenize", {"tokens": lm.encode(SECRET)}),
        ("/v1/responses/input_tokens", {"input": SECRET}),
        ("/v1/conversations", {"items": [{"role": "user", "content": SECRET}]}),
        ("/v1/conversations/{id}", {"metadata": {"a": SECRET}}),
        ("/v1/conversations/{id}/items", {"items": [{"role": "user", "content": SECRET}]}),
        ("/v1/models/load", {"model": SECRET}),
        ("/v1/models/unload", {"model": SECRET}),
        ("/v1/models/weights", {"model": SECRET, "weights_path": SECRET}),
        ("/v1/load_lora_adapter", {"lora_name": SECRET, "lora_path": SECRET}),
        ("/v1/unload_lora_adapter", {"lora_name": SECRET}),
        ("/v1/batches", {"input_file_id": SECRET, "endpoint": TEXT, "completion_window": "24h"}),
    ]
    # Without a body in JSON.
    without_body = {"/v1/responses/{id}/cancel", "/v1/batches/{id}/cancel", "/v1/files"}
    assert {path for path in posted if path.startswith("/v1")} - without_body == {path for path, _ in bodies}
    server.wait_idle()
    for path, body in bodies:
        with logged(caplog, server) as lines:
            server.post(path, body)
        (line,) = lines
        assert (json.loads(line["body"]) if "body" in line else None) == (body if log_prompts else None)


def test_refusals_before_the_application_are_logged_with_a_reason(
    start: Start, lm: onward.LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    server = start({"demo": lm}, access_log=True, api_keys=("key",))
    with logged(caplog, server) as lines:
        assert server.get("/v1/models").status_code == 401
    assert lines[0]["error"]["code"] == "invalid_api_key"


def test_a_request_without_an_answer_counts_as_disconnected(server: LiveServer) -> None:
    before = server.app.service.metrics.statuses.copy()
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}

    async def silent(*_: Any) -> None: ...

    leaving = Gate(silent, server.app.service)(scope, silent, silent)
    with pytest.raises(StopIteration):
        leaving.send(None)
    after = server.app.service.metrics.statuses
    assert (after[499] - before[499], after[0]) == (1, 0)


def test_metrics_are_consistent_under_concurrent_requests(start: Start, lm: onward.LanguageModel) -> None:
    """Each of 60 threads' switches used to be able to change the counts while they were written."""
    server = start({"demo": lm})
    stop = threading.Event()
    before = sys.getswitchinterval()

    def ask() -> None:
        while not stop.is_set():
            server.post(TEXT, {"prompt": "x", "max_tokens": 1})

    threads = [threading.Thread(target=ask) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        statuses = {server.get("/metrics").status_code for _ in range(60)}
    finally:
        sys.setswitchinterval(before)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert statuses == {200}
    server.wait_idle()
    counted = server.app.service.metrics.of("demo")
    ended = sum(counted.ended.values())
    values = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if line[0] != "#")
    assert values['onward_time_to_first_token_seconds_count{model="demo"}'] == f"{ended}.0", "none is noted twice"
    assert not counted._started
