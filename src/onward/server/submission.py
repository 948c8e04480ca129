"""The requests of one body on their way through an engine, and those who wait for the answer."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from onward.engine import Generation
from onward.errors import EngineError
from onward.language_model import Completion
from onward.protocols import BodyError, ParsedBody, ResponseKey
from onward.server.models import ServedModel
from onward.server.resume import AnswerEvents, EventIdFormat, EventWriter, ResumeRequest, emitted_by, idempotency_of


class ActiveRequest:
    """The requests of one body while engines serve them.

    asked: a digest of all that it asks for, where that is compared. clients: who wait for it; several where a body came
    again. is_cut: whether it was cancelled before its end. counted: whether it was counted as ended. tokens: of its
    prompts and texts, once nobody waits.
    """

    def __init__(self, served: ServedModel, body: ParsedBody, asked: str) -> None:
        self.served, self.body, self.asked = served, body, asked
        self.generations: list[Generation] = []
        self.clients: set[Subscriber] = set()
        self.is_cut = self.counted = False
        self.tokens = 0

    def begin(self, emitted: Sequence[Sequence[int]] | None) -> None:
        """Have its requests served. emitted: ids of its texts that are known, those of the first request first."""
        engine = self.served.engine
        try:
            for request, texts in zip(self.body.requests, emitted_by(self.body.requests, emitted), strict=True):
                resumed = texts and request.options.beams == 1
                self.generations.append(engine.resume(request, emitted=texts) if resumed else engine.submit(request))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End all of them with their next step."""
        for generation in self.generations:
            self.is_cut = self.is_cut or not generation.done
            generation.cancel()

    def leave(self, client: "Subscriber") -> None:
        """One of those who wait has left. Where nobody is left, all is cancelled."""
        self.clients.discard(client)
        if not self.clients:
            self.cancel()

    def completion(self, at: int) -> Completion:
        """Of the request numbered `at`, which has ended. Raises `OnwardError`: what made it fail, or that the server
        ends."""
        completion = self.generations[at].result(0)
        if completion.finish_reason == "cancelled":
            raise EngineError("the server shuts down, and the text was not finished")
        return completion

    def ended(self) -> list[Completion | None]:
        """The completions of its requests; None for one that has failed or goes on."""
        return [_completion_of(generation) for generation in self.generations]

    @property
    def has_failed(self) -> bool:
        """Whether one of them ended with an error."""
        return any(generation.done and _completion_of(generation) is None for generation in self.generations)

    def emitted(self) -> list[list[int]]:
        """The ids of each text so far."""
        return [ids for generation in self.generations for ids in generation.emitted()]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        completions = [completion for completion in self.ended() if completion is not None]
        texts = [text for completion in completions for text in completion.choices]
        facts: dict[str, Any] = {"model": self.body.model, "stream": self.body.stream}
        facts["prompt_tokens"] = sum(completion.prompt_tokens for completion in completions)
        facts["completion_tokens"] = sum(len(text.token_ids) for text in texts)
        ends = {str(text.finish_reason) for text in texts}
        if len(completions) < len(self.generations):
            ends.add("error" if all(generation.done for generation in self.generations) else "cancelled")
        facts["finish"] = sorted(ends)
        return facts

    async def completions(self) -> list[Completion]:
        """Wait for all of them. Where one fails the others are cancelled. Raises `OnwardError`: as `completion`."""
        for generation in self.generations:
            try:
                await generation
            except Exception:
                self.cancel()
                raise
        return [self.completion(at) for at in range(len(self.generations))]


class Subscriber:
    """One of those who wait for a submission.

    handover: what was known of the answer. ids: of its events; None for an answer in one piece.
    """

    def __init__(self, submission: ActiveRequest, handover: ResumeRequest, ids: EventIdFormat | None) -> None:
        self.submission, self.handover, self.ids = submission, handover, ids
        submission.clients.add(self)

    def leave(self) -> None:
        self.submission.leave(self)

    def teller(self, events: AnswerEvents) -> EventWriter:
        """Tells it the answer as a stream."""
        assert self.ids is not None, "a stream has ids"
        known = [len(ids) for ids in self.handover.emitted or ()]
        known = known or [0] * sum(len(track.counts) for track in self.ids.before.tracks)
        return EventWriter(events, self.ids.prefix, self.ids.before, known)


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # whatever made it fail; who waits for it is told
        return None


# The most answers that are kept, and ids of prompts and texts in all of them.
_MOST, _MOST_TOKENS = 1024, 2_000_000
_Entry = TypeVar("_Entry")


class StoredResponse:
    """The answer to what came with an Idempotency-Key.

    key: of the answer; with it the same body gives the same again. submission: None before it has begun. lock: held
    while one looks whether it has.
    """

    def __init__(self, key: ResponseKey) -> None:
        self.key = key
        self.submission: ActiveRequest | None = None
        self.lock = asyncio.Lock()

    @property
    def in_use(self) -> bool:
        return self.lock.locked() or (self.submission is not None and bool(self.submission.clients))

    @property
    def tokens(self) -> int:
        return 0 if self.submission is None else self.submission.tokens


class ResponseStore:
    """The answers that are kept, the oldest first. All of it is the loop's.

    seconds: how long each is kept after it began.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self._cut: OrderedDict[str, tuple[float, list[list[int]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def of(self, name: str, key: ResponseKey) -> StoredResponse:
        """The answer kept under a name; a new one with this key where there is none."""
        self._forget()
        if name not in self._answers:
            self._answers[name] = time.monotonic(), StoredResponse(key)
        return self._answers[name][1]

    def note(self, submission: ActiveRequest) -> None:
        """Nobody waits for it any more. What a stream had emitted when it was cut is kept for who takes it up again."""
        submission.tokens = _count(submission.emitted())
        submission.tokens += sum(len(request.prompt) for request in submission.body.requests)
        if submission.is_cut and submission.body.stream:
            self._cut[submission.body.key.text] = time.monotonic(), submission.emitted()
            self._forget()

    def emitted(self, key: ResponseKey) -> list[list[int]] | None:
        """What a stream that was cut had emitted; None where that is not known."""
        self._forget()
        return self._cut[key.text][1] if key.text in self._cut else None

    def _forget(self) -> None:
        """Drop what is too old, and the oldest where there is too much. What somebody waits for stays."""
        late = time.monotonic() - self._seconds
        _drop_oldest(self._answers, late, lambda answer: answer.tokens, lambda answer: answer.in_use)
        _drop_oldest(self._cut, late, _count, lambda _: False)


def _drop_oldest(
    entries: OrderedDict[str, tuple[float, _Entry]],
    late: float,
    tokens_of: Callable[[_Entry], int],
    is_used: Callable[[_Entry], bool],
) -> None:
    tokens = sum(tokens_of(entry) for _, entry in entries.values())
    for name, (since, entry) in list(entries.items()):
        if since > late and len(entries) <= _MOST and tokens <= _MOST_TOKENS:
            break
        if not is_used(entry):
            tokens -= tokens_of(entry)
            del entries[name]


def _count(emitted: list[list[int]]) -> int:
    return sum(map(len, emitted))


# The most that are remembered.
_MOST_KEYS = 10_000


class IdempotencyKeys:
    """The keys of answers to what came with an Idempotency-Key, of each caller (the header Authorization).

    An answer's key fixes all that is drawn for it, so nothing of the answer has to be kept. seconds: how long a key is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()

    def answer_key(self, headers: Mapping[bytes, bytes], digest: bytes, now: float) -> str:
        """Of the answer to a request with these headers; a new one where it comes first. digest: of all that it asks.
        Raises `BodyError`: another request came under its Idempotency-Key, or that is none."""
        name = idempotency_of(headers)
        if name is None:
            return ResponseKey.new().text
        while self._kept and (
            len(self._kept) >= _MOST_KEYS or now - next(iter(self._kept.values()))[0] > self._seconds
        ):
            self._kept.popitem(last=False)
        _, asked, key = self._kept.setdefault(name, (now, digest, ResponseKey.new().text))
        if asked != digest:
            message = "this Idempotency-Key came with another body before: give each request its own"
            raise BodyError(message, code="idempotency_key_reused", status=422)
        return key
