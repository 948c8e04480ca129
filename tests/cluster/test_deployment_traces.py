"""The trace of a request goes from the client through the ingress to the replica that serves it."""

import asyncio
import json

import pytest
from test_state import Deployment

import onward
from onward.server import Settings

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onward.server.tracing import Tracing

BODY = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_replica_continues_the_trace() -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    deployment = Deployment(onward.load("demo"), Settings(access_log=False))
    deployment.ingress.tracing = Tracing(provider)
    for app in deployment.fakes.apps.values():
        app.service.tracing = Tracing(provider)
    deployment.fakes.dying.add("a")  # so that there are two attempts

    async def run() -> None:
        context = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
        reply = await deployment.ask("/v1/completions", BODY, **context)
        assert reply.status == 200
        assert (await deployment.ask("/metrics")).status == 200

    try:
        asyncio.run(run())
    finally:
        for engine in deployment.engines.values():
            engine.close()
    *phases, replica, ingress = spans.get_finished_spans()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert replica.name == ingress.name == "POST /v1/completions"
    assert {f"{span.context.trace_id:032x}" for span in (*phases, replica, ingress)} == {TRACE}
    assert [f"{span.parent.span_id:016x}" for span in (ingress, replica, *phases) if span.parent] == [
        PARENT,
        f"{ingress.context.span_id:016x}",
        *[f"{replica.context.span_id:016x}"] * 3,
    ]
    assert replica.context.trace_state.to_header() == "vendor=1"
    attributes = dict(ingress.attributes or {})
    assert (attributes["onward.replica"], attributes["onward.retries"]) == ("b", 1)
    for name in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "onward.request_id"):
        assert attributes[name] == (replica.attributes or {})[name]
