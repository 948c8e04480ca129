"""The spans of requests: their tree, times and attributes, and their export to a collector."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from live_server import PLAIN, LiveServer

import onward
from onward.errors import OnwardWarning, RequestError
from onward.server import Settings

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

Start = Callable[..., LiveServer]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(start: Start, lm: onward.LanguageModel, spans: InMemorySpanExporter) -> LiveServer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return start({"demo": lm}, tracer_provider=provider)


def finished(server: LiveServer, spans: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the only request, and its children in order."""
    server.wait_idle()
    everything = spans.get_finished_spans()
    (root,) = [span for span in everything if span.kind is SpanKind.SERVER]
    children = [span for span in everything if span is not root]
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
        assert child.context.trace_id == root.context.trace_id
    return root, children


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases(traced: LiveServer, spans: InMemorySpanExporter, stream: bool) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 7, "temperature": 0.5, "seed": 3, "stream": stream}
    headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
    assert traced.post(TEXT, body, headers=headers).status_code == 200
    root, children = finished(traced, spans)
    assert root.name == f"POST {TEXT}"
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)  # type: ignore[union-attr]
    assert dict(root.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": TEXT,
        "url.path": TEXT,
        "url.scheme": "http",
        "onward.request_id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "onward",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.model": "demo",
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": stream,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(traced.engines["demo"].lm.request("Once upon a time").prompt),
        "gen_ai.usage.output_tokens": 7,
    }
    assert root.status.status_code is StatusCode.UNSET
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    times = [time for child in children for time in (child.start_time, child.end_time)]
    assert times == sorted(times), "each phase begins where the one before ends"
    assert times[1] == times[2]
    assert times[3] == times[4]
    assert root.start_time <= times[0]  # type: ignore[operator]
    assert times[-1] <= root.end_time  # type: ignore[operator]


def test_each_prompt_has_its_phases(traced: LiveServer, spans: InMemorySpanExporter) -> None:
    body = {"prompt": ["The fox", "The owl"], "max_tokens": 3}
    assert traced.post(TEXT, body).status_code == 200
    root, children = finished(traced, spans)
    assert [(child.name, (child.attributes or {})["onward.prompt"]) for child in children] == [
        (name, prompt) for prompt in (0, 1) for name in ("queue", "prefill", "decode")
    ]
    assert (root.attributes or {})["gen_ai.usage.output_tokens"] == 6
    assert root.parent is None


def test_a_beam_search_is_one_phase(traced: LiveServer, spans: InMemorySpanExporter) -> None:
    body = {"prompt": "The fox", "max_tokens": 3, "beams": 2, "temperature": 0}
    assert traced.post(TEXT, body).status_code == 200
    assert [child.name for child in finished(traced, spans)[1]] == ["queue", "search"]


@pytest.mark.parametrize(
    ("path", "body", "name", "status", "error"),
    [
        (TEXT, {"prompt": "a", "max_tokens": "x"}, f"POST {TEXT}", 400, "invalid_value"),
        (CHAT, {"messages": [], "model": "other"}, f"POST {CHAT}", 404, "model_not_found"),
        ("/v1/nothing", {}, "POST", 404, "unknown_url"),
    ],
)
def test_a_refusal_is_a_client_error(
    traced: LiveServer, spans: InMemorySpanExporter, path: str, body: Any, name: str, status: int, error: str
) -> None:
    assert traced.post(path, body).status_code == status
    root, children = finished(traced, spans)
    attributes = root.attributes or {}
    assert (root.name, attributes["http.response.status_code"], attributes["error.type"]) == (name, status, error)
    assert root.status.status_code is StatusCode.UNSET
    assert not children


def test_a_disconnected_client_is_an_error(traced: LiveServer, spans: InMemorySpanExporter) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{traced.url}{TEXT}", json=body, **PLAIN) as response:
        next(response.iter_raw())
    root, children = finished(traced, spans)
    assert (root.attributes or {})["error.type"] == "cancelled"
    assert root.status.status_code is StatusCode.ERROR
    assert [child.name for child in children] == ["queue", "prefill", "decode"]


def test_a_failure_is_an_error(
    traced: LiveServer, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("onward.engine.request.EngineRequest.begin", fail)
    assert traced.post(TEXT, {"prompt": "The fox"}).status_code == 500
    root, children = finished(traced, spans)
    assert root.status.status_code is StatusCode.ERROR
    assert [child.name for child in children] == ["queue"]


def test_monitoring_makes_no_spans(traced: LiveServer, spans: InMemorySpanExporter) -> None:
    for path in ("/", "/docs", "/health", "/ready", "/metrics", "/stats", "/openapi.json", "/page/page.css"):
        assert traced.get(path).status_code == 200
    assert traced.get("/v1/models").status_code == 200
    assert finished(traced, spans)[0].name == "GET /v1/models"


def test_an_unsampled_context_makes_no_spans(traced: LiveServer, spans: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"{TRACEPARENT[:-1]}0"}
    assert traced.post(TEXT, {"prompt": "The fox", "max_tokens": 2}, headers=headers).status_code == 200
    traced.wait_idle()
    assert not spans.get_finished_spans()


# ── the collector ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """The URL of a collector, and what it receives: the path, and the spans."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(content)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_reach_a_collector(lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collector() as (url, received):
        with LiveServer({"demo": lm}, otlp_endpoint=url) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            assert server.post(CHAT, body, headers={"traceparent": TRACEPARENT}).status_code == 200
            server.wait_idle()
        assert {path for path, _ in received} == {"/v1/traces"}
        groups = [group for _, request in received for group in request.resource_spans]
    resource = {each.key: each.value.string_value for each in groups[0].resource.attributes}
    assert resource["service.name"] == "onward"
    assert resource["service.version"] == onward.__version__
    assert resource["deployment.environment.name"] == "test"
    sent = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    assert {span.name for span in sent} == {f"POST {CHAT}", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in sent} == {TRACE}


def test_a_dead_collector_does_not_delay_shutdown(lm: onward.LanguageModel) -> None:
    with collector() as (url, _):
        pass  # nothing listens there any more
    with LiveServer({"demo": lm}, otlp_endpoint=url) as server:
        assert server.post(TEXT, {"prompt": "The fox", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://a/b", "http://", 4318])
def test_an_endpoint_is_a_url(url: Any) -> None:
    with pytest.raises(RequestError, match="otlp_endpoint must be a URL such as http://localhost:4318; got"):
        Settings(otlp_endpoint=url)


def run(*lines: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **variables}
    program = "\n".join(lines)
    return subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True, check=True)


# Without a package of the extra.
MISSING = "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None"


def test_a_server_without_traces_does_not_import_opentelemetry() -> None:
    program = "import sys, onward.server; onward.server.create_app({'demo': onward.Engine(onward.load('demo'))})"
    found = "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    assert run(program, found).stdout.strip() == "[]"


def test_a_missing_package_is_an_error_for_the_flag_and_a_warning_otherwise() -> None:
    program = """
import onward.server
from onward.errors import RequestError
from onward.server.tracing import endpoint_of_environment
try:
    onward.server.Settings(otlp_endpoint="http://localhost:4318")
except RequestError as error:
    print(error)
print(endpoint_of_environment())
"""
    done = run(MISSING, program, OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:4318")
    error, endpoint = done.stdout.splitlines()
    assert error.startswith("otlp_endpoint needs the package opentelemetry.exporter")
    assert error.endswith("pip install 'onward[otel]'")
    assert endpoint == "None"
    assert "no traces are sent, although OTEL_EXPORTER_OTLP_ENDPOINT is set" in done.stderr


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({"ENDPOINT": "http://a:4318"}, "http://a:4318/v1/traces"),
        ({"ENDPOINT": "http://a/base/"}, "http://a/base/v1/traces"),
        ({"ENDPOINT": "http://a", "TRACES_ENDPOINT": "http://b/own"}, "http://b/own"),
    ],
)
def test_the_environment_names_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], endpoint: str | None
) -> None:
    from onward.server.tracing import endpoint_of_environment

    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert endpoint_of_environment() == endpoint
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert endpoint_of_environment() is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert endpoint_of_environment() is None


def test_another_transport_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.server.tracing import endpoint_of_environment

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.warns(OnwardWarning, match=r"OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        assert endpoint_of_environment() is None
