"""A model that requests use, and how a request holds it."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from onward.engine import Engine
from onward.errors import OnwardError
from onward.language_model.request import needed_tokenizer
from onward.protocols import BodyReader
from onward.server.settings import Settings


@dataclass(frozen=True)
class ServedModel:
    """A model, with its engine, under the name that requests use."""

    name: str
    engine: Engine
    reader: BodyReader
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, name: str, engine: Engine, settings: Settings, variables: Mapping[str, Any]) -> Self:
        """variables: of the chat template. Raises `TokenizerError`: the model has no tokenizer."""
        lm = engine.lm
        needed_tokenizer(lm.tokenizer, "a server")
        options: dict[str, Any] = {}
        if settings.max_new_tokens is not None or lm.model.max_seq_len is not None:
            options["max_new_tokens"] = settings.max_new_tokens
        lm.defaults.replace(**options)  # validates them
        limits, ignores = settings.body_limits, settings.ignore_unsupported
        reader = BodyReader(lm, name, options, variables, streams=True, limits=limits, ignore_unsupported=ignores)
        return cls(name, engine, reader)

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of a prompt and its output together."""
        return self.engine.lm.model.max_seq_len

    def listed(self) -> list[dict[str, Any]]:
        """The entries of /v1/models: the model, then its adapters, whose `parent` it is."""
        fields = {"id": self.name, "object": "model", "created": self.created, "owned_by": "onward"}
        has_template = self.engine.lm.chat_template is not None
        fields |= {"status": "loaded", "max_model_len": self.max_model_len, "chat_template": has_template}
        fields["default_options"] = self.reader.default_options
        return [fields, *({**fields, "id": name, "parent": self.name} for name in list(self.engine.lm.adapters))]


class Lease:
    """A request's use of a model on demand. While requests have leases, the model stays loaded.

    progress: returns a text about its load. served: the model, once it is loaded. future: done then, or with the error
    of its load. since: when it was asked for (`time.monotonic`).
    """

    def __init__(self, name: str, progress: Callable[[], str]) -> None:
        self.name, self.progress, self.since = name, progress, time.monotonic()
        self.served: ServedModel | None = None
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a client that leaves doesn't cancel it

    def begin(self, served: ServedModel) -> None:
        """The model is loaded: the request may use it."""
        self.served = served
        self.future.set_result(None)

    def fail(self, error: OnwardError) -> None:
        self.future.set_exception(error)


class ModelPending(Exception):  # noqa: N818 - no error: the reader of a body waits, and reads it again
    """A request needs a model that is not loaded yet. stream: whether its response is a stream."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.name)
        self.lease, self.stream = lease, False
