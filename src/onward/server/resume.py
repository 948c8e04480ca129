"""Answers that were begun before, here or on another server: how far they have come, and how they go on.

Every event of a stream has an id:

    <32 digits: the answer's key>.<8: of the body>.<8: of the engine's fingerprint>.<how far the stream is told>

A client whose stream broke sends the same body with the last id as the header `Last-Event-ID`, to any server of the
same model, and gets the events after it. A caller in the same process, such as an ingress, puts a dict into the scope
in place of the headers, `scope["onward"]`:

    answer: the key (`ResponseKey.new().text`). emitted: the ids of each of its texts that are known, those of the first
        request first; they are not decoded again. last_event_id: events up to this one are not sent again.

Each message of a stream's body then has an entry of the same name, {"emitted": [[…], …], "id": …}: the ids of each text
that have come since the message before, and the id of the last event.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Protocol, Self

from starlette.types import Scope

from onward.errors import OnwardError, RequestError
from onward.language_model import Completion, Piece, Request
from onward.protocols import BodyError, ParsedBody, ResponseKey

_TRACK = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*(?:\+[0-9]{1,9})?")


class AnswerEvents(Protocol):
    """An answer as events, as they go over the wire. They depend on the pieces alone, not on how these came.

    singly: whether a piece may have several events. Then pieces are told one by one.
    """

    singly: bool

    def begin(self, at: int) -> list[str]: ...

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """Of pieces of one text, in order: each event with how many of the pieces are told whole with it."""
        ...

    def end(self, at: int, completion: Completion) -> list[str]: ...

    def finish(self) -> list[str]: ...

    def error(self, error: OnwardError) -> list[str]: ...


@dataclass
class TextPosition:
    """How far the answer to one request has been told.

    counts: how many pieces of each text. beside: how many events beside those of whole pieces: of the beginning, of a
    piece that is told in part, of the end.
    """

    counts: list[int]
    beside: int = 0

    def __str__(self) -> str:
        return ",".join(map(str, self.counts)) + (f"+{self.beside}" if self.beside else "")

    @classmethod
    def of(cls, text: str) -> Self:
        counts, _, beside = text.partition("+")
        return cls(list(map(int, counts.split(","))), int(beside or 0))

    def or_later(self, other: "TextPosition") -> "TextPosition":
        """The later of both for each text: one of them may be ahead in one text and behind in another."""
        counts = list(map(max, self.counts, other.counts))
        ahead = [track.beside for track in (self, other) if track.counts == counts]
        return TextPosition(counts, max(ahead, default=self.beside))

    @property
    def place(self) -> tuple[int, int]:
        """Grows with every event that is of no whole piece."""
        return sum(self.counts), self.beside


class StreamPosition:
    """How far a stream has been told. tracks: of each request. last: how many events after the last request's end."""

    def __init__(self, tracks: Sequence[TextPosition], last: int = 0) -> None:
        self.tracks, self.last = tracks, last

    @classmethod
    def nothing(cls, texts: Sequence[int]) -> Self:
        """texts: how many each request has."""
        return cls([TextPosition([0] * count) for count in texts])

    @classmethod
    def of(cls, text: str, texts: Sequence[int]) -> Self | None:
        """What `str` wrote of a stream with so many texts; None for any other text."""
        tracks, _, last = text.partition("/")
        each = tracks.split(";")
        if not all(map(_TRACK.fullmatch, each)) or not re.fullmatch("[0-9]{0,9}", last):
            return None
        told = cls([TextPosition.of(track) for track in each], int(last or 0))
        return told if [len(track.counts) for track in told.tracks] == list(texts) else None

    def __str__(self) -> str:
        return ";".join(map(str, self.tracks)) + (f"/{self.last}" if self.last else "")


class EventWriter:
    """Writes events with their ids, but for those that were told before.

    events: of the answer. prefix: what every id begins with. before: how far the stream was told before.
    known: how many ids of each text whoever calls the server knows. told: how far it is told now.
    """

    def __init__(self, events: AnswerEvents, prefix: str, before: StreamPosition, known: Sequence[int]) -> None:
        self._events, self._prefix, self._before = events, prefix, before
        self.told = StreamPosition.nothing([len(track.counts) for track in before.tracks])
        self._is_first = str(before) == str(self.told)  # nothing was told before
        self._begun = [0] * len(before.tracks)
        self._unknown = list(known)  # ids of each text that are still to come before those to report
        self._emitted: list[list[int]] = [[] for _ in known]

    @property
    def id(self) -> str:
        """Of the event that was told last, here or before."""
        if self._is_first:
            return f"{self._prefix}{self.told}"
        tracks = [now.or_later(before) for now, before in zip(self.told.tracks, self._before.tracks, strict=True)]
        return f"{self._prefix}{StreamPosition(tracks, max(self.told.last, self._before.last))}"

    def begin(self) -> list[str]:
        events: list[str] = []
        for at, track in enumerate(self.told.tracks):
            events += self._beside(at, self._events.begin(at))
            self._begun[at] = track.beside
        return events

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """What a request has brought."""
        if len(pieces) == 1 or len(self.told.tracks[at].counts) == 1:
            return self._run(at, pieces)
        by_text = sorted(pieces, key=lambda piece: piece.choice)
        runs = [list(run) for _, run in groupby(by_text, key=lambda piece: piece.choice)]
        return [event for run in runs for event in self._run(at, run)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return self._beside(at, self._events.end(at, completion))

    def finish(self) -> list[str]:
        events: list[str] = []
        for event in self._events.finish():
            self.told.last += 1
            if self.told.last > self._before.last:
                events.append(self._written(event))
        return events

    def error(self, error: OnwardError) -> list[str]:
        """It has no id: a client may come again for what it missed."""
        return self._events.error(error)

    def emitted(self) -> list[list[int]]:
        """The ids of each text since the last call."""
        emitted, self._emitted = self._emitted, [[] for _ in self._emitted]
        return emitted

    def _run(self, at: int, pieces: Sequence[Piece]) -> list[str]:
        """Pieces of one text. Those that were told before and the others are told apart."""
        choice = pieces[0].choice
        track, before = self.told.tracks[at], self._before.tracks[at]
        self._note(at, choice, pieces)
        old = max(0, before.counts[choice] - track.counts[choice])
        parts = [[piece] for piece in pieces] if self._events.singly else [pieces[:old], pieces[old:]]
        events: list[str] = []
        for part in parts:
            first = track.counts[choice]
            for whole, event in self._events.pieces(at, part) if part else ():
                if first + whole > track.counts[choice]:
                    track.counts[choice], track.beside = first + whole, self._begun[at]
                    is_new = track.counts[choice] > before.counts[choice]
                else:
                    track.beside += 1
                    is_new = track.place > before.place
                if is_new:
                    events.append(self._written(event))
            if track.counts[choice] < first + len(part):
                track.counts[choice], track.beside = first + len(part), self._begun[at]
        return events

    def _beside(self, at: int, told: Sequence[str]) -> list[str]:
        """Events of no pieces."""
        track, before = self.told.tracks[at], self._before.tracks[at]
        events = []
        for event in told:
            track.beside += 1
            if track.place > before.place:
                events.append(self._written(event))
        return events

    def _written(self, event: str) -> str:
        return f"id: {self.id}\n{event}"

    def _note(self, at: int, choice: int, pieces: Sequence[Piece]) -> None:
        text = sum(len(track.counts) for track in self.told.tracks[:at]) + choice
        known = min(self._unknown[text], len(pieces))
        self._unknown[text] -= known
        self._emitted[text] += [piece.token_id for piece in pieces[known:]]


_IDEMPOTENCY_KEY = re.compile(rb"[!-~]{1,255}")
_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9,;+/]{1,16384})")


@dataclass(frozen=True)
class ResumeRequest:
    """What is known of an answer before it begins here.

    key: of the answer. emitted: ids of its texts that the caller knows; None where it knows none. last_event_id: of the
    last event that its client has. reports: whether messages are to say what they tell. idempotency: what a repetition
    is known by.
    """

    key: ResponseKey
    emitted: Sequence[Sequence[int]] | None = None
    last_event_id: str | None = None
    reports: bool = False
    idempotency: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> "ResumeRequest":
        """What the scope of a request says. Raises `BodyError`: a header that is no event's id. Raises `RequestError`:
        an entry of a caller's that is none."""
        given: Mapping[str, Any] | None = scope.get("onward")
        if given is not None:
            if unknown := set(given) - {"answer", "emitted", "last_event_id"}:
                raise RequestError(f"scope['onward'] has answer, emitted and last_event_id; got {min(unknown)!r}")
            key = ResponseKey(given["answer"]) if "answer" in given else ResponseKey.new()
            return cls(key, given.get("emitted"), given.get("last_event_id"), reports=True)
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        idempotency = idempotency_of(headers)
        if not (last := headers.get(b"last-event-id", b"").decode("latin-1")):
            return cls(ResponseKey.new(), idempotency=idempotency)
        return cls(ResponseKey(_parts(last)[0]), last_event_id=last, idempotency=idempotency)


@dataclass(frozen=True)
class EventIdFormat:
    """The ids of a stream's events. prefix: of all of them. before: how far the stream was told before."""

    prefix: str
    before: StreamPosition

    @classmethod
    def of(cls, body: ParsedBody, fingerprint: str, last_event_id: str | None) -> "EventIdFormat":
        """fingerprint: of the engine. Raises `BodyError`: the id is of another body or another engine."""
        asked, computed = digest_of(body), _digest(fingerprint.encode())
        prefix = f"{body.key.text}.{asked}.{computed}."
        texts = [request.options.n for request in body.requests]
        if last_event_id is None:
            return cls(prefix, StreamPosition.nothing(texts))
        _, their_asked, their_computed, how_far = _parts(last_event_id)
        before = StreamPosition.of(how_far, texts)
        if their_asked != asked or before is None:
            message = (
                "Last-Event-ID is of another body, or of a server with other defaults: send that body, or no such id"
            )
            raise BodyError(message, code="last_event_id_mismatch", status=422)
        if their_computed != computed:
            message = (
                "Last-Event-ID is of a stream that another model, build or processor began, which would not go on with "
                "the same text here: send the body without it, for a new answer"
            )
            raise BodyError(message, code="fingerprint_mismatch", status=409)
        return cls(prefix, before)


def emitted_by(requests: Sequence[Request], emitted: Sequence[Sequence[int]] | None) -> list[list[Sequence[int]]]:
    """The known ids of each request's texts; an empty list for a request of which none are known.

    emitted: of all texts, those of the first request first; None where none are known.
    """
    if emitted is None:
        return [[] for _ in requests]
    counts, left = [request.options.n for request in requests], list(emitted)
    if len(left) != sum(counts):
        raise RequestError(f"emitted has ids of {len(left)} texts, and the body asks for {sum(counts)}")
    each = [[left.pop(0) for _ in range(count)] for count in counts]
    return [texts if any(texts) else [] for texts in each]


def idempotency_of(headers: Mapping[bytes, bytes]) -> str | None:
    """What a repetition is known by: the Idempotency-Key, of one caller's; None without one. Raises `BodyError`: the
    header is no such key."""
    key = headers.get(b"idempotency-key")
    if key is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        message = "Idempotency-Key must be 1 to 255 visible characters of ASCII"
        raise BodyError(message, code="invalid_idempotency_key")
    caller = hashlib.blake2b(headers.get(b"authorization", b""), digest_size=8).hexdigest()
    return f"{caller} {key.decode()}"


def _parts(event_id: str) -> tuple[str, str, str, str]:
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        shown = event_id if len(event_id) <= 80 else f"{event_id[:79]}…"
        message = f"Last-Event-ID must be the id of an event that this API has sent; got {shown!r}"
        raise BodyError(message, code="invalid_last_event_id")
    key, asked, computed, how_far = match.groups()
    return key, asked, computed, how_far


def digest_of(body: ParsedBody) -> str:
    """Tells a body from others by all that it asks for, with what it left to the server's defaults."""
    requests = [(request.prompt, _described(request)) for request in body.requests]
    return _digest(json.dumps([body.kind, body.model, body.given, requests], sort_keys=True, default=repr).encode())


def _described(request: Request) -> list[str]:
    """The options of a request that its text depends on."""
    options = request.options
    return [f"{each.name}={getattr(options, each.name)!r}" for each in fields(options) if each.name != "draft"]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
