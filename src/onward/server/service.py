"""The state that the endpoints share: models, memory, metrics, and the submission of requests to engines."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from onward.constraints.trial import Trial, TrialPending, deferred
from onward.engine import Engine, Generation
from onward.errors import OnwardError
from onward.protocols import BodyError, ParsedBody, ResponseKey, error_fields, status_of
from onward.server.client import Client, MemoryBudget, MemoryFullError, owner_of
from onward.server.errors import WholeResponse, rendered
from onward.server.gate import AccessRecord
from onward.server.log import log_defect, refusal
from onward.server.metrics import Metrics
from onward.server.models import ServedModels
from onward.server.on_demand import OnDemand
from onward.server.response_store import ResponseStore
from onward.server.resume import ResumeRequest, StreamPosition, event_prefix
from onward.server.served import ModelPending, ServedModel
from onward.server.settings import Settings
from onward.server.stored import BackgroundResponses, OwnedItems, put
from onward.server.submission import ActiveRequest, ReplayRecords
from onward.server.tracing import Tracing
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
Read = Callable[[ResponseKey], tuple[ServedModel, ParsedBody]]


class Service:
    """A server's models, settings and metrics. draining: no more requests are taken. ending: running requests are
    cancelled. live: requests that engines are serving. memory: that of all requests. replays: what is recorded of
    finished and cancelled responses. store: responses and conversations that clients continue and retrieve, if stored.
    background: responses without a client.

    Bodies are read, and answers written, in threads: large ones one at a time, so that what blocks the interpreter in
    one of them doesn't add up.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        settings: Settings,
        on_demand: OnDemand | None = None,
        tracer_provider: Any = None,
    ) -> None:
        self.settings = settings
        self.tracing = Tracing.of(settings.otlp_endpoint, tracer_provider)
        self.models = ServedModels(engines, settings, on_demand)
        self.memory = MemoryBudget(settings.request_memory)
        self.replays = ReplayRecords(settings.idempotency_seconds, self.memory)
        self.store = open_store(settings)
        self.background = None if self.store is None else BackgroundResponses(self.store, self.finish)
        self.draining = self.ending = False
        self.live: set[ActiveRequest] = set()
        self.metrics = Metrics(self.models, self._running)
        self._readers, self._large, self._status = Lane("reader", _READERS), Lane("large", 1), Lane("status", 1)
        self.updates = Lane("weights", 1)  # of weights, which may wait for requests

    async def status(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that may wait for the engines in a thread of its own."""
        return await asyncio.wrap_future(self._status.submit(function))

    async def run(self, client: str, function: Callable[[], _Result]) -> _Result:
        """Run a function that takes little time in a thread. client: for whom."""
        return await asyncio.wrap_future(self._readers.submit(function, client))

    def stored_items(self, client: str, response: str | None = None) -> OwnedItems | None:
        """The stored items that a client may use. response: the id of the one that uses them."""
        limit = self.settings.max_body
        return None if self.store is None else OwnedItems(self.store, owner_of(client), response, limit)

    def put(self, client: str, body: ParsedBody, response: dict[str, Any]) -> None:
        """Store a client's response, if it is to be stored."""
        if self.store is not None and body.storage is not None:
            put(self.store, owner_of(client), body, response)

    async def respond(
        self,
        client: Client,
        function: Callable[[], Any],
        nbytes: int,
        headers: Mapping[str, str] | None = None,
        lane: Lane | None = None,
    ) -> Response:
        """Run a function that makes a response in a thread, one of `lane` if it may take long. nbytes: how much it
        reads or writes. Raises `ClientDisconnect`."""
        while True:
            try:
                future = self._start(client, lambda: rendered(function()), nbytes, lane)
                content = await client.until(asyncio.wrap_future(future))
                break
            except ModelPending as pending:
                await self._wait_for_model(client, pending)
        client.memory.resize(client.memory.nbytes + len(content))
        return WholeResponse(content, self.settings.stalled_seconds, headers)

    async def _wait_for_model(self, client: Client, pending: ModelPending) -> None:
        """Wait until a model is loaded, however long it takes. Raises `OnwardError`: the load fails, or finds no room.
        Raises `ClientDisconnect`; the load goes on."""
        client.pending = pending
        try:
            await client.until(asyncio.shield(asyncio.wrap_future(pending.lease.future)))
        finally:
            client.pending = None

    def _start(
        self, client: Client, function: Callable[[], _Result], nbytes: int, lane: Lane | None = None
    ) -> Future[_Result]:
        function = partial(self.models.leasing, client.leases, function)
        if lane is not None:
            return lane.submit(function, client.name)
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
                emitted = self.replays.emitted(resume.key)
            active = await self._read(client, read, resume, partial(ActiveRequest.submit, emitted=emitted))
        else:
            active = await self._submit_once(client, read, resume, resume.idempotency)
        active.subscribers.add(client)
        self.live.add(active)
        client.on_disconnect(partial(active.leave, client))
        if self.ending:  # since the body arrived
            active.cancel()
        return active

    async def parse(self, client: Client, read: Read, resume: ResumeRequest) -> ParsedBody:
        """Read and check a body."""
        return (await self._read(client, read, resume)).body

    async def _submit_once(self, client: Client, read: Read, resume: ResumeRequest, name: str) -> ActiveRequest:
        """Join the running response of an Idempotency-Key, repeat a stored one, or start one."""
        stored = self.replays.get(name, resume.key)
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
            if any(emitted or ()):
                active.body = replace(active.body, bits=stored.bits)  # of the weights that computed these ids
            await self._run(client, lambda: active.submit(emitted), 0)
            stored.digest, stored.bits, stored.request = active.digest, active.body.bits, active
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
            except ModelPending as absent:
                await self._wait_for_model(client, absent)

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
            options = body.requests[0].options
            prefix = event_prefix(body, served.engine.fingerprint_with(options.adapter, options.steering))
        if resume.last_event_id is not None:
            if not body.stream:
                raise BodyError("Last-Event-ID requires stream: true: set it, or remove the header", "stream")
            StreamPosition.parse(resume.last_event_id, prefix)  # checks it
        active = ActiveRequest(served.name, served.engine, body, client, prefix, resume.idempotency)
        if then is not None:
            then(active)
        return active

    def tick(self) -> None:
        """Unload idle models, update the memory of all responses, and end those that no longer fit. Call it about once
        a second."""
        self.models.tick()
        for active in list(self.live):
            if not active.is_cancelled:
                try:
                    active.memory.resize(active.nbytes)
                except MemoryFullError as error:
                    active.fail(error)

    def cancel_all(self) -> None:
        self.ending = True
        self.models.cancel_waiting()
        for active in self.live:
            active.cancel()

    def note_refusal(self, error: OnwardError, access: AccessRecord) -> None:
        """Count an error, and add it to the log."""
        fields = error_fields(error)
        self.metrics.refusals[fields["code"] or "invalid_request"] += 1
        access.fields |= refusal(fields, with_values=self.settings.log_prompts)
        if status_of(error) >= 500 and not isinstance(error, BodyError):
            log_defect(error, id=access.id)

    def _running(self) -> Iterator[tuple[str, Generation]]:
        """The requests not yet counted as finished, with their model's name."""
        for active in self.live:
            if not active.counted:  # else a repeated request gets a stored response
                yield from ((active.model, generation) for generation in active.generations)

    def finish(self, active: ActiveRequest, client: object) -> None:
        """A client has its response, or has disconnected. Requests without clients are cancelled."""
        active.leave(client)
        if active.subscribers:
            return
        self.live.discard(active)
        active.memory.release()
        self.replays.add(active)
        if active.counted:
            return
        active.counted = True
        now, metrics = time.monotonic(), self.metrics.of(active.model)
        for generation, completion in zip(active.generations, active.completed(), strict=True):
            metrics.record(generation, completion, now)


def open_store(settings: Settings) -> ResponseStore | None:
    """The store of responses. Raises `RequestError`: its file cannot be used."""
    if settings.response_store is None:
        return None
    return ResponseStore(settings.response_store, settings.response_lifetime, settings.response_store_bytes)


def check_response_store(settings: Settings) -> None:
    """Raise `RequestError` if the file of stored responses cannot be used. It is created if it doesn't exist."""
    if (store := open_store(settings)) is not None:
        store.close()


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
