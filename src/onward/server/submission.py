"""The requests of one body in an engine, their subscribers, and the store of past responses."""

import asyncio
import contextlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from onward.decoding.speculation import Speculation
from onward.engine import Generation
from onward.errors import EngineError, OnwardError, RequestError
from onward.language_model import Completion
from onward.protocols import ParsedBody, ResponseEvents, ResponseKey
from onward.server.memory import MemoryBudget, MemoryFullError, Reservation
from onward.server.models import ServedModel
from onward.server.resume import EventIdFormat, EventWriter, ResumeRequest, idempotency_of, reused_key


class ActiveRequest:
    """The requests of one body while an engine serves them.

    digest: of the body, if it has an Idempotency-Key. name: the key of its stored response, if any. subscribers: more
    than one if the body was repeated. is_cancelled: whether it was cancelled before its end. counted: whether the
    metrics include it. usage: of the stored response that it repeats, if any. memory: reserved for its response.
    """

    def __init__(self, served: ServedModel, body: ParsedBody, digest: str, name: str | None) -> None:
        self.served, self.body, self.digest, self.name = served, body, digest, name
        self.generations: list[Generation] = []
        self.subscribers: set[Subscriber] = set()
        self.is_cancelled = self.counted = False
        self.usage: Sequence[Usage] = ()
        self.memory: Reservation | None = None
        self._error: OnwardError | None = None

    def submit(self, emitted: Sequence[Sequence[int]] | None, client: str | None) -> None:
        """Submit its requests for a client. emitted: known token ids of its sequences, in the order of the requests."""
        engine, requests = self.served.engine, self.body.requests
        count = sum(request.options.n for request in requests)
        if emitted is not None and len(emitted) != count:
            raise RequestError(f"emitted has ids of {len(emitted)} sequences, but the body asks for {count}")
        left = iter(emitted or [()] * count)
        try:
            for request in requests:
                ids = list(islice(left, request.options.n))
                resumed = any(ids) and request.options.beams == 1
                if resumed:
                    self.generations.append(engine.resume(request, emitted=ids, client=client))
                else:
                    self.generations.append(engine.submit(request, client=client))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        for generation in self.generations:
            self.is_cancelled = self.is_cancelled or not generation.done
            generation.cancel()

    def fail(self, error: OnwardError) -> None:
        """Cancel it, and report an error."""
        self._error = self._error or error
        self.cancel()

    @property
    def nbytes(self) -> int:
        """An estimate of the bytes of its ids, pieces and completions."""
        return sum(map(_nbytes, self.generations))

    def completion(self, at: int) -> Completion:
        """The completion of request `at`, which has ended. Raises `OnwardError`: it failed, or the server is shutting
        down."""
        completion = self.generations[at].result(0)
        if self._error is not None:
            raise self._error
        if at < len(self.usage):
            return self.usage[at].put_into(completion)
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
            **({"ignored": list(self.body.ignored)} if self.body.ignored else {}),
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
    """A client that waits for a request. When the last one leaves, the request is cancelled. resume: the part that the
    client already has. ids: of its events; None for a response that is not a stream."""

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


# Bytes of a token in pieces and completions, and of each alternative in its logprobs (measured).
_TOKEN, _ALTERNATIVE = 400, 170


def _nbytes(generation: Generation) -> int:
    options = generation.request.options
    alternatives, of_prompt = (0 if top is None else top + 1 for top in (options.logprobs, options.prompt_logprobs))
    nbytes = generation.tokens * (_TOKEN + alternatives * _ALTERNATIVE)
    return nbytes + len(generation.request.prompt) * of_prompt * _ALTERNATIVE


@dataclass(frozen=True)
class Usage:
    """The counts of a completion that depend on how it was computed."""

    cached_tokens: int
    speculation: tuple[Speculation | None, ...]

    @classmethod
    def of(cls, completion: Completion) -> Self:
        return cls(completion.cached_tokens, tuple(choice.speculation for choice in completion.choices))

    def put_into(self, completion: Completion) -> Completion:
        first, *others = (
            replace(choice, speculation=speculation, cached_tokens=self.cached_tokens, others=[])
            for choice, speculation in zip(completion.choices, self.speculation, strict=True)
        )
        return replace(first, others=others)


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # of any kind; subscribers get it
        return None


# Limits of a `ResponseStore`: entries, and the share of the memory of requests. `IdempotencyKeys`: entries.
_MAX_RESPONSES, _SHARE, _MAX_KEYS = 1024, 1 / 32, 10_000
_ENTRY = 1024  # bytes of an entry without its ids


@dataclass(eq=False)
class StoredResponse:
    """A record of a response, for requests that repeat or resume it. key: with it, the same body gives the same
    response. digest: of the body. request: while it has subscribers. emitted: afterwards, the token ids of its
    sequences. usage: of its completions, if all have ended. lock: held while a repetition checks the record."""

    key: ResponseKey
    digest: str = ""
    request: ActiveRequest | None = None
    emitted: "Sequence[array[int]] | None" = None
    usage: Sequence[Usage] = ()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin(self, request: ActiveRequest) -> None:
        self.digest, self.request = request.digest, request

    def end(self, request: ActiveRequest) -> None:
        """Keep the ids of a request without subscribers."""
        self.request, self.emitted = None, [array("i", ids) for ids in request.emitted()]
        completions = [completion for completion in request.completed() if completion is not None]
        is_whole = len(completions) == len(request.generations) and not request.is_cancelled
        self.usage = request.usage or (list(map(Usage.of, completions)) if is_whole else ())

    @property
    def in_use(self) -> bool:
        return self.lock.locked() or self.request is not None

    @property
    def nbytes(self) -> int:
        return _ENTRY + sum(map(len, self.emitted or ())) * array("i").itemsize


class ResponseStore:
    """Responses for repeated and resumed requests, the oldest first. Use it in the event loop's thread only. seconds:
    how long each is stored after it started. memory: of the server; responses take a small share of it."""

    def __init__(self, seconds: float, memory: MemoryBudget) -> None:
        self._seconds, self._memory = seconds, memory.reservation("")
        self._limit = int(_SHARE * memory.limit)
        self._responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, name: str, key: ResponseKey) -> StoredResponse:
        """The response stored under a name; if there is none, a new one with this key."""
        self._evict()
        if name not in self._responses:
            self._responses[name] = time.monotonic(), StoredResponse(key)
        return self._responses[name][1]

    def store(self, request: ActiveRequest) -> None:
        """Store a request without subscribers: one with an Idempotency-Key, or a stream that was cancelled."""
        name, key = request.name, request.body.key
        if name is None and request.is_cancelled and request.body.stream:
            self._responses.pop(key.text, None)
            self.get(key.text, key).end(request)
        elif name is not None and name in self._responses and (stored := self._responses[name][1]).request is request:
            stored.end(request)
        self._evict()

    def emitted(self, key: ResponseKey) -> Sequence[Sequence[int]] | None:
        """The token ids of a cancelled stream, if they are stored."""
        self._evict()
        return self._responses[key.text][1].emitted if key.text in self._responses else None

    def _evict(self) -> None:
        """Drop expired entries, then the oldest while a limit is exceeded; except those in use."""
        expired = time.monotonic() - self._seconds
        nbytes = sum(stored.nbytes for _, stored in self._responses.values())
        for name, (since, stored) in list(self._responses.items()):
            if since > expired and len(self._responses) <= _MAX_RESPONSES and nbytes <= self._limit:
                break
            if not stored.in_use:
                nbytes -= stored.nbytes
                del self._responses[name]
        with contextlib.suppress(MemoryFullError):  # the share is small
            self._memory.resize(nbytes)


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
