"""The state that the endpoints share: models, memory, metrics, and the submission of requests to engines."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from onward.constraints.trial import Trial, TrialPending, deferred
from onward.engine import Engine, Generation
from onward.protocols import BodyError, ParsedBody, ResponseKey
from onward.server.client import Client
from onward.server.errors import WholeResponse, rendered
from onward.server.memory import MemoryBudget, MemoryFullError
from onward.server.metrics import Metrics
from onward.server.models import ServedModel, ServedModels, Settings
from onward.server.resume import EventIdFormat, ResumeRequest, digest_of, reused_key
from onward.server.submission import ActiveRequest, ResponseStore, Subscriber
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
        self.metrics = Metrics(self.models, self._running)
        self._readers, self._large, self._status = Lane("reader", _READERS), Lane("large", 1), Lane("status", 1)

    async def status(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that may wait for the engines in a thread of its own."""
        return await asyncio.wrap_future(self._status.submit(function))

    async def read(self, request: Request, function: Callable[[bytes], Any], raw: bytes) -> Response:
        """Run a function that turns a body into a response in a thread, unless the client disconnects while it is
        queued."""
        client = Client(request, len(raw))
        try:
            content = await self._in_thread(client, lambda: rendered(function(raw)), len(raw))
            return self._response(client, content)
        finally:
            client.close()

    async def respond(
        self, client: Client, active: ActiveRequest, function: Callable[[], Any], headers: Mapping[str, str]
    ) -> Response:
        """Run a function that makes the response in a thread, unless the client disconnects."""
        content = await self._in_thread(client, lambda: rendered(function()), active.nbytes)
        return self._response(client, content, headers)

    def _response(self, client: Client, content: bytes, headers: Mapping[str, str] | None = None) -> Response:
        client.memory.resize(client.memory.nbytes + len(content))
        return WholeResponse(content, self.settings.stalled_seconds, headers)

    async def _in_thread(self, client: Client, function: Callable[[], _Result], nbytes: int) -> _Result:
        """Run a function in a thread for a client. nbytes: how much it reads or writes. Raises `ClientDisconnect`."""
        if nbytes > _LARGE:
            future = self._large.submit(partial(_without_collections, function), client.name)
        else:
            future = self._readers.submit(function, client.name)
        return await client.until(asyncio.wrap_future(future))

    async def submit(self, client: Client, read: Read, resume: ResumeRequest) -> Subscriber:
        """Read a body in a thread and submit its requests, unless it is a repetition with the same Idempotency-Key.
        They are cancelled when all their clients have disconnected. Raises `OnwardError`: the body is invalid, or the
        engine takes no more."""
        if resume.idempotency is None:
            emitted = resume.emitted
            if resume.last_event_id is not None and emitted is None:
                emitted = self.responses.emitted(resume.key)
            subscriber = await self._read(client, read, resume)
            await self._submit(client, subscriber.request, emitted)
        else:
            subscriber = await self._submit_once(client, read, resume, resume.idempotency)
        self.live.add(subscriber.request)
        client.on_disconnect(subscriber.leave)
        if self.ending:  # since the body arrived
            subscriber.request.cancel()
        return subscriber

    async def _submit_once(self, client: Client, read: Read, resume: ResumeRequest, name: str) -> Subscriber:
        """Subscribe to the running response of an Idempotency-Key, repeat a stored one, or start one."""
        stored = self.responses.get(name, resume.key)
        if resume.last_event_id is not None and resume.key != stored.key:
            raise reused_key("Last-Event-ID and Idempotency-Key belong to different responses")
        resume = replace(resume, key=stored.key)
        async with stored.lock:
            subscriber = await self._read(client, read, resume)
            request, before = subscriber.request, stored.request
            if stored.digest and stored.digest != request.digest:
                raise reused_key()
            if before is not None and not before.is_cancelled and not before.has_failed:
                return Subscriber(before, resume, subscriber.ids)
            request.usage, request.counted = stored.usage, bool(stored.usage)  # it was, if all of it is known
            await self._submit(client, request, stored.emitted if before is None else before.emitted())
            stored.begin(request)
            return subscriber

    async def _read(self, client: Client, read: Read, resume: ResumeRequest) -> Subscriber:
        """Read and check a body in a thread, again after each trial of a grammar, without submitting it."""
        trials: list[Trial] = []
        while True:
            try:
                function = partial(self._read_once, read, resume, client.name, tuple(trials))
                subscriber = await self._in_thread(client, function, client.body_bytes)
            except TrialPending as pending:
                if len(trials) >= _MAX_TRIALS:
                    message = f"the grammars of this body take more than {_MAX_TRIALS} trials: make them smaller"
                    raise BodyError(message) from None
                with pending.trial.waiting():
                    await client.until(asyncio.shield(asyncio.wrap_future(pending.trial.future)))
                trials.append(pending.trial)
            else:
                subscriber.request.memory = self.memory.reservation(client.name)
                return subscriber

    def _read_once(self, read: Read, resume: ResumeRequest, client: str, trials: Sequence[Trial]) -> Subscriber:
        with deferred(client, trials):
            served, body = read(resume.key)
        body = body.seeded()
        ids = None
        if body.stream:
            fingerprint = served.engine.fingerprint_with(body.requests[0].options.adapter)
            ids = EventIdFormat.of(body, fingerprint, resume.last_event_id)
        elif resume.last_event_id is not None:
            raise BodyError("Last-Event-ID requires stream: true: set it, or remove the header", "stream")
        digest = digest_of(body) if resume.idempotency is not None else ""
        return Subscriber(ActiveRequest(served, body, digest, resume.idempotency), resume, ids)

    async def _submit(self, client: Client, active: ActiveRequest, emitted: Sequence[Sequence[int]] | None) -> None:
        """emitted: known token ids of its sequences, if any; `resume` may have fewer."""
        submitting = self._readers.submit(partial(active.submit, emitted, client.name or None), client.name)
        try:
            await client.until(asyncio.wrap_future(submitting))
        except BaseException:  # the thread continues, and nothing will await what it submits
            submitting.add_done_callback(lambda _: active.cancel())
            raise

    def count_memory(self) -> None:
        """Update the memory of all responses, and end those that no longer fit. Call it about once a second."""
        for active in list(self.live):
            if active.memory is not None and not active.is_cancelled:
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
                yield from ((active.served.name, generation) for generation in active.generations)

    def finish(self, subscriber: Subscriber) -> None:
        """A subscriber has its response, or has disconnected. Requests without subscribers are cancelled."""
        active = subscriber.request
        subscriber.leave()
        if active.subscribers:
            return
        self.live.discard(active)
        if active.memory is not None:
            active.memory.release()
        self.responses.store(active)
        if active.counted:
            return
        active.counted = True
        now, metrics = time.monotonic(), self.metrics.of(active.served.name)
        for generation, completion in zip(active.generations, active.completed(), strict=True):
            metrics.record(generation, completion, now)


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
