"""The requests of one body in an engine, their subscribers, and what is remembered of responses."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from onward.engine import Generation
from onward.errors import EngineError, RequestError
from onward.language_model import Completion
from onward.protocols import ParsedBody, ResponseKey
from onward.server.models import ServedModel
from onward.server.resume import EventIdFormat, EventWriter, ResponseEvents, ResumeRequest, idempotency_of, reused_key


class ActiveRequest:
    """The requests of one body while engines serve them. digest: of the body, if it has an Idempotency-Key.
    subscribers: several if the body was repeated. is_cancelled: whether it was cancelled before its end. counted:
    whether the metrics include it. tokens: of its prompts and outputs, once there are no subscribers."""

    def __init__(self, served: ServedModel, body: ParsedBody, digest: str) -> None:
        self.served, self.body, self.digest = served, body, digest
        self.generations: list[Generation] = []
        self.subscribers: set[Subscriber] = set()
        self.is_cancelled = self.counted = False
        self.tokens = 0

    def submit(self, emitted: Sequence[Sequence[int]] | None) -> None:
        """Submit its requests. emitted: known token ids of its sequences, in the order of the requests."""
        engine, requests = self.served.engine, self.body.requests
        count = sum(request.options.n for request in requests)
        if emitted is not None and len(emitted) != count:
            raise RequestError(f"emitted has ids of {len(emitted)} sequences, but the body asks for {count}")
        left = iter(emitted or [()] * count)
        try:
            for request in requests:
                ids = list(islice(left, request.options.n))
                resumed = any(ids) and request.options.beams == 1
                self.generations.append(engine.resume(request, emitted=ids) if resumed else engine.submit(request))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        for generation in self.generations:
            self.is_cancelled = self.is_cancelled or not generation.done
            generation.cancel()

    def completion(self, at: int) -> Completion:
        """The completion of request `at`, which has ended. Raises `OnwardError`: it failed, or the server is shutting
        down."""
        completion = self.generations[at].result(0)
        if completion.finish_reason == "cancelled":
            raise EngineError("the server is shutting down; the response is incomplete")
        return completion

    def completed(self) -> list[Completion | None]:
        """The completions of its requests; None for one that failed or is running."""
        return list(map(_completion_of, self.generations))

    @property
    def has_failed(self) -> bool:
        """Whether one of its requests ended with an error."""
        return any(generation.done and _completion_of(generation) is None for generation in self.generations)

    def emitted(self) -> list[list[int]]:
        """The token ids of each sequence so far."""
        return [ids for generation in self.generations for ids in generation.emitted()]

    def log_fields(self) -> dict[str, Any]:
        completions = [completion for completion in self.completed() if completion is not None]
        choices = [choice for completion in completions for choice in completion.choices]
        reasons = {str(choice.finish_reason) for choice in choices}
        if len(completions) < len(self.generations):
            reasons.add("error" if all(generation.done for generation in self.generations) else "cancelled")
        return {
            "model": self.body.model,
            "stream": self.body.stream,
            "prompt_tokens": sum(completion.prompt_tokens for completion in completions),
            "completion_tokens": sum(len(choice.token_ids) for choice in choices),
            "finish": sorted(reasons),
        }

    async def completions(self) -> list[Completion]:
        """Wait for all of them. If one fails, the others are cancelled. Raises `OnwardError`: as `completion`."""
        for generation in self.generations:
            try:
                await generation
            except Exception:
                self.cancel()
                raise
        return [self.completion(at) for at in range(len(self.generations))]


class Subscriber:
    """A client's interest in a request, which is cancelled when the last one leaves. resume: what the client had
    before. ids: of its events; None for a response that is not a stream."""

    def __init__(self, request: ActiveRequest, resume: ResumeRequest, ids: EventIdFormat | None) -> None:
        self.request, self.resume, self.ids = request, resume, ids
        request.subscribers.add(self)

    def leave(self) -> None:
        self.request.subscribers.discard(self)
        if not self.request.subscribers:
            self.request.cancel()

    def writer(self, events: ResponseEvents) -> EventWriter:
        assert self.ids is not None, "a stream has ids"
        known = [len(ids) for ids in self.resume.emitted or ()]
        known = known or [0] * sum(len(request.counts) for request in self.ids.before.requests)
        return EventWriter(events, self.ids.prefix, self.ids.before, known)


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # of any kind; subscribers get it
        return None


# Limits of a `ResponseStore`: entries, and token ids in all of them. `IdempotencyKeys`: entries.
_MAX_RESPONSES, _MAX_TOKENS, _MAX_KEYS = 1024, 2_000_000, 10_000
_Entry = TypeVar("_Entry")


@dataclass(eq=False)
class StoredResponse:
    """The response to requests with one Idempotency-Key. key: of the response; with it, the same body gives the same
    response. request: None before it was submitted. lock: taken while a repetition checks that."""

    key: ResponseKey
    request: ActiveRequest | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def in_use(self) -> bool:
        return self.lock.locked() or (self.request is not None and bool(self.request.subscribers))

    def tokens(self) -> int:
        return 0 if self.request is None else self.request.tokens


class ResponseStore:
    """Responses for repeated and resumed requests, the oldest first. Use it in the event loop's thread only. seconds:
    how long each is stored after it started."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self._cancelled: OrderedDict[str, tuple[float, list[list[int]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, name: str, key: ResponseKey) -> StoredResponse:
        """The response stored under a name; if there is none, a new one with this key."""
        self._evict()
        if name not in self._responses:
            self._responses[name] = time.monotonic(), StoredResponse(key)
        return self._responses[name][1]

    def store(self, request: ActiveRequest) -> None:
        """Account for a request without subscribers. If it is a cancelled stream, store its token ids for resuming."""
        request.tokens = _count(request.emitted()) + sum(len(each.prompt) for each in request.body.requests)
        if request.is_cancelled and request.body.stream:
            self._cancelled[request.body.key.text] = time.monotonic(), request.emitted()
            self._evict()

    def emitted(self, key: ResponseKey) -> list[list[int]] | None:
        """The token ids of a cancelled stream, if they are stored."""
        self._evict()
        return self._cancelled[key.text][1] if key.text in self._cancelled else None

    def _evict(self) -> None:
        """Drop expired entries, then the oldest while a limit is exceeded; except those in use."""
        expired = time.monotonic() - self._seconds
        _drop_oldest(self._responses, expired, StoredResponse.tokens, StoredResponse.in_use)
        _drop_oldest(self._cancelled, expired, _count)


def _drop_oldest(
    entries: OrderedDict[str, tuple[float, _Entry]],
    expired: float,
    tokens_of: Callable[[_Entry], int],
    in_use: Callable[[_Entry], bool] = lambda _: False,
) -> None:
    tokens = sum(tokens_of(entry) for _, entry in entries.values())
    for name, (since, entry) in list(entries.items()):
        if since > expired and len(entries) <= _MAX_RESPONSES and tokens <= _MAX_TOKENS:
            break
        if not in_use(entry):
            tokens -= tokens_of(entry)
            del entries[name]


def _count(emitted: list[list[int]]) -> int:
    return sum(map(len, emitted))


class IdempotencyKeys:
    """The response keys of each caller's Idempotency-Keys. seconds: how long one is stored. A response key determines
    the whole response, so nothing else has to be stored."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()

    def response_key(self, headers: Mapping[bytes, bytes], digest: bytes, now: float) -> str:
        """The response key for a request with these headers. digest: of all that it asks for. Raises `BodyError`: the
        Idempotency-Key is invalid, or was used with another request."""
        name = idempotency_of(headers)
        if name is None:
            return ResponseKey.new().text
        entries = self._entries
        while entries and (len(entries) >= _MAX_KEYS or now - next(iter(entries.values()))[0] > self._seconds):
            entries.popitem(last=False)
        _, known, key = entries.setdefault(name, (now, digest, ResponseKey.new().text))
        if known != digest:
            raise reused_key()
        return key
