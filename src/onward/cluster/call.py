"""What passes between an ingress and a replica: a request on the way there, parts of its answer on the way back."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.responses import Response

from onward.errors import OnwardError
from onward.protocols import error_fields
from onward.server.errors import error_answer
from onward.server.log import refusal

# The entry of an answer's last message that has the facts for the log.
FACTS = "onward.facts"
# The ids of each text of an answer, those of the body's first request first.
Emitted = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ProxiedRequest:
    """An HTTP request as it came, and what makes its answer the same wherever it is made.

    answer_key: fixes the answer's id, time and seed. emitted: what its texts have emitted in attempts before; None:
    nothing, or nobody knows. last_event_id: of what the client has of a stream. See `onward.server.resume`.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    answer_key: str
    emitted: Emitted | None = None
    last_event_id: str | None = None

    @property
    def named_headers(self) -> dict[str, str]:
        """The headers by lower-case name."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.headers}


class Reply(NamedTuple):
    """What an answer brought since its last item; a replica that is well sends one every half second, maybe empty.

    replica: its name. fingerprint: what the bits of its texts depend on. messages: of ASGI. is_last: whether they end
    the answer. number: of the call.
    """

    replica: str
    fingerprint: str
    messages: tuple[Mapping[str, Any], ...] = ()
    is_last: bool = False
    number: int = 0


class ReplyBatch(NamedTuple):
    """The items of all answers of a replica for an ingress. is_beat: whether it also says that the replica is well."""

    replica: str
    fingerprint: str
    items: tuple[Reply, ...]
    is_beat: bool


@dataclass
class RouteAttempt:
    """Where a call is to go, and where it went.

    key: what requests of one beginning have in common; None: nothing. avoid: replicas that failed it. only: the replica
    that gets it, or the call is lost. replica: the one that it was sent to last; None as long as there is none.
    since: when that was, on this process's monotonic clock.
    """

    key: str | None = None
    avoid: frozenset[str] = field(default_factory=frozenset)
    only: str | None = None
    replica: str | None = None
    since: float = 0.0

    def found(self, replica: str) -> None:
        """The call is sent to a replica."""
        self.replica, self.since = replica, time.monotonic()


class ReplicaLostError(Exception):
    """A replica is gone or silent. died: whether its process is known to be gone."""

    def __init__(self, reason: str, *, died: bool) -> None:
        super().__init__(reason)
        self.died = died


def close_later(items: AsyncGenerator[Reply, None]) -> None:
    """Close a generator of items without waiting: a replica that hangs does not answer."""
    closing = asyncio.ensure_future(items.aclose())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


# Generators that are being closed: a task that nobody holds may be collected.
_closing: set[asyncio.Future[None]] = set()


Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class DivergedError(Exception):
    """An attempt makes another answer than the one that was begun."""


class ProxiedResponse:
    """An answer on its way to a client, from one attempt or several.

    A later attempt resumes a stream after its last event (`last_event_id`). It sends any other body from the start:
    the part that the client already has is checked to be equal, and left out.

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
        self._told = bytearray()  # of a body that is no stream
        self._again = 0  # how much of it the present attempt has repeated

    def begin(self) -> None:
        """Another attempt begins."""
        self._again = 0

    async def tell(self, item: Reply) -> None:
        """Hand on what an item brings beyond what the client has. Raises `DivergedError`: it is another answer than the
        one that was begun."""
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
        self.facts |= refusal(error_fields(error), with_values=self._whole_reasons)
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
        if over and not self._is_stream and self._again < len(self._told):
            raise DivergedError("the answer is shorter than what was told of it")
        self.ended = over
        if new or over:
            await self._send({"type": "http.response.body", "body": new, "more_body": not over})

    def _new_of(self, body: bytes) -> bytes:
        """The part of a body, sent again from its start, that the client does not have yet."""
        begin, self._again = self._again, self._again + len(body)
        known = bytes(self._told[begin : self._again])
        if not body.startswith(known):
            raise DivergedError("the answer begins differently from what was told of it")
        new = body[len(known) :]
        self._told += new
        return new

    def _note(self, told: Mapping[str, Any]) -> None:
        """What a message of a stream says of itself (`onward.server.resume`)."""
        if told:
            self.last_event_id = told["id"]
            new: Sequence[Sequence[int]] = told["emitted"]
            before = self.emitted or ((),) * len(new)
            self.emitted = tuple((*old, *ids) for old, ids in zip(before, new, strict=True))


def _is_stream(start: Mapping[str, Any]) -> bool:
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in types)
