"""The settings of a server."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.errors import RequestError
from onward.protocols import Limits
from onward.server.tracing import check_endpoint
from onward.util.api_keys import ApiKeys
from onward.util.checks import check_whole, is_finite
from onward.util.option_names import checks_option_names


@checks_option_names
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server.

    api_keys: keys that requests may use, except to the health endpoints; empty requires none. Keys or their SHA-256
        digests, "sha256:" and 64 hexadecimal digits; only digests are stored.
    max_new_tokens: the default for requests that don't set it; None: up to the context length.
    variables: of the chat template, by model name; a request's own take precedence.
    max_body: maximum bytes of a request's body. limits: changes to `onward.protocols.Limits`.
    ignore_unsupported: drop unsupported hints that don't constrain the output, instead of rejecting them. The response
        header x-onward-ignored names them.
    max_requests: maximum concurrent requests; more are rejected with 503.
    request_memory: maximum bytes of all requests together: bodies, unsent responses and records of responses. Beyond
        it, requests are rejected with 503. One client can use half of it.
    body_seconds: how long a body may take to arrive.
    keep_alive: seconds without a chunk until a stream gets a comment.
    stalled_seconds: how long a client may leave a stream unread before its request is cancelled.
    hang_seconds: how long a step may take before /health reports that the engine hangs.
    idempotency_seconds: how long responses to requests with an Idempotency-Key are remembered.
    response_store: SQLite file for stored responses and conversations; ":memory:" for none, and None to store none.
        One server uses a file, or the replicas of one deployment on one machine.
    response_lifetime: how long they are stored after their last use. response_store_bytes: of all together; beyond
        it, the least recently used ones are dropped.
    drain: seconds for running requests to finish after the first signal.
    files_dir: folder of uploaded files and batches, with none but these; None: a temporary one, removed at the end.
    max_file: maximum bytes of an uploaded file. files_space: of all files together; one API key can use half of it.
    batch_share: share of an engine's sequences that batches may use while no other requests run, above 0 and up to 1.
        While others run, a batch serves one line at a time.
    cors_origins: origins whose pages may call the server; "*" for any.
    hosts: accepted Host headers; empty accepts any.
    management: let requests load and unload models and adapters, and update weights. adapters_dir: the folder of
        adapters that they may load. weights_dir: the folder of checkpoints whose weights models may get.
    access_log: log each request. log_prompts: include its body.
    otlp_endpoint: send OpenTelemetry traces to this URL by OTLP over HTTP (docs/observability.md).

    Raises:
        RequestError: a value outside its range.
    """

    api_keys: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_body: int = 8 * 2**20
    limits: Mapping[str, int] = field(default_factory=dict)
    ignore_unsupported: bool = False
    max_requests: int = 4096
    request_memory: int = 256 * 2**20
    body_seconds: float = 60.0
    keep_alive: float = 10.0
    stalled_seconds: float = 60.0
    hang_seconds: float = 120.0
    idempotency_seconds: float = 600.0
    response_store: str | None = ":memory:"
    response_lifetime: float = 30 * 86400.0
    response_store_bytes: int = 64 * 2**20
    drain: float = 30.0
    files_dir: Path | None = None
    max_file: int = 200 * 2**20
    files_space: int = 2 * 2**30
    batch_share: float = 0.5
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    management: bool = False
    adapters_dir: Path | None = None
    weights_dir: Path | None = None
    access_log: bool = True
    log_prompts: bool = False
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        counts = ("max_body", "max_requests", "request_memory", "response_store_bytes", "max_file", "files_space")
        for name in counts:
            check_whole(name, getattr(self, name), low=1)
        if self.max_new_tokens is not None:
            check_whole("max_new_tokens", self.max_new_tokens, low=0)
        if not (self.response_store is None or (isinstance(self.response_store, str) and self.response_store)):
            raise RequestError(f"response_store must be the name of a file; got {self.response_store!r}")
        times = ("body_seconds", "keep_alive", "stalled_seconds", "hang_seconds", "idempotency_seconds")
        for name in (*times, "response_lifetime", "drain"):
            value = getattr(self, name)
            if not (is_finite(value) and value >= 0):
                raise RequestError(f"{name} must be a number of seconds; got {value!r}")
        if not (is_finite(self.batch_share) and 0 < self.batch_share <= 1):
            raise RequestError(f"batch_share must be above 0 and at most 1; got {self.batch_share!r}")
        for name in ("cors_origins", "hosts"):
            texts = getattr(self, name)
            if isinstance(texts, str) or not isinstance(texts, Iterable) or not all(isinstance(t, str) for t in texts):
                raise RequestError(f"{name} must be a list of strings; got {texts!r}")
        for name in ("adapters_dir", "weights_dir"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise RequestError(f"{name} must be a folder; got {str(folder)!r}")
        _ = self.body_limits  # validates them
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        object.__setattr__(self, "api_keys", ApiKeys(self.api_keys))

    @functools.cached_property
    def body_limits(self) -> Limits:
        """The limits of a body."""
        return Limits.of(self.limits)
