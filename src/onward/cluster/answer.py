"""What the client of an ingress has got of its answer, whoever makes the rest of it."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from onward.cluster.bridge import FACTS
from onward.cluster.call import Emitted, Item
from onward.errors import OnwardError
from onward.openai import error_fields
from onward.server.errors import error_answer
from onward.server.log import refusal

Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class DivergedError(Exception):
    """An attempt makes another answer than the one that was begun."""


class Answer:
    """An answer on its way to a client, from one attempt or several.

    A later attempt goes on with a stream after its last event (`last_event_id`). Any other body it begins anew: what
    the client has is left out, and has to be what was said before.

    started: whether the client has its status. ended: whether it has all. emitted: the ids of its texts that are known.
    last_event_id: of the last event that the client has. facts: for the log. whole_reasons: whether these have what the
    message of an error quotes of the body.
    """

    def __init__(self, send: Send, *, whole_reasons: bool = False) -> None:
        self._send, self._whole_reasons = send, whole_reasons
        self.facts: dict[str, Any] = {}
        self.started = self.ended = self._is_stream = False
        self.emitted: Emitted | None = None
        self.last_event_id: str | None = None
        self._status = 0
        self._fingerprint: str | None = None  # of whoever began it
        self._told = _Told()
        self._again = _Told()  # what the present attempt has said of it

    def begin(self) -> None:
        """Another attempt begins."""
        self._again = _Told()

    async def tell(self, item: Item) -> None:
        """Hand on what an item brings beyond what the client has.

        Raises:
            DivergedError: it is another answer than the one that was begun.
        """
        if self.started and item.fingerprint != self._fingerprint:
            raise DivergedError("the other replicas have another model, another build or another processor")
        for message in item.messages:
            if message["type"] != "http.response.start":
                self.facts |= message.get(FACTS, {})
                await self._tell_body(message.get("body", b""), over=not message.get("more_body", False))
                self._note(message.get("onward", {}))
            elif not self.started:
                self.started, self._fingerprint, self._status = True, item.fingerprint, message["status"]
                self._is_stream = _is_stream(message)
                await self._send(message)
            elif message["status"] != self._status:
                raise DivergedError(f"the answer has the status {message['status']}, and had {self._status}")

    async def tell_whole(self, response: Response) -> None:
        """Tell an answer that no replica has begun."""
        self.started = self.ended = True
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})

    async def fail(self, error: OnwardError) -> None:
        """Say that there will be no more: with a status, or in a stream with an event."""
        self.facts |= refusal(error_fields(error), whole=self._whole_reasons)
        whole = error_answer(error)
        if not self.started:
            await self.tell_whole(whole)
            return
        # What was all but whole, and no stream, breaks off.
        content = b"data: " + bytes(whole.body) + b"\n\n" if self._is_stream else b""
        self.ended = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    def note_left(self) -> None:
        """The client has left. What it got is known of a stream alone."""
        self.facts |= {"finish": ["cancelled"]}
        if self.emitted is not None:
            self.facts["completion_tokens"] = sum(map(len, self.emitted))

    async def _tell_body(self, body: bytes, *, over: bool) -> None:
        new = body if self._is_stream else self._new_of(body)
        if over and not self._is_stream and self._again.count < self._told.count:
            raise DivergedError("the answer is shorter than what was told of it")
        self.ended = over
        if new or over:
            await self._send({"type": "http.response.body", "body": new, "more_body": not over})

    def _new_of(self, body: bytes) -> bytes:
        """What of a body that began anew the client does not have."""
        old = max(0, self._told.count - self._again.count)
        self._again.add(body[:old])
        if old and self._again.count == self._told.count and self._again.digest() != self._told.digest():
            raise DivergedError("the answer begins differently from what was told of it")
        new = body[old:]
        self._again.add(new)
        self._told.add(new)
        return new

    def _note(self, told: Mapping[str, Any]) -> None:
        """What a message of a stream says of itself (`onward.server.handover`)."""
        if told:
            self.last_event_id = told["id"]
            new: Sequence[Sequence[int]] = told["emitted"]
            before = self.emitted or ((),) * len(new)
            self.emitted = tuple((*old, *ids) for old, ids in zip(before, new, strict=True))


class _Told:
    """A count of bytes, and a digest of them."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, part: bytes) -> None:
        self.count += len(part)
        self._hash.update(part)

    def digest(self) -> bytes:
        return self._hash.digest()


def _is_stream(start: Mapping[str, Any]) -> bool:
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in types)
