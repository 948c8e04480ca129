"""What whoever runs a server decides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.checks import check_whole, is_finite
from onward.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server.

    api_keys: one of them is asked of every request but those for the state of the server; none asks for nothing.
    max_new_tokens: of requests that do not say; None: as many as the context holds.
    variables: of the chat template, by the name of a model; a request's own come first.
    max_body: the most bytes of a request's body. max_prompts: the most prompts in one. max_logprobs: of how many of
        the likeliest ids a token's logprobs tell.
    max_requests: the most requests that the server holds at once; more are refused with 503.
    body_seconds: how long a body may take to arrive.
    keep_alive: seconds without a chunk after which a stream gets a comment.
    stalled_seconds: how long a client may leave a stream unread before its request is cancelled.
    hang_seconds: how long a step may take before /health says that the engine hangs.
    idempotency_seconds: how long what came with an Idempotency-Key is kept, to be answered the same again.
    drain: seconds that running requests get after the first signal.
    cors_origins: origins whose pages may call the server; "*" for any.
    hosts: names that requests may call the server by (the Host header); none allows any.
    access_log: a line for each request. log_prompts: with the body of each.

    Raises:
        RequestError: a value outside its range.
    """

    api_keys: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_body: int = 8 * 2**20
    max_prompts: int = 256
    max_logprobs: int = 20
    max_requests: int = 4096
    body_seconds: float = 60.0
    keep_alive: float = 10.0
    stalled_seconds: float = 60.0
    hang_seconds: float = 120.0
    idempotency_seconds: float = 600.0
    drain: float = 30.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    access_log: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_body", "max_prompts", "max_logprobs", "max_requests"):
            check_whole(name, getattr(self, name), low=1)
        if self.max_new_tokens is not None:
            check_whole("max_new_tokens", self.max_new_tokens, low=0)
        for name in ("body_seconds", "keep_alive", "stalled_seconds", "hang_seconds", "idempotency_seconds", "drain"):
            value = getattr(self, name)
            if not (is_finite(value) and value >= 0):
                raise RequestError(f"{name} must be a number of seconds; got {value!r}")
        for name in ("api_keys", "cors_origins", "hosts"):
            texts = getattr(self, name)
            if isinstance(texts, str) or not isinstance(texts, Iterable) or not all(isinstance(t, str) for t in texts):
                raise RequestError(f"{name} must be a list of texts; got {texts!r}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise RequestError("an API key must be printable ASCII without spaces, and not empty")
