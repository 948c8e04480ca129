"""The requests of one body in an engine, the clients that wait for them, and the records of past responses."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from onward.decoding.speculation import Speculation
from onward.engine import Engine, Generation
from onward.errors import EngineError, OnwardError, RequestError
from onward.language_model import Completion
from onward.protocols import BodyError, ParsedBody, ResponseKey
from onward.server.client import Client, MemoryBudget, MemoryFullError
from onward.server.resume import digest_of


class ActiveRequest:
    """The requests of one body while an engine serves them.

    model: its name in requests. prefix: of its events' ids; "" without ids. name: the key of its stored response, if
    any. digest: of the body, if it has a name. subscribers: those that wait for it: clients, several if the body was
    repeated, or the background. is_cancelled: whether it was cancelled before its end. counted: whether the metrics
    include it. usage: of the stored response that it repeats, if any. memory: reserved for its response.
    """

    def __init__(
        self, model: str, engine: Engine, body: ParsedBody, client: Client, prefix: str = "", name: str | None = None
    ) -> None:
        self.model, self.engine, self.body, self.prefix, self.name = model, engine, body, prefix, name
        self.digest = "" if name is None else digest_of(body)
        self.generations: list[Generation] = []
        self.subscribers: set[object] = set()
        self.is_cancelled = self.counted = False
        self.usage: Sequence[Usage] = ()
        self.memory = client.new_reservation()
        self._client = client.name or None
        self._error: OnwardError | None = None

    def submit(self, emitted: Sequence[Sequence[int]] | None) -> "ActiveRequest":
        """Submit its requests. emitted: known token ids of its texts, in the order of the requests."""
        engine, requests = self.engine, self.body.requests
        count = sum(request.options.n for request in requests)
        if emitted is not None and len(emitted) != count:
            raise RequestError(f"emitted has ids of {len(emitted)} sequences, but the body asks for {count}")
        left = iter(emitted or [()] * count)
        try:
            for request in requests:
                ids = list(islice(left, request.options.n))
                if any(ids) and request.options.beams == 1:
                    self.generations.append(engine.resume(request, emitted=ids, client=self._client))
                else:
                    self.generations.append(engine.submit(request, client=self._client))
        except BaseException:
            self.cancel()
            raise
        return self

    def leave(self, client: object) -> None:
        """A client no longer waits. When the last one leaves, the request is cancelled."""
        self.subscribers.discard(client)
        if not self.subscribers:
            self.cancel()

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
            return _with_usage(completion, self.usage[at])
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


# Bytes of a token in pieces and completions, and of each alternative in its logprobs (measured).
_TOKEN, _ALTERNATIVE = 400, 170


def _nbytes(generation: Generation) -> int:
    options = generation.request.options
    alternatives, of_prompt = (0 if top is None else top + 1 for top in (options.logprobs, options.prompt_logprobs))
    nbytes = generation.tokens * (_TOKEN + alternatives * _ALTERNATIVE)
    return nbytes + len(generation.request.prompt) * of_prompt * _ALTERNATIVE


class Usage(NamedTuple):
    """The counts of a completion that depend on how it was computed. speculation: of each text."""

    cached_tokens: int
    speculation: tuple[Speculation | None, ...]


def _with_usage(completion: Completion, usage: Usage) -> Completion:
    first, *others = (
        replace(choice, speculation=speculation, cached_tokens=usage.cached_tokens, others=[])
        for choice, speculation in zip(completion.choices, usage.speculation, strict=True)
    )
    return replace(first, others=others)


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # of any kind; subscribers get it
        return None


# Limits of a `ReplayRecords`: entries, and the share of the memory of requests.
_MAX_RECORDS, _SHARE = 10_000, 1 / 32
_ENTRY = 1024  # bytes of an entry without its ids


@dataclass(eq=False)
class ReplayRecord:
    """A record of a response, for requests that repeat or resume it. key: with it, the same body gives the same
    response. digest: of the body. bits: as in the first body, for receipts. request: while it has subscribers. emitted:
    afterwards, the token ids of its texts. usage: of its completions, if all have ended. lock: held while a repetition
    checks the record."""

    key: ResponseKey
    digest: str = ""
    bits: tuple[int, str] | None = None
    request: ActiveRequest | None = None
    emitted: "Sequence[array[int]] | None" = None
    usage: Sequence[Usage] = ()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    since: float = field(default_factory=lambda: time.monotonic())

    def check(self, digest: str) -> None:
        """Raise `BodyError` if it belongs to another body."""
        if self.digest not in ("", digest):
            message = "this Idempotency-Key was used with another body: use a new key"
            raise BodyError(message, code="idempotency_key_reused", status=422)

    def end(self, request: ActiveRequest) -> None:
        """Keep the ids of a request without subscribers."""
        self.request, self.emitted = None, [array("i", ids) for ids in request.emitted()]
        whole = [each for each in request.completed() if each is not None and not request.is_cancelled]
        usage = [Usage(each.cached_tokens, tuple(choice.speculation for choice in each.choices)) for each in whole]
        self.usage = request.usage or (usage if len(usage) == len(request.generations) else ())

    @property
    def in_use(self) -> bool:
        return self.lock.locked() or self.request is not None

    @property
    def nbytes(self) -> int:
        return _ENTRY + sum(map(len, self.emitted or ())) * array("i").itemsize


class ReplayRecords:
    """Records of responses for repeated and resumed requests, in a server and in an ingress. They hold ids, no pieces.
    Use it in the event loop's thread only. seconds: how long each is stored after it started. memory: of all requests;
    records take a small share of it."""

    def __init__(self, seconds: float, memory: MemoryBudget) -> None:
        self._seconds, self._memory = seconds, memory.reservation("")
        self._limit = int(_SHARE * memory.limit)
        self._records: dict[str, ReplayRecord] = {}  # the oldest first
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str, key: ResponseKey) -> ReplayRecord:
        """The response stored under a name; if there is none, a new one with this key."""
        self._evict()
        if name not in self._records:
            stored = self._records[name] = ReplayRecord(key)
            self._nbytes += stored.nbytes
        return self._records[name]

    def add(self, request: ActiveRequest) -> None:
        """Record a request without subscribers: one with an Idempotency-Key, or a stream with event ids that was
        cancelled."""
        name, key = request.name, request.body.key.text
        if name is None and request.is_cancelled and request.prefix:
            self._drop(key)
            self._end(self.get(key, request.body.key), request)
        elif name is not None and name in self._records and self._records[name].request is request:
            self._end(self._records[name], request)
        self._evict()

    def emitted(self, key: ResponseKey) -> Sequence[Sequence[int]] | None:
        """The token ids of a cancelled stream, if they are stored."""
        self._evict()
        return self._records[key.text].emitted if key.text in self._records else None

    def _end(self, stored: ReplayRecord, request: ActiveRequest) -> None:
        self._nbytes -= stored.nbytes
        stored.end(request)
        self._nbytes += stored.nbytes

    def _drop(self, name: str) -> None:
        if (stored := self._records.pop(name, None)) is not None:
            self._nbytes -= stored.nbytes

    def _evict(self) -> None:
        """Drop expired entries, then the oldest while a limit is exceeded; except those in use."""
        expired, count, nbytes = time.monotonic() - self._seconds, len(self), self._nbytes
        dropped: list[str] = []
        for name, stored in self._records.items():
            if stored.since > expired and count <= _MAX_RECORDS and nbytes <= self._limit:
                break
            if not stored.in_use:
                dropped.append(name)
                count, nbytes = count - 1, nbytes - stored.nbytes
        for name in dropped:
            self._drop(name)
        with contextlib.suppress(MemoryFullError):  # the share is small
            self._memory.resize(self._nbytes)
