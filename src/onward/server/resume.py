"""Resumed responses: the position of a stream that was started before, here or on another server, and event ids.

Every event of a stream has an id:

    <response key: 32 digits>.<body digest: 8>.<engine fingerprint digest: 8>.<position in the stream>

A client whose stream broke sends the same body with the last id as the header `Last-Event-ID`, to any server of the
same model, and gets the events after it. A caller in the same process, such as an ingress, sets `scope["onward"]` to a
dict instead of sending headers:

    answer: the key (`ResponseKey.new().text`). emitted: the known token ids of each sequence, in the order of the
        body's requests; they are not decoded again. last_event_id: events up to this one are not sent again.

Each message of a stream's body then has an entry of the same name, {"emitted": [[…], …], "id": …}: the token ids of
each sequence since the previous message, and the id of the last event.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Self

from starlette.types import Scope

from onward.errors import OnwardError, RequestError
from onward.language_model import Completion, Piece
from onward.protocols import BodyError, ParsedBody, ResponseEvents, ResponseKey

_POSITION = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*(?:\+[0-9]{1,9})?")


@dataclass
class RequestPosition:
    """A position in the events of one request. counts: complete pieces of each sequence. extra: events since the last
    complete piece, or that belong to no piece."""

    counts: list[int]
    extra: int = 0

    def __str__(self) -> str:
        return ",".join(map(str, self.counts)) + (f"+{self.extra}" if self.extra else "")

    @classmethod
    def of(cls, text: str) -> Self:
        counts, _, extra = text.partition("+")
        return cls(list(map(int, counts.split(","))), int(extra or 0))

    def latest(self, other: "RequestPosition") -> "RequestPosition":
        """The later position for each sequence: either may be ahead in one and behind in another."""
        counts = list(map(max, self.counts, other.counts))
        extras = [position.extra for position in (self, other) if position.counts == counts]
        return RequestPosition(counts, max(extras, default=self.extra))

    @property
    def order(self) -> tuple[int, int]:
        """Increases with every event that completes no piece."""
        return sum(self.counts), self.extra


class StreamPosition:
    """A position in a stream. requests: the position in each. trailing: events after the last request's end."""

    def __init__(self, requests: Sequence[RequestPosition], trailing: int = 0) -> None:
        self.requests, self.trailing = requests, trailing

    @classmethod
    def start(cls, sequences: Sequence[int]) -> Self:
        """The beginning of a stream. sequences: the number for each request."""
        return cls([RequestPosition([0] * count) for count in sequences])

    @classmethod
    def of(cls, text: str, sequences: Sequence[int]) -> Self | None:
        """Parse the output of `str`; None for any text that isn't one for these numbers of sequences."""
        requests, _, trailing = text.partition("/")
        positions = requests.split(";")
        if not all(map(_POSITION.fullmatch, positions)) or not re.fullmatch("[0-9]{0,9}", trailing):
            return None
        position = cls(list(map(RequestPosition.of, positions)), int(trailing or 0))
        return position if [len(request.counts) for request in position.requests] == list(sequences) else None

    def __str__(self) -> str:
        return ";".join(map(str, self.requests)) + (f"/{self.trailing}" if self.trailing else "")


class EventWriter:
    """Writes events with their ids, except those that were sent before. events: formats the response. prefix: of every
    event id. before: the position that the client has already received. known: how many token ids of each sequence the
    caller knows."""

    def __init__(self, events: ResponseEvents, prefix: str, before: StreamPosition, known: Sequence[int]) -> None:
        self._events, self._prefix, self._before = events, prefix, before
        self._position = StreamPosition.start([len(request.counts) for request in before.requests])
        self._is_new = str(before) == str(self._position)  # nothing was sent before
        self._opening = [0] * len(before.requests)  # events of each request before its first piece
        self._unknown = list(known)  # ids of each sequence that are still to come before those to report
        self._emitted: list[list[int]] = [[] for _ in known]

    @property
    def id(self) -> str:
        """The id of the last event that was sent, now or before."""
        position, before = self._position, self._before
        if not self._is_new:
            requests = [now.latest(old) for now, old in zip(position.requests, before.requests, strict=True)]
            position = StreamPosition(requests, max(position.trailing, before.trailing))
        return f"{self._prefix}{position}"

    def begin(self) -> list[str]:
        events: list[str] = []
        for at, request in enumerate(self._position.requests):
            events += self._extra(at, self._events.begin(at))
            self._opening[at] = request.extra
        return events

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """Write new pieces of request `at`, sequence by sequence."""
        if len(pieces) == 1 or len(self._position.requests[at].counts) == 1:
            return self._sequence(at, pieces)
        runs = groupby(sorted(pieces, key=lambda piece: piece.choice), key=lambda piece: piece.choice)
        return [event for _, run in runs for event in self._sequence(at, list(run))]

    def end(self, at: int, completion: Completion) -> list[str]:
        return self._extra(at, self._events.end(at, completion))

    def finish(self) -> list[str]:
        events: list[str] = []
        for event in self._events.finish():
            self._position.trailing += 1
            if self._position.trailing > self._before.trailing:
                events.append(self._with_id(event))
        return events

    def error(self, error: OnwardError) -> list[str]:
        """Write an error, without an id: the client may still resume from the last event."""
        return self._events.error(error)

    def emitted(self) -> list[list[int]]:
        """The token ids of each sequence since the last call."""
        emitted, self._emitted = self._emitted, [[] for _ in self._emitted]
        return emitted

    def _sequence(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """Write pieces of one sequence. Those that were sent before are formatted apart from the others."""
        choice = pieces[0].choice
        now, before = self._position.requests[at], self._before.requests[at]
        self._report(at, choice, pieces)
        old = max(0, before.counts[choice] - now.counts[choice])
        batches = [[piece] for piece in pieces] if self._events.per_piece else [pieces[:old], pieces[old:]]
        events: list[str] = []
        for batch in batches:
            first = now.counts[choice]
            for complete, event in self._events.pieces(at, batch) if batch else ():
                if first + complete > now.counts[choice]:
                    now.counts[choice], now.extra = first + complete, self._opening[at]
                    is_new = now.counts[choice] > before.counts[choice]
                else:
                    now.extra += 1
                    is_new = now.order > before.order
                if is_new:
                    events.append(self._with_id(event))
            if now.counts[choice] < first + len(batch):
                now.counts[choice], now.extra = first + len(batch), self._opening[at]
        return events

    def _extra(self, at: int, events: Sequence[str]) -> list[str]:
        """Write events that belong to no piece."""
        now, before = self._position.requests[at], self._before.requests[at]
        new: list[str] = []
        for event in events:
            now.extra += 1
            if now.order > before.order:
                new.append(self._with_id(event))
        return new

    def _with_id(self, event: str) -> str:
        return f"id: {self.id}\n{event}"

    def _report(self, at: int, choice: int, pieces: Sequence[Piece]) -> None:
        sequence = sum(len(request.counts) for request in self._position.requests[:at]) + choice
        known = min(self._unknown[sequence], len(pieces))
        self._unknown[sequence] -= known
        self._emitted[sequence] += [piece.token_id for piece in pieces[known:]]


_IDEMPOTENCY_KEY = re.compile(rb"[!-~]{1,255}")
_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9,;+/]{1,16384})")


@dataclass(frozen=True)
class ResumeRequest:
    """What a request says about a response that may have been started before. key: of the response. emitted: token ids
    of its sequences that the caller knows, if any. last_event_id: the last event that the client has. reports: whether
    messages report token ids. idempotency: see `idempotency_of`."""

    key: ResponseKey
    emitted: Sequence[Sequence[int]] | None = None
    last_event_id: str | None = None
    reports: bool = False
    idempotency: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> "ResumeRequest":
        """Read the scope of a request. Raises `BodyError`: a header is invalid. Raises `RequestError`: an entry of
        `scope["onward"]` is unknown."""
        entry: Mapping[str, Any] | None = scope.get("onward")
        if entry is not None:
            if unknown := set(entry) - {"answer", "emitted", "last_event_id"}:
                raise RequestError(f"scope['onward'] has answer, emitted and last_event_id; got {min(unknown)!r}")
            key = ResponseKey(entry["answer"]) if "answer" in entry else ResponseKey.new()
            return cls(key, entry.get("emitted"), entry.get("last_event_id"), reports=True)
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        idempotency = idempotency_of(headers)
        if not (last := headers.get(b"last-event-id", b"").decode("latin-1")):
            return cls(ResponseKey.new(), idempotency=idempotency)
        return cls(ResponseKey(_parse_event_id(last)[0]), last_event_id=last, idempotency=idempotency)


@dataclass(frozen=True)
class EventIdFormat:
    """The ids of a stream's events. prefix: of all of them. before: the position that the client already has."""

    prefix: str
    before: StreamPosition

    @classmethod
    def of(cls, body: ParsedBody, fingerprint: str, last_event_id: str | None) -> "EventIdFormat":
        """fingerprint: of the engine. Raises `BodyError`: the id belongs to another body or another engine."""
        body_digest, engine_digest = digest_of(body), _digest(fingerprint.encode())
        prefix = f"{body.key.text}.{body_digest}.{engine_digest}."
        sequences = [request.options.n for request in body.requests]
        if last_event_id is None:
            return cls(prefix, StreamPosition.start(sequences))
        _, other_body, other_engine, position = _parse_event_id(last_event_id)
        before = StreamPosition.of(position, sequences)
        if other_body != body_digest or before is None:
            message = "Last-Event-ID belongs to another body, or to a server with other defaults: send the same body"
            raise BodyError(f"{message}, or remove the header", code="last_event_id_mismatch", status=422)
        if other_engine != engine_digest:
            message = "Last-Event-ID belongs to a stream of another model, build or processor, which this server cannot"
            message += " continue with identical text: remove the header to get a new response"
            raise BodyError(message, code="fingerprint_mismatch", status=409)
        return cls(prefix, before)


def idempotency_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The Idempotency-Key, made unique to its caller (the header Authorization); None without one. Raises `BodyError`:
    the key is invalid."""
    key = headers.get(b"idempotency-key")
    if key is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        message = "Idempotency-Key must be 1 to 255 visible ASCII characters"
        raise BodyError(message, code="invalid_idempotency_key")
    caller = hashlib.blake2b(headers.get(b"authorization", b""), digest_size=8).hexdigest()
    return f"{caller} {key.decode()}"


def reused_key(message: str = "this Idempotency-Key was used with another body: use a new key") -> BodyError:
    return BodyError(message, code="idempotency_key_reused", status=422)


def _parse_event_id(event_id: str) -> tuple[str, str, str, str]:
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        shown = event_id if len(event_id) <= 80 else f"{event_id[:79]}…"
        message = f"Last-Event-ID must be the id of an event that this API sent; got {shown!r}"
        raise BodyError(message, code="invalid_last_event_id")
    key, body, engine, position = match.groups()
    return key, body, engine, position


def digest_of(body: ParsedBody) -> str:
    """A digest of all that a body asks for, including the server's defaults."""
    requests = []
    for request in body.requests:
        names = [field.name for field in fields(request.options) if field.name != "draft"]  # drafts don't change text
        requests.append((request.prompt, [f"{name}={getattr(request.options, name)!r}" for name in names]))
    return _digest(json.dumps([body.kind, body.model, body.fields, requests], sort_keys=True, default=repr).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
