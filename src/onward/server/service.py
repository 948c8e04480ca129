"""What the endpoints share: the models, and requests on their way through an engine."""

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
from onward.server.resume import EventIdFormat, ResumeRequest, digest_of
from onward.server.submission import ActiveRequest, ResponseStore, Subscriber
from onward.util.text_input import TextError, parse_request_json

# The engine looks at all of these with every token.
_MOST_STOPS, _LONGEST_STOP = 64, 1024
_MOST_BAD_WORDS = 1024


def check_bounds(body: ParsedBody, settings: Settings) -> None:
    """Raise `BodyError` for a body that asks for more than a server gives one client."""
    options = body.requests[0].options
    logprobs = "top_logprobs" if body.kind == "chat.completion" else "logprobs"
    longest = max(map(len, options.stop), default=0)
    limits = (
        ("prompts", settings.max_prompts, len(body.requests), "prompt"),
        ("likeliest ids", settings.max_logprobs, options.logprobs or 0, logprobs),
        ("likeliest ids", settings.max_logprobs, options.prompt_logprobs or 0, "prompt_logprobs"),
        ("stop strings", _MOST_STOPS, len(options.stop), "stop"),
        ("characters in a stop string", _LONGEST_STOP, longest, "stop"),
        ("bad words", _MOST_BAD_WORDS, len(options.bad_words), "bad_words"),
    )
    for what, most, count, field in limits:
        if count > most:
            raise BodyError(f"this server serves {most} {what} at most; got {count}", field)


_Result = TypeVar("_Result")
# Reads a body that has come: the key of the answer to it -> what it asks for, and of which model.
Read = Callable[[ResponseKey], tuple[ServedModel, ParsedBody]]

# Threads that read bodies: JSON, templates, tokenizers. The last release the interpreter's lock.
_READERS = 4


class Service:
    """A server's models, settings and counts.

    draining: it takes no more requests. ending: those that it has are cancelled. live: what engines serve.
    kept: what is known of answers that were given or cut.
    """

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        self.settings = settings
        self.models = ServedModels(engines, settings)
        self.kept = ResponseStore(settings.idempotency_seconds)
        self.draining = self.ending = False
        self.live: set[ActiveRequest] = set()
        self.metrics = Metrics(self.models, self._running)
        self._pool = ThreadPoolExecutor(_READERS, "onward-reader")

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run what takes long beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def submit(self, client: Client, read: Read, handover: ResumeRequest) -> Subscriber:
        """Read a body beside the loop, and have its requests served, unless it came before with the same
        Idempotency-Key. They are cancelled when all their clients have left. Raises `OnwardError`: what is wrong with
        the body, or that the engine takes no more."""
        if handover.idempotency is None:
            emitted = handover.emitted
            if handover.last_event_id is not None and emitted is None:
                emitted = self.kept.emitted(handover.key)
            recipient = await self._begun(await self.in_thread(self._read, read, handover), emitted)
        else:
            recipient = await self._again(read, handover, handover.idempotency)
        self.live.add(recipient.submission)
        client.on_leave(recipient.leave)
        if self.ending:  # since the body came
            recipient.submission.cancel()
        return recipient

    async def _again(self, read: Read, handover: ResumeRequest, name: str) -> Subscriber:
        """Join what is kept under a name, or begin it."""
        kept = self.kept.of(name, handover.key)
        if handover.last_event_id is not None and handover.key != kept.key:
            raise _other_body("Last-Event-ID is of another answer than that of this Idempotency-Key")
        handover = replace(handover, key=kept.key)
        async with kept.lock:
            recipient, before = await self.in_thread(self._read, read, handover), kept.submission
            if before is not None and before.asked != recipient.submission.asked:
                raise _other_body("this Idempotency-Key came with another body before: give each request its own")
            if before is not None and not before.is_cut and not before.has_failed:
                return Subscriber(before, handover, recipient.ids)
            await self._begun(recipient, None if before is None else before.emitted())
            kept.submission = recipient.submission
            return recipient

    def _read(self, read: Read, handover: ResumeRequest) -> Subscriber:
        """Whoever waits for what a body asks for, before any of it is submitted."""
        served, body = read(handover.key)
        body = body.seeded()
        check_bounds(body, self.settings)
        ids = None
        if body.stream:
            fingerprint = served.engine.fingerprint_with(body.requests[0].options.adapter)
            ids = EventIdFormat.of(body, fingerprint, handover.last_event_id)
        elif handover.last_event_id is not None:
            raise BodyError("Last-Event-ID is for streams: send stream: true, or no such id", "stream")
        asked = digest_of(body) if handover.idempotency is not None else ""
        return Subscriber(ActiveRequest(served, body, asked), handover, ids)

    async def _begun(self, recipient: Subscriber, emitted: Sequence[Sequence[int]] | None) -> Subscriber:
        """emitted: ids of its texts that are known here, which may be more than the handover says."""
        submission = recipient.submission
        submitting = asyncio.ensure_future(self.in_thread(submission.begin, emitted))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on, and nobody will wait for what it submits
            submitting.add_done_callback(lambda _: submission.cancel())
            raise
        return recipient

    def end(self) -> None:
        """Cancel all that goes on."""
        self.ending = True
        for submission in self.live:
            submission.cancel()

    def _running(self) -> Iterator[tuple[str, Generation]]:
        """The requests that have not been counted as ended, each with its model's name."""
        for submission in self.live:
            if submission.counted:  # an answer that is sent again to a repeated request
                continue
            for generation in submission.generations:
                yield submission.served.name, generation

    def ended(self, recipient: Subscriber) -> None:
        """Somebody has been answered, or waits no longer. What nobody waits for is cancelled."""
        submission = recipient.submission
        recipient.leave()
        if submission.clients:
            return
        self.live.discard(submission)
        self.kept.note(submission)
        if submission.counted:
            return
        submission.counted = True
        now, counted = time.monotonic(), self.metrics.of(submission.served.name)
        for generation, completion in zip(submission.generations, submission.ended(), strict=True):
            counted.note(generation, completion, now)

    def close(self) -> None:
        """End the threads that read bodies."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _other_body(message: str) -> BodyError:
    return BodyError(message, code="idempotency_key_reused", status=422)


def parsed(raw: bytes) -> dict[str, Any]:
    """The fields of a body. Raises `BodyError`: it is not a JSON object, or holds what no request can hold."""
    try:
        fields = parse_request_json(raw)
    except TextError as error:
        message = f"the body is not valid JSON: {error}" if error.at is None else str(error)
        raise BodyError(message, error.at, "invalid_json") from error
    if not isinstance(fields, dict):
        raise BodyError(f"a body must be a JSON object; got {type(fields).__name__}", code="invalid_type")
    return fields
