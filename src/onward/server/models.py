"""The models and settings of a server."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.engine import Engine
from onward.errors import RequestError
from onward.language_model.request import needed_tokenizer
from onward.protocols import BodyError, BodyReader, Limits
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
    drain: seconds for running requests to finish after the first signal.
    cors_origins: origins whose pages may call the server; "*" for any.
    hosts: accepted Host headers; empty accepts any.
    access_log: log each request. log_prompts: include its body.

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
    drain: float = 30.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    access_log: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_body", "max_requests", "request_memory"):
            check_whole(name, getattr(self, name), low=1)
        if self.max_new_tokens is not None:
            check_whole("max_new_tokens", self.max_new_tokens, low=0)
        for name in ("body_seconds", "keep_alive", "stalled_seconds", "hang_seconds", "idempotency_seconds", "drain"):
            value = getattr(self, name)
            if not (is_finite(value) and value >= 0):
                raise RequestError(f"{name} must be a number of seconds; got {value!r}")
        for name in ("cors_origins", "hosts"):
            texts = getattr(self, name)
            if isinstance(texts, str) or not isinstance(texts, Iterable) or not all(isinstance(t, str) for t in texts):
                raise RequestError(f"{name} must be a list of strings; got {texts!r}")
        Limits.of(self.limits)  # validates them
        object.__setattr__(self, "api_keys", ApiKeys(self.api_keys))


@dataclass(frozen=True)
class ServedModel:
    """A model, with its engine, under the name that requests use."""

    name: str
    engine: Engine
    reader: BodyReader
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of a prompt and its output together."""
        return self.engine.lm.model.max_seq_len

    def listed(self) -> list[dict[str, Any]]:
        """The entries of /v1/models: the model, then its adapters, whose `parent` it is."""
        fields = {"id": self.name, "object": "model", "created": self.created, "owned_by": "onward"}
        has_template = self.engine.lm.chat_template is not None
        fields |= {"max_model_len": self.max_model_len, "chat_template": has_template}
        fields["default_options"] = self.reader.default_options
        return [fields, *({**fields, "id": name, "parent": self.name} for name in self.engine.lm.adapters)]


class ServedModels:
    """All models of a server, by name."""

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        if not engines:
            raise RequestError("a server needs at least one model")
        self._models: dict[str, ServedModel] = {}
        for name, engine in engines.items():
            lm = engine.lm
            needed_tokenizer(lm.tokenizer, "a server")
            options: dict[str, Any] = {}
            if settings.max_new_tokens is not None or lm.model.max_seq_len is not None:
                options["max_new_tokens"] = settings.max_new_tokens
            lm.defaults.replace(**options)  # validates them
            reader = BodyReader(
                lm,
                name,
                options,
                settings.variables.get(name, {}),
                streams=True,
                limits=Limits.of(settings.limits),
                ignore_unsupported=settings.ignore_unsupported,
            )
            self._models[name] = ServedModel(name, engine, reader)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def listed(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        return [fields for model in self for fields in model.listed()]

    def find(self, name: object) -> ServedModel:
        """The model of that name, or with an adapter of that name. If there is only one model, the name may be None.
        Raises `BodyError`: no name, an unknown name, or an adapter name of several models."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        names = list(dict.fromkeys(fields["id"] for fields in self.listed()))
        known = " and ".join(map(repr, names)) if len(names) < 3 else ", ".join(map(repr, names))
        if name is None:
            message = f"model is required: this server has {known}"
            raise BodyError(message, "model", "missing_required_parameter")
        if not isinstance(name, str):
            raise BodyError(f"model must be a string; got {name!r}", "model", "invalid_type")
        if name in self._models:
            return self._models[name]
        adapted = [model for model in self if name in model.engine.lm.adapters]
        if not adapted:
            raise BodyError(f"no model {name!r}; available: {known}", "model", "model_not_found", 404)
        if len(adapted) > 1:
            models = " and ".join(repr(model.name) for model in adapted)
            raise BodyError(f"the adapter name {name!r} is ambiguous: {models} each have one; rename them", "model")
        return adapted[0]
