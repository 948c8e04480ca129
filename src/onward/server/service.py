"""The state that the endpoints share: models, memory, metrics, and the submission of requests to engines."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from onward.constraints.trial import Trial, TrialPending, deferred
from onward.engine import Engine, Generation
from onward.errors import RequestError
from onward.language_model.request import needed_tokenizer
from onward.protocols import BodyError, BodyReader, Limits, ParsedBody, ResponseKey
from onward.server.client import Client, MemoryBudget, MemoryFullError
from onward.server.errors import WholeResponse, rendered
from onward.server.metrics import Metrics
from onward.server.resume import ResumeRequest, StreamPosition, event_prefix
from onward.server.settings import Settings
from onward.server.submission import ActiveRequest, ResponseStore
from onward.util.lanes import Lane
from onward.util.process import without_collections
from onward.util.text_input import TextError, parse_request_json

# Bodies and answers of more bytes are read and written one at a time.
_LARGE = 256 * 2**10
_READERS = 3
# Trials of the grammars of one body: with tools, each may be tried alone.
_MAX_TRIALS = 8

_Result = TypeVar("_Result")
# Reads a body, given the key of its response.
Read = Callable[[ResponseKey], "tuple[ServedModel, ParsedBody]"]


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


class Service:
    """A server's models, settings and metrics. draining: no more requests are taken. ending: running requests are
    cancelled. live: requests that engines are serving. memory: that of all requests. responses: what is stored of
    finished and cancelled responses.

    Bodies are read, and answers written, in threads: large ones one at a time, so that what blocks the interpreter in
    one of them doesn't add up.
    """

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        self.settings = settings
        self.models = ServedModels(engines, settings)
        self.memory = MemoryBudget(settings.request_memory)
        self.responses = ResponseStore(settings.idempotency_seconds, self.memory)
        self.draining = self.ending = False
        self.live: set[ActiveRequest] = set()
        self.metrics = Metrics(engines, self._running)
        self._readers, self._large, self._status = Lane("reader", _READERS), Lane("large", 1), Lane("status", 1)

    async def status(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that may wait for the engines in a thread of its own."""
        return await asyncio.wrap_future(self._status.submit(function))

    async def respond(
        self, client: Client, function: Callable[[], Any], nbytes: int, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Run a function that makes a response in a thread. nbytes: how much it reads or writes. Raises
        `ClientDisconnect`."""
        future = self._start(client, lambda: rendered(function()), nbytes)
        content = await client.until(asyncio.wrap_future(future))
        client.memory.resize(client.memory.nbytes + len(content))
        return WholeResponse(content, self.settings.stalled_seconds, headers)

    def _start(self, client: Client, function: Callable[[], _Result], nbytes: int) -> Future[_Result]:
        if nbytes > _LARGE:
            return self._large.submit(partial(_without_collections, function), client.name)
        return self._readers.submit(function, client.name)

    async def submit(self, client: Client, read: Read, resume: ResumeRequest) -> ActiveRequest:
        """Read a body and submit its requests in a thread, unless it is a repetition with the same Idempotency-Key.
        They are cancelled when all their clients have disconnected. Raises `OnwardError`: the body is invalid, or the
        engine takes no more. Raises `ClientDisconnect`."""
        if resume.idempotency is None:
            emitted = resume.emitted
            if resume.last_event_id is not None and emitted is None:
                emitted = self.responses.emitted(resume.key)
            active = await self._read(client, read, resume, partial(ActiveRequest.submit, emitted=emitted))
        else:
            active = await self._submit_once(client, read, resume, resume.idempotency)
        active.subscribers.add(client)
        self.live.add(active)
        client.on_disconnect(partial(active.leave, client))
        if self.ending:  # since the body arrived
            active.cancel()
        return active

    async def _submit_once(self, client: Client, read: Read, resume: ResumeRequest, name: str) -> ActiveRequest:
        """Join the running response of an Idempotency-Key, repeat a stored one, or start one."""
        stored = self.responses.get(name, resume.key)
        if resume.last_event_id is not None and resume.key != stored.key:
            message = "Last-Event-ID and Idempotency-Key belong to different responses"
            raise BodyError(message, code="idempotency_key_reused", status=422)
        async with stored.lock:
            active, before = await self._read(client, read, replace(resume, key=stored.key)), stored.request
            stored.check(active.digest)
            if before is not None and not before.is_cancelled and not before.has_failed:
                return before
            active.usage, active.counted = stored.usage, bool(stored.usage)  # it was, if all of it is known
            emitted = stored.emitted if before is None else before.emitted()
            await self._run(client, lambda: active.submit(emitted), 0)
            stored.digest, stored.request = active.digest, active
            return active

    async def _read(
        self, client: Client, read: Read, resume: ResumeRequest, then: Callable[[ActiveRequest], object] | None = None
    ) -> ActiveRequest:
        """Read and check a body, again after each trial of a grammar. then: what to do with it in the same thread."""
        trials: list[Trial] = []
        while True:
            try:
                return await self._run(
                    client, partial(self._read_once, client, read, resume, tuple(trials), then), client.body_bytes
                )
            except TrialPending as pending:
                if len(trials) >= _MAX_TRIALS:
                    message = f"the grammars of this body take more than {_MAX_TRIALS} trials: make them smaller"
                    raise BodyError(message) from None
                with pending.trial.waiting():
                    await client.until(asyncio.shield(asyncio.wrap_future(pending.trial.future)))
                trials.append(pending.trial)

    async def _run(self, client: Client, function: Callable[[], ActiveRequest], nbytes: int) -> ActiveRequest:
        """Run a function in a thread. What it submits is cancelled if nothing awaits it any more."""
        future = self._start(client, function, nbytes)
        try:
            return await client.until(asyncio.wrap_future(future))
        except BaseException:
            future.add_done_callback(_cancel_result)
            raise

    def _read_once(
        self,
        client: Client,
        read: Read,
        resume: ResumeRequest,
        trials: Sequence[Trial],
        then: Callable[[ActiveRequest], object] | None,
    ) -> ActiveRequest:
        with deferred(client.name, trials):
            served, body = read(resume.key)
        body, prefix = body.seeded(), ""
        if body.stream:
            prefix = event_prefix(body, served.engine.fingerprint_with(body.requests[0].options.adapter))
        if resume.last_event_id is not None:
            if not body.stream:
                raise BodyError("Last-Event-ID requires stream: true: set it, or remove the header", "stream")
            StreamPosition.parse(resume.last_event_id, prefix)  # checks it
        active = ActiveRequest(served.name, served.engine, body, client, prefix, resume.idempotency)
        if then is not None:
            then(active)
        return active

    def count_memory(self) -> None:
        """Update the memory of all responses, and end those that no longer fit. Call it about once a second."""
        for active in list(self.live):
            if not active.is_cancelled:
                try:
                    active.memory.resize(active.nbytes)
                except MemoryFullError as error:
                    active.fail(error)

    def cancel_all(self) -> None:
        self.ending = True
        for active in self.live:
            active.cancel()

    def _running(self) -> Iterator[tuple[str, Generation]]:
        """The requests not yet counted as finished, with their model's name."""
        for active in self.live:
            if not active.counted:  # else a repeated request gets a stored response
                yield from ((active.model, generation) for generation in active.generations)

    def finish(self, active: ActiveRequest, client: Client) -> None:
        """A client has its response, or has disconnected. Requests without clients are cancelled."""
        active.leave(client)
        if active.subscribers:
            return
        self.live.discard(active)
        active.memory.release()
        self.responses.store(active)
        if active.counted:
            return
        active.counted = True
        now, metrics = time.monotonic(), self.metrics.of(active.model)
        for generation, completion in zip(active.generations, active.completed(), strict=True):
            metrics.record(generation, completion, now)


def _cancel_result(future: Future[ActiveRequest]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()


def _without_collections(function: Callable[[], _Result]) -> _Result:
    with without_collections():
        return function()


def parsed(raw: bytes) -> dict[str, Any]:
    """The fields of a body. Raises `BodyError`: it is not a JSON object, or contains invalid values."""
    try:
        fields = parse_request_json(raw)
    except TextError as error:
        message = f"the body is not valid JSON: {error}" if error.at is None else str(error)
        raise BodyError(message, error.at, "invalid_json") from error
    if not isinstance(fields, dict):
        raise BodyError(f"the body must be a JSON object; got {type(fields).__name__}", code="invalid_type")
    return fields
