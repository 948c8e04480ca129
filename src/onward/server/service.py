"""What the endpoints share: the models, and submission of requests to their engines."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from onward.engine import Engine, Generation
from onward.protocols import BodyError, ParsedBody, ResponseKey
from onward.server.client import Client
from onward.server.metrics import Metrics
from onward.server.models import ServedModel, ServedModels, Settings
from onward.server.resume import EventIdFormat, ResumeRequest, digest_of, reused_key
from onward.server.submission import ActiveRequest, ResponseStore, Subscriber
from onward.util.text_input import TextError, parse_request_json

# The engine checks all of these for every token.
_MAX_STOPS, _MAX_STOP_LENGTH = 64, 1024
_MAX_BAD_WORDS = 1024


def check_bounds(body: ParsedBody, settings: Settings) -> None:
    """Raise `BodyError` if a body exceeds the server's limits."""
    options = body.requests[0].options
    logprobs = "top_logprobs" if body.kind == "chat.completion" else "logprobs"
    longest = max(map(len, options.stop), default=0)
    limits = (
        ("prompts", settings.max_prompts, len(body.requests), "prompt"),
        ("logprobs per token", settings.max_logprobs, options.logprobs or 0, logprobs),
        ("logprobs per token", settings.max_logprobs, options.prompt_logprobs or 0, "prompt_logprobs"),
        ("stop strings", _MAX_STOPS, len(options.stop), "stop"),
        ("characters in a stop string", _MAX_STOP_LENGTH, longest, "stop"),
        ("bad words", _MAX_BAD_WORDS, len(options.bad_words), "bad_words"),
    )
    for what, limit, count, field in limits:
        if count > limit:
            raise BodyError(f"this server allows at most {limit} {what}; got {count}", field)


_Result = TypeVar("_Result")
# Reads a body, given the key of its response.
Read = Callable[[ResponseKey], tuple[ServedModel, ParsedBody]]


class Service:
    """A server's models, settings and metrics. draining: no more requests are taken. ending: running requests are
    cancelled. live: requests that engines are serving. responses: what is stored of finished and cancelled responses.
    """

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        self.settings = settings
        self.models = ServedModels(engines, settings)
        self.responses = ResponseStore(settings.idempotency_seconds)
        self.draining = self.ending = False
        self.live: set[ActiveRequest] = set()
        self.metrics = Metrics(self.models, self._running)
        # Threads that read bodies: JSON, templates, tokenizers (these release the GIL).
        self._pool = ThreadPoolExecutor(4, "onward-reader")

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a slow function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def submit(self, client: Client, read: Read, resume: ResumeRequest) -> Subscriber:
        """Read a body in a thread and submit its requests, unless it is a repetition with the same Idempotency-Key.
        They are cancelled when all their clients have disconnected. Raises `OnwardError`: the body is invalid, or the
        engine takes no more."""
        if resume.idempotency is None:
            emitted = resume.emitted
            if resume.last_event_id is not None and emitted is None:
                emitted = self.responses.emitted(resume.key)
            subscriber = await self.in_thread(self._read, read, resume)
            await self._submit(subscriber.request, emitted)
        else:
            subscriber = await self._submit_once(read, resume, resume.idempotency)
        self.live.add(subscriber.request)
        client.on_disconnect(subscriber.leave)
        if self.ending:  # since the body arrived
            subscriber.request.cancel()
        return subscriber

    async def _submit_once(self, read: Read, resume: ResumeRequest, name: str) -> Subscriber:
        """Subscribe to the stored response of an Idempotency-Key, or start one."""
        stored = self.responses.get(name, resume.key)
        if resume.last_event_id is not None and resume.key != stored.key:
            raise reused_key("Last-Event-ID and Idempotency-Key belong to different responses")
        resume = replace(resume, key=stored.key)
        async with stored.lock:
            subscriber, before = await self.in_thread(self._read, read, resume), stored.request
            if before is not None and before.digest != subscriber.request.digest:
                raise reused_key()
            if before is not None and not before.is_cancelled and not before.has_failed:
                return Subscriber(before, resume, subscriber.ids)
            await self._submit(subscriber.request, None if before is None else before.emitted())
            stored.request = subscriber.request
            return subscriber

    def _read(self, read: Read, resume: ResumeRequest) -> Subscriber:
        """Read and check a body, without submitting it."""
        served, body = read(resume.key)
        body = body.seeded()
        check_bounds(body, self.settings)
        ids = None
        if body.stream:
            fingerprint = served.engine.fingerprint_with(body.requests[0].options.adapter)
            ids = EventIdFormat.of(body, fingerprint, resume.last_event_id)
        elif resume.last_event_id is not None:
            raise BodyError("Last-Event-ID requires stream: true: set it, or remove the header", "stream")
        digest = digest_of(body) if resume.idempotency is not None else ""
        return Subscriber(ActiveRequest(served, body, digest), resume, ids)

    async def _submit(self, active: ActiveRequest, emitted: Sequence[Sequence[int]] | None) -> None:
        """emitted: known token ids of its sequences, which may be more than `resume` has."""
        submitting = asyncio.ensure_future(self.in_thread(active.submit, emitted))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread continues, and nothing will await what it submits
            submitting.add_done_callback(lambda _: active.cancel())
            raise

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
        self.responses.store(active)
        if active.counted:
            return
        active.counted = True
        now, metrics = time.monotonic(), self.metrics.of(active.served.name)
        for generation, completion in zip(active.generations, active.completed(), strict=True):
            metrics.record(generation, completion, now)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


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
