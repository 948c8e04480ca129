"""OpenTelemetry spans of requests, with the extra `otel`. Without an endpoint nothing of OpenTelemetry is imported.

Each request has a span, whose children `queue`, `prefill` and `decode` are made when it ends, from the times that the
engine has recorded. Attributes follow the semantic conventions of HTTP and of generative AI.
"""

import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from onward import __version__
from onward.engine import Generation
from onward.errors import RequestError, warn
from onward.protocols import PROTOCOLS

_PATH = "/v1/traces"
# Seconds that the last spans get to reach the collector.
_FLUSH_SECONDS = 3.0
# Paths that are read again and again to watch the server.
_UNTRACED = frozenset({"/", "/docs", "/health", "/ready", "/metrics", "/stats", "/openapi.json"})
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
# Attributes, by field of the access log.
_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "stream": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "replica": "onward.replica",
    "retries": "onward.retries",
}


def check_endpoint(url: str) -> None:
    """Raise `RequestError` if the URL is not one of HTTP, or if a package of the extra is missing."""
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise RequestError(f"otlp_endpoint must be a URL such as http://localhost:4318; got {url!r}")
    try:
        _import_exporter()
    except ModuleNotFoundError as error:
        raise RequestError(f"otlp_endpoint needs the package {error.name}: pip install 'onward[otel]'") from error


def endpoint_of_environment() -> str | None:
    """The endpoint for traces in OpenTelemetry's standard variables. None: there is none, it is not one for OTLP over
    HTTP, or a package of the extra is missing; the latter two with a warning."""
    base, url = (os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or not (base or url) or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    if protocol != "http/protobuf":
        warn(
            f"no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, and this server has 'http/protobuf' only"
        )
        return None
    endpoint = url or f"{(base or '').rstrip('/')}{_PATH}"
    try:
        check_endpoint(endpoint)
    except RequestError as error:
        warn(f"no traces are sent, although OTEL_EXPORTER_OTLP_ENDPOINT is set: {error}")
        return None
    return endpoint


def _import_exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter


class Tracing:
    """Makes the spans of a server. provider: a `TracerProvider` of OpenTelemetry's SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider, self.api = provider, trace
        self.tracer = provider.get_tracer("onward", __version__)
        self.propagator = TraceContextTextMapPropagator()
        self._is_own = False

    @classmethod
    def of(cls, endpoint: str | None, provider: Any = None) -> "Tracing | None":
        """Spans for the provider, or for an OTLP/HTTP endpoint; None without either. /v1/traces is appended to an
        endpoint without a path. The SDK reads its other settings from the variables OTEL_*."""
        if provider is not None:
            return cls(provider)
        if endpoint is None:
            return None
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        process = {"host.name": platform.node(), "process.pid": os.getpid()}
        resource = Resource.create({"service.name": "onward", "service.version": __version__, **process})
        provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        url = endpoint if urlsplit(endpoint).path not in ("", "/") else f"{endpoint.rstrip('/')}{_PATH}"
        provider.add_span_processor(BatchSpanProcessor(_import_exporter()(endpoint=url)))
        tracing = cls(provider)
        tracing._is_own = True
        return tracing

    def begin(self, scope: Scope) -> "RequestSpan | None":
        """Begin the span of a request, within the trace that its headers name; None for one that only watches the
        server."""
        path = scope["path"]
        if path in _UNTRACED or path.startswith("/page/"):
            return None
        return RequestSpan(self, scope)

    def close(self) -> None:
        """Send the last spans, unless the collector takes too long. The provider of another application stays open."""
        if self._is_own:
            flush = threading.Thread(target=self.provider.shutdown, name="onward-spans", daemon=True)
            flush.start()
            flush.join(_FLUSH_SECONDS)


class RequestSpan:
    """The span of one HTTP request."""

    def __init__(self, tracing: Tracing, scope: Scope) -> None:
        self._tracing, self._scope = tracing, scope
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        self._span = tracing.tracer.start_span(
            method,
            context=tracing.propagator.extract(headers),
            kind=tracing.api.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path, "url.scheme": scope.get("scheme", "http")},
        )
        self._context = tracing.api.set_span_in_context(self._span)

    def replace_context(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Headers with this span's context in place of the client's, for a replica."""
        carrier: dict[str, str] = {}
        self._tracing.propagator.inject(carrier, self._context)
        others = [(name, value) for name, value in headers if name not in _CONTEXT_HEADERS]
        return others + [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    def add(self, generations: Sequence[Generation]) -> None:
        """Add the children of the generations that it waited for, and the options of the first."""
        if not self._span.is_recording() or not generations:
            return
        options = generations[0].request.options
        known = {"choice.count": options.n, "max_tokens": options.max_new_tokens, "temperature": options.temperature}
        known |= {"top_k": options.top_k, "top_p": options.top_p, "seed": options.seed}
        for name, value in known.items():
            if value is not None:
                self._span.set_attribute(f"gen_ai.request.{name}", value)
        now, to_epoch = time.monotonic(), time.time_ns() - time.monotonic_ns()
        for number, generation in enumerate(generations):
            for name, begin, end in _phases(generation, now):
                child = self._tracing.tracer.start_span(
                    name, context=self._context, start_time=round(begin * 1e9) + to_epoch
                )
                if len(generations) > 1:
                    child.set_attribute("onward.prompt", number)
                child.end(end_time=round(end * 1e9) + to_epoch)

    def end(self, status: int, request_id: str, fields: Mapping[str, Any]) -> None:
        """End it. fields: of the access log."""
        span, scope = self._span, self._scope
        if span.is_recording():
            if (route := _route(scope)) is not None:
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            span.set_attributes({"http.response.status_code": status, "onward.request_id": request_id})
            span.set_attributes({_ATTRIBUTES[name]: value for name, value in fields.items() if name in _ATTRIBUTES})
            if "model" in fields:
                operation = "text_completion" if scope["path"].endswith("/completions") else "chat"
                operation = "chat" if scope["path"].endswith("/chat/completions") else operation
                span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "onward"})
            reasons = fields.get("finish", ())
            error = fields.get("error", {}).get("code") or next((end for end in _FAILED if end in reasons), None)
            if error is not None or status >= 400:
                span.set_attribute("error.type", error or str(status))
            if status >= 499 or any(end in reasons for end in _FAILED):  # a refusal is the client's error
                span.set_status(self._tracing.api.StatusCode.ERROR, error)
        span.end()


def _route(scope: Scope) -> str | None:
    """The path of a request with placeholders for its parameters; None if it is unknown."""
    path: str = scope["path"]
    if path in PROTOCOLS:
        return path
    route = getattr(scope.get("route"), "path", None)  # in an ingress there is none
    prefix = "/v1" if path.startswith("/v1/") and route is not None and not route.startswith("/v1/") else ""
    return None if route is None else f"{prefix}{route}"


# The finish reasons of requests without a completion.
_FAILED = ("error", "cancelled")


def _phases(generation: Generation, now: float) -> Iterator[tuple[str, float, float]]:
    """The phases of a generation that has ended, with their beginnings and ends on `time.monotonic`. now: the end of
    the phase in which one without a completion ended."""
    started, arrivals = generation.started, generation.arrivals
    yield "queue", generation.submitted, now if started is None else started
    if started is None:
        return
    if generation.request.options.beams > 1:  # whose tokens arrive only at the end
        yield "search", started, arrivals[-1][0] if arrivals else now
        return
    yield "prefill", started, arrivals[0][0] if arrivals else now
    if arrivals:
        yield "decode", arrivals[0][0], arrivals[-1][0]
