"""The messages between an ingress and its replicas: requests, and parts of responses."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.responses import Response

from onward.errors import OnwardError
from onward.protocols import error_fields, protocol_of
from onward.server.errors import error_answer
from onward.server.log import refusal

# The entry of a response's last message with fields for the access log.
LOG_FIELDS = "onward.log_fields"
# The token ids of each sequence of a response, in the order of the body's requests.
Emitted = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ProxiedRequest:
    """An HTTP request, with what makes its response the same on every replica. response_key: determines the response's
    id, time and seed. emitted, ended: the part of a stream that earlier attempts brought; see `onward.server.resume`.
    client: a name for the client, among which engines divide their time."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    response_key: str
    emitted: Emitted | None = None
    ended: frozenset[int] = frozenset()
    client: str = ""

    @property
    def named_headers(self) -> dict[str, str]:
        """The headers by lower-case name."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.headers}


class Reply(NamedTuple):
    """A part of a response. A healthy replica sends one every half second, which may be empty. replica: its name.
    fingerprint: of its engine; equal ones generate identical text. messages: of ASGI. is_last: whether they end the
    response. number: of the call."""

    replica: str
    fingerprint: str
    messages: tuple[Mapping[str, Any], ...] = ()
    is_last: bool = False
    number: int = 0


class ReplyBatch(NamedTuple):
    """The parts of all responses of a replica for an ingress. is_beat: whether it is also a heartbeat."""

    replica: str
    fingerprint: str
    items: tuple[Reply, ...]
    is_beat: bool


@dataclass
class RouteAttempt:
    """Where to send a call, and where it was sent. key: equal for requests with a common beginning, if any. avoid:
    replicas that failed the call. only: the one replica that may serve it. replica: where it was sent last, if
    anywhere. since: when, on this process's monotonic clock. on_assign: called with the replica."""

    key: str | None = None
    avoid: frozenset[str] = field(default_factory=frozenset)
    only: str | None = None
    replica: str | None = None
    since: float = 0.0
    on_assign: Callable[[str], object] | None = None

    def assign(self, replica: str) -> None:
        """Note the replica that the call is sent to."""
        self.replica, self.since = replica, time.monotonic()
        if self.on_assign is not None:
            self.on_assign(replica)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_assign": None}  # the callback stays in its process


class ReplicaLostError(Exception):
    """A replica is gone or silent. died: whether its process is known to be dead."""

    def __init__(self, reason: str, *, died: bool) -> None:
        super().__init__(reason)
        self.died = died


def close_later(items: AsyncGenerator[Reply, None]) -> None:
    """Close a generator without waiting: a replica that hangs doesn't answer."""
    closing = asyncio.ensure_future(items.aclose())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


# Closing generators: the event loop doesn't keep tasks alive.
_closing: set[asyncio.Future[None]] = set()


Send = Callable[[Any], Awaitable[None]]


class DivergedError(Exception):
    """An attempt generates another response than the one that was started."""


class ProxiedResponse:
    """A response on its way to a client, from one attempt or several.

    A later attempt resumes a stream (`emitted`, `ended`). Any other response is sent when it is complete.

    started: whether the client has the status. is_complete: whether it has everything. emitted: token ids of a stream
    that the client has; None before its first event. ended: the body's requests whose ends it has. log_fields: for the
    access log. log_values: whether these include the values that an error's message quotes. url, request_id: of the
    request; they determine the format of an error.
    """

    def __init__(self, send: Send, url: str = "", request_id: str = "", *, log_values: bool = False) -> None:
        self._send, self._url, self._request_id, self._log_values = send, url, request_id, log_values
        self.log_fields: dict[str, Any] = {}
        self.started = self.is_complete = False
        self.emitted: Emitted | None = None
        self.ended: frozenset[int] = frozenset()
        self._fingerprint: str | None = None  # of the replica that started a stream
        self._head: Mapping[str, Any] = {}  # of a response that is not a stream
        self._body = bytearray()

    async def forward(self, reply: Reply) -> None:
        """Forward what the client doesn't have yet. Raises `DivergedError`: it belongs to another response than the
        stream that was started."""
        if self.started and reply.fingerprint != self._fingerprint:
            raise DivergedError("the other replicas have another model, build or processor")
        for message in reply.messages:
            if message["type"] == "http.response.start":
                await self._begin(message, reply.fingerprint)
                continue
            self.log_fields |= message.get(LOG_FIELDS, {})
            self._body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
            if self.is_complete and not self.started:
                self.started = True
                await self._send(self._head)
            if self.started:
                body, self._body = bytes(self._body), bytearray()
                if body or self.is_complete:
                    await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_complete})
                self._note(message.get("onward", {}))

    async def _begin(self, message: Mapping[str, Any], fingerprint: str) -> None:
        headers = [(name.lower(), value) for name, value in message.get("headers", ())]
        is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
        if self.started:
            if not is_stream:
                raise DivergedError(f"the response has the status {message['status']}; before, it was a stream")
        elif is_stream:
            self.started, self._fingerprint = True, fingerprint
            await self._send(message)
        self._head, self._body = message, bytearray()

    async def send_response(self, response: Response) -> None:
        """Send a complete response that comes from no replica."""
        self.started = self.is_complete = True
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})

    async def fail(self, error: OnwardError) -> None:
        """End the response with an error: as its status, or as an event of a stream."""
        self.log_fields |= refusal(error_fields(error), with_values=self._log_values)
        response = error_answer(error, self._url, self._request_id)
        if not self.started:
            await self.send_response(response)
            return
        self.is_complete = True
        content = protocol_of(self._url).failure_event.encode() + b"data: " + bytes(response.body) + b"\n\n"
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    def note_disconnect(self) -> None:
        """Log that the client has disconnected. How much it received is known for streams only."""
        self.log_fields |= {"finish": ["cancelled"]}
        if self.emitted is not None:
            self.log_fields["completion_tokens"] = sum(map(len, self.emitted))

    def _note(self, report: Mapping[str, Any]) -> None:
        """Note the report in a stream's message (`onward.server.resume`)."""
        if report:
            self.ended |= set(report["ended"])
            new: Sequence[Sequence[int]] = report["emitted"]
            before = self.emitted or ((),) * len(new)
            self.emitted = tuple((*old, *ids) for old, ids in zip(before, new, strict=True))
