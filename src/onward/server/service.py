"""What the endpoints share: the models, and requests on their way through an engine."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from onward.engine import Engine, Generation
from onward.openai import AnswerKey, Body, BodyError
from onward.server.bounds import check_bounds
from onward.server.client import Client
from onward.server.handover import EventIds, Handover, digest_of, emitted_by
from onward.server.kept import KeptAnswers
from onward.server.metrics import Metrics
from onward.server.models import ServedModel, ServedModels
from onward.server.settings import Settings
from onward.server.submission import Recipient, Submission
from onward.text_input import TextError, parse_request_json

_Result = TypeVar("_Result")
# Reads a body that has come: the key of the answer to it -> what it asks for, and of which model.
Read = Callable[[AnswerKey], tuple[ServedModel, Body]]

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
        self.kept = KeptAnswers(settings.idempotency_seconds)
        self.draining = self.ending = False
        self.live: set[Submission] = set()
        self.metrics = Metrics(self.models, self._running)
        self._pool = ThreadPoolExecutor(_READERS, "onward-reader")

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run what takes long beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def submit(self, client: Client, read: Read, handover: Handover) -> Recipient:
        """Read a body beside the loop, and have its requests served, unless it came before with the same
        Idempotency-Key. They are cancelled when all their clients have left.

        Raises:
            OnwardError: what is wrong with the body, or that the engine takes no more.
        """
        if handover.idempotency is None:
            emitted = handover.emitted
            if handover.last_event_id is not None and emitted is None:
                emitted = self.kept.emitted(handover.key)
            recipient = await self._begun(await self._read(read, handover), handover, emitted)
        else:
            recipient = await self._again(read, handover, handover.idempotency)
        self.live.add(recipient.submission)
        client.on_leave(recipient.leave)
        if self.ending:  # since the body came
            recipient.submission.cancel()
        return recipient

    async def _again(self, read: Read, handover: Handover, name: str) -> Recipient:
        """Join what is kept under a name, or begin it."""
        kept = self.kept.of(name, handover.key)
        if handover.last_event_id is not None and handover.key != kept.key:
            raise _other_body("Last-Event-ID is of another answer than that of this Idempotency-Key")
        handover = replace(handover, key=kept.key)
        async with kept.lock:
            asked = await self._read(read, handover)
            before = kept.submission
            if before is not None and before.asked != asked.digest:
                raise _other_body("this Idempotency-Key came with another body before: give each request its own")
            if before is not None and not before.is_cut and not before.has_failed:
                return Recipient(before, handover, asked.ids)
            recipient = await self._begun(asked, handover, None if before is None else before.emitted())
            kept.submission = recipient.submission
            return recipient

    async def _read(self, read: Read, handover: Handover) -> "_Asked":
        return await self.in_thread(self._checked, read, handover)

    def _checked(self, read: Read, handover: Handover) -> "_Asked":
        served, body = read(handover.key)
        body = body.seeded()
        check_bounds(body, self.settings)
        ids = None
        if body.stream:
            fingerprint = served.engine.fingerprint_with(body.requests[0].options.adapter)
            ids = EventIds.of(body, fingerprint, handover.last_event_id)
        elif handover.last_event_id is not None:
            raise BodyError("Last-Event-ID is for streams: send stream: true, or no such id", "stream")
        return _Asked(served, body, ids, digest_of(body) if handover.idempotency is not None else "")

    async def _begun(self, asked: "_Asked", handover: Handover, emitted: Sequence[Sequence[int]] | None) -> Recipient:
        """emitted: ids of its texts that are known here, which may be more than the handover says."""
        submitting = asyncio.ensure_future(self.in_thread(self._submitted, asked, emitted))
        try:
            submission = await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on, and nobody will wait for what it submits
            submitting.add_done_callback(_cancel_submission)
            raise
        return Recipient(submission, handover, asked.ids)

    def _submitted(self, asked: "_Asked", emitted: Sequence[Sequence[int]] | None) -> Submission:
        submission = Submission(asked.served, asked.body, generations := [], asked.digest)
        engine = asked.served.engine
        known = emitted_by(asked.body.requests, emitted)
        try:
            for request, texts in zip(asked.body.requests, known, strict=True):
                resumed = texts and request.options.beams == 1
                generations.append(engine.resume(request, emitted=texts) if resumed else engine.submit(request))
        except BaseException:
            submission.cancel()
            raise
        return submission

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

    def ended(self, recipient: Recipient) -> None:
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


def _cancel_submission(submitting: "asyncio.Future[Submission]") -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


class _Asked(NamedTuple):
    """A body that was read and may be served. ids: of its events; None where it is no stream. digest: of all it asks
    for, where that is compared."""

    served: ServedModel
    body: Body
    ids: EventIds | None
    digest: str


def _other_body(message: str) -> BodyError:
    return BodyError(message, code="idempotency_key_reused", status=422)


def parsed(raw: bytes) -> dict[str, Any]:
    """The fields of a body.

    Raises:
        BodyError: it is not a JSON object, or holds what no request can hold.
    """
    try:
        fields = parse_request_json(raw)
    except TextError as error:
        message = f"the body is not valid JSON: {error}" if error.at is None else str(error)
        raise BodyError(message, error.at, "invalid_json") from error
    if not isinstance(fields, dict):
        raise BodyError(f"a body must be a JSON object; got {type(fields).__name__}", code="invalid_type")
    return fields
