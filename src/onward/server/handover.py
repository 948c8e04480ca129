"""Answers that were begun before, here or on another server: what clients and callers say of them.

Every event of a stream has an id:

    <32 digits: the answer's key>.<8: of what was asked>.<8: of the engine's fingerprint>.<how far it is told>

A client whose stream broke sends the same body with the last id as the header `Last-Event-ID`, to any server of the
same model, and gets the events after it. Whoever calls the application in its own process, as an ingress with several
replicas does, puts a dict into the scope, `scope["onward"]`, in place of the headers:

    answer: the key (`AnswerKey.new().text`), which fixes the answer's id, its time and, where the body gives none, the
        seed. emitted: the ids of each of its texts that are known, those of the first request first; they are not
        decoded again. last_event_id: events up to this one are not sent again.

Each message of a stream's body then has an entry of the same name, {"emitted": [[…], …], "id": …}: the ids of each text
that have come since the message before, and the id of the last event.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from starlette.types import Scope

from onward.errors import RequestError
from onward.openai import AnswerKey, Body, BodyError
from onward.requests import Request
from onward.server.told import Told

_IDEMPOTENCY_KEY = re.compile(rb"[!-~]{1,255}")
_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{8})\.([0-9a-f]{8})\.([0-9,;+/]{1,16384})")


@dataclass(frozen=True)
class Handover:
    """What is known of an answer before it begins here.

    key: of the answer. emitted: ids of its texts that the caller knows; None where it knows none. last_event_id: of the
    last event that its client has. reports: whether messages are to say what they tell. idempotency: what a repetition
    is known by.
    """

    key: AnswerKey
    emitted: Sequence[Sequence[int]] | None = None
    last_event_id: str | None = None
    reports: bool = False
    idempotency: str | None = None

    @classmethod
    def of(cls, scope: Scope) -> "Handover":
        """What the scope of a request says.

        Raises:
            BodyError: a header that is no event's id. RequestError: an entry of a caller's that is none.
        """
        given: Mapping[str, Any] | None = scope.get("onward")
        if given is not None:
            if unknown := set(given) - {"answer", "emitted", "last_event_id"}:
                raise RequestError(f"scope['onward'] has answer, emitted and last_event_id; got {min(unknown)!r}")
            key = AnswerKey(given["answer"]) if "answer" in given else AnswerKey.new()
            return cls(key, given.get("emitted"), given.get("last_event_id"), reports=True)
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        idempotency = idempotency_of(headers)
        if not (last := headers.get(b"last-event-id", b"").decode("latin-1")):
            return cls(AnswerKey.new(), idempotency=idempotency)
        return cls(AnswerKey(_parts(last)[0]), last_event_id=last, idempotency=idempotency)


@dataclass(frozen=True)
class EventIds:
    """The ids of a stream's events. prefix: of all of them. before: how far the stream was told before."""

    prefix: str
    before: Told

    @classmethod
    def of(cls, body: Body, fingerprint: str, last_event_id: str | None) -> "EventIds":
        """fingerprint: of the engine.

        Raises:
            BodyError: the id is of another body or another engine.
        """
        asked, computed = digest_of(body), _digest(fingerprint.encode())
        prefix = f"{body.key.text}.{asked}.{computed}."
        texts = [request.options.n for request in body.requests]
        if last_event_id is None:
            return cls(prefix, Told.nothing(texts))
        _, their_asked, their_computed, how_far = _parts(last_event_id)
        before = Told.of(how_far, texts)
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
    """What a repetition is known by: the Idempotency-Key, of one caller's; None without one.

    Raises:
        BodyError: the header is no such key.
    """
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


def digest_of(body: Body) -> str:
    """Tells a body from others by all that it asks for, with what it left to the server's defaults."""
    requests = [(request.prompt, _described(request)) for request in body.requests]
    return _digest(json.dumps([body.kind, body.model, body.given, requests], sort_keys=True, default=repr).encode())


def _described(request: Request) -> list[str]:
    """The options of a request that its text depends on."""
    options = request.options
    return [f"{each.name}={getattr(options, each.name)!r}" for each in fields(options) if each.name != "draft"]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()
