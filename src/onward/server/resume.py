"""Resumed streams: event ids, and the events that a client already has.

Every event of a stream of one text has an id:

    <response key: 32 digits>.<body digest: 8>.<engine fingerprint digest: 8>.<position in the text>

A client whose stream broke sends the same body with the last id as the header `Last-Event-ID`, to any server of the
same model, and gets the events after it. Streams of several texts (n, several prompts) have no ids.

A caller in the same process, such as an ingress, can resume any stream. It sets `scope["onward"]` to a dict:

    answer: the key (`ResponseKey.new().text`). emitted: the known token ids of each text, in the order of the body's
        requests; they are neither decoded nor sent again. ended: the requests, by their place in the body, whose ends
        it has. last_event_id: as the header.

Each message of a stream's body then has an entry of the same name, {"emitted": [[…], …], "ended": […]}: the token ids
of each text and the requests that ended since the previous message.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, Self

from starlette.types import Scope

from onward.errors import OnwardError, RequestError
from onward.language_model import Completion, Piece
from onward.protocols import BodyError, ParsedBody, ResponseEvents, ResponseKey
from onward.server.client import api_key_of


class StreamPosition(NamedTuple):
    """A position in the events of one text. pieces: complete ones. partial: events since then."""

    pieces: int = 0
    partial: int = 0

    def __str__(self) -> str:
        return f"{self.pieces}+{self.partial}" if self.partial else str(self.pieces)

    @classmethod
    def parse(cls, event_id: str, prefix: str) -> Self:
        """The position in an event id. prefix: of the stream's ids; "" if it has none. Raises `BodyError`: the id
        belongs to another body or another engine."""
        *ids, pieces, partial = _parts_of(event_id)
        if not prefix or prefix.split(".")[1] != ids[1]:
            message = "Last-Event-ID belongs to another body, or to a server with other defaults: send the same body"
            raise BodyError(f"{message}, or remove the header", code="last_event_id_mismatch", status=422)
        if prefix.split(".")[2] != ids[2]:
            message = "Last-Event-ID belongs to a stream of another model, build or processor, which this server cannot"
            message += " continue with identical text: remove the header to get a new response"
            raise BodyError(message, code="fingerprint_mismatch", status=409)
        return cls(int(pieces), int(partial or 0))


@dataclass(frozen=True)
class ResumeRequest:
    """What a request says about a response that may have been started before.

    key: of the response. emitted: token ids of its texts that the caller has, if any. ended: requests whose ends it
    has. last_event_id: the last event that the client has. idempotency: see `idempotency_of`.
    """

    key: ResponseKey
    emitted: Sequence[Sequence[int]] | None = None
    ended: Collection[int] = ()
    last_event_id: str | None = None
    idempotency: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> "ResumeRequest":
        """Read the scope of a request. Raises `BodyError`: a header is invalid. Raises `RequestError`: an entry of
        `scope["onward"]` is unknown."""
        entry: Mapping[str, Any] | None = scope.get("onward")
        if entry is not None:
            if unknown := set(entry) - {"answer", "emitted", "ended", "last_event_id"}:
                message = f"scope['onward'] has answer, emitted, ended and last_event_id; got {min(unknown)!r}"
                raise RequestError(message)
            key = ResponseKey(entry["answer"]) if "answer" in entry else ResponseKey.new()
            return cls(key, **{name: value for name, value in entry.items() if name != "answer"})
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        last = headers.get(b"last-event-id", b"").decode("latin-1") or None
        key = ResponseKey.new() if last is None else ResponseKey(_parts_of(last)[0])
        return cls(key, last_event_id=last, idempotency=idempotency_of(headers))


class EventWriter:
    """Writes the events of a stream, except those that were sent before. events: formats them. prefix: of their ids;
    "" for none. resume: what was sent before."""

    def __init__(self, events: ResponseEvents, body: ParsedBody, prefix: str, resume: ResumeRequest) -> None:
        self._events, self._prefix, self._resume = events, prefix, resume
        self._texts = list(pairwise(accumulate((request.options.n for request in body.requests), initial=0)))
        self._emitted: list[list[int]] = [[] for _ in range(self._texts[-1][1])]  # to report
        self._ended: list[int] = []  # to report
        self._known = [len(ids) for ids in resume.emitted or self._emitted]
        last = resume.last_event_id
        sent = StreamPosition() if last is None else StreamPosition.parse(last, prefix)
        self._sent = [max(sent, StreamPosition(known)) for known in self._known]
        self._now = [StreamPosition()] * len(self._emitted)

    def begin(self) -> list[str]:
        texts = enumerate(self._texts)
        new = [event for at, (first, _) in texts for event in self._other_events(first, self._events.begin(at))]
        return new if self._resume.emitted is None else []

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """Write new pieces of request `at`, text by text."""
        first, end = self._texts[at]
        if len(pieces) == 1 or end - first == 1:
            return self._text(at, first + pieces[0].choice, pieces)
        runs = groupby(sorted(pieces, key=lambda piece: piece.choice), key=lambda piece: piece.choice)
        return [event for choice, run in runs for event in self._text(at, first + choice, list(run))]

    def end(self, at: int, completion: Completion) -> list[str]:
        new = self._other_events(self._texts[at][0], self._events.end(at, completion))
        if at in self._resume.ended:
            return []
        self._ended.append(at)
        return new

    def finish(self) -> list[str]:
        return self._other_events(0, self._events.finish())

    def error(self, error: OnwardError) -> list[str]:
        """Write an error, without an id: the client may still resume from the last event."""
        return self._events.error(error)

    def report(self) -> dict[str, Any]:
        """The token ids of each text, and the requests that ended, since the last call."""
        emitted, self._emitted = self._emitted, [[] for _ in self._emitted]
        ended, self._ended = self._ended, []
        return {"emitted": emitted, "ended": ended}

    def _text(self, at: int, text: int, pieces: Sequence[Piece]) -> list[str]:
        """Write pieces of one text. Those that were sent before are formatted apart from the others."""
        count = self._now[text].pieces
        self._emitted[text] += [piece.token_id for piece in pieces[max(0, self._known[text] - count) :]]
        old = max(0, self._sent[text].pieces - count)
        events: list[str] = []
        for batch in (pieces[:old], pieces[old:]):
            if batch:
                new = self._events.pieces(at, batch)
                events += self._new(text, [(count + complete, event) for complete, event in new])
                count += len(batch)
                self._now[text] = max(self._now[text], StreamPosition(count))
        return events

    def _other_events(self, text: int, events: Iterable[str]) -> list[str]:
        """Write events that belong to no piece."""
        return self._new(text, [(0, event) for event in events])

    def _new(self, text: int, events: Iterable[tuple[int, str]]) -> list[str]:
        """The events of a text that were not sent before. events: each with the number of pieces complete after it."""
        new: list[str] = []
        for count, event in events:
            now = self._now[text]
            is_complete = count > now.pieces
            self._now[text] = now = (
                StreamPosition(count) if is_complete else StreamPosition(now.pieces, now.partial + 1)
            )
            if now > self._sent[text]:
                new.append(f"id: {self._prefix}{now}\n{event}" if self._prefix else event)
        return new


_IDEMPOTENCY_KEY = re.compile(rb"[!-~]{1,255}")
_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9]{1,9})(?:\+([0-9]{1,9}))?")


def _parts_of(event_id: str) -> Sequence[str]:
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        shown = event_id if len(event_id) <= 80 else f"{event_id[:79]}…"
        message = f"Last-Event-ID must be the id of an event that this API sent; got {shown!r}"
        raise BodyError(message, code="invalid_last_event_id")
    return match.groups()


def event_prefix(body: ParsedBody, fingerprint: str) -> str:
    """What the ids of a stream's events begin with; "" for several texts, whose events have none. fingerprint: of the
    engine."""
    if sum(request.options.n for request in body.requests) > 1:
        return ""
    return f"{body.key.text}.{digest_of(body)}.{_digest(fingerprint.encode())}."


def idempotency_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The Idempotency-Key, made unique to its caller (the API key); None without one. Raises `BodyError`:
    the key is invalid."""
    key = headers.get(b"idempotency-key")
    if key is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        message = "Idempotency-Key must be 1 to 255 visible ASCII characters"
        raise BodyError(message, code="invalid_idempotency_key")
    own = api_key_of(headers) or headers.get(b"authorization", b"")
    caller = hashlib.blake2b(own, digest_size=8).hexdigest()
    return f"{caller} {key.decode()}"


def digest_of(body: ParsedBody) -> str:
    """A digest of all that a body asks for, including the server's defaults."""
    requests = []
    for request in body.requests:
        names = [field.name for field in fields(request.options) if field.name != "draft"]  # drafts don't change text
        requests.append((request.prompt, [f"{name}={getattr(request.options, name)!r}" for name in names]))
    return _digest(json.dumps([body.kind, body.model, body.fields, requests], sort_keys=True, default=repr).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
