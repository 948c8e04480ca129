"""The client of a request: who it is, its body and memory, and whether it is still connected."""

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from email.message import Message
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from onward.protocols import BodyError
from onward.server.served import Lease, ModelPending
from onward.server.settings import Settings
from onward.util.text import in_bytes

_Result = TypeVar("_Result")

# The largest share of one client, and of all bodies together: the rest is for their responses.
_CLIENT_SHARE, _BODY_SHARE = 0.5, 0.75


class MemoryFullError(BodyError):
    """The server has no memory for a request, or its client has used its share."""

    def __init__(self, limit: int) -> None:
        message = f"requests of this server, or of this client, already use all the memory allowed ({in_bytes(limit)})"
        super().__init__(f"{message}: try again later", code="request_memory", status=503)


class MemoryBudget:
    """Counts the memory of requests, in one thread only. limit: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._by_client: Counter[str] = Counter()

    def reservation(self, client: str) -> "Reservation":
        """An empty reservation."""
        return Reservation(self, client)

    def _change(self, client: str, nbytes: int, share: float) -> None:
        if nbytes > 0:
            own = min(share, _CLIENT_SHARE) * self.limit if client else share * self.limit
            if self.used + nbytes > share * self.limit or self._by_client[client] + nbytes > own:
                raise MemoryFullError(self.limit)
        self.used += nbytes
        self._by_client[client] += nbytes
        if not self._by_client[client]:
            del self._by_client[client]


class Reservation:
    """The memory of one request. Release it. nbytes: the bytes reserved."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self.budget, self._client = budget, client
        self.nbytes = 0

    def resize(self, nbytes: int, share: float = 1.0) -> None:
        """Reserve this many bytes in total. share: the share of the budget that may then be in use. Raises
        `MemoryFullError`: the budget is full."""
        self.budget._change(self._client, nbytes - self.nbytes, share)
        self.nbytes = nbytes

    def add_body(self, nbytes: int) -> None:
        """Reserve more bytes for a body. Raises `MemoryFullError`."""
        self.resize(self.nbytes + nbytes, _BODY_SHARE)

    def release(self) -> None:
        self.resize(0)


def api_key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The API key of a request: that of "Authorization: Bearer KEY", otherwise that of "x-api-key: KEY". None: it has
    neither header. Empty: Authorization has another scheme."""
    authorization, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return b"" if key is None and authorization is not None else key


def client_of(scope: Scope, headers: Mapping[bytes, bytes], settings: Settings) -> str:
    """The name of a request's client: a digest of its API key if the server has keys, else its address. The server
    divides its time and memory among clients."""
    if settings.api_keys:
        return f"{_KEY}{hashlib.blake2b(api_key_of(headers) or b'', digest_size=16).hexdigest()}"
    return str(scope["client"][0]) if scope.get("client") else ""


# The beginning of the names of clients with an API key.
_KEY = "key "


def owner_of(client: str) -> str:
    """The owner of what a client stores: its API key; on a server without keys, everyone. client: its name."""
    return client if client.startswith(_KEY) else ""


async def whole_body(request: Request, settings: Settings, memory: Reservation) -> bytes:
    """Read a request body. memory: counts the bytes that have arrived. Raises `BodyError`: the body is too large or too
    slow, or there is no memory for it. Raises `ClientDisconnect`."""
    chunks: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                length += len(chunk)
                if length > settings.max_body:
                    raise too_large(settings.max_body)
                memory.add_body(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_seconds:g} s"
        raise BodyError(message, code="request_timeout", status=408) from None
    return b"".join(chunks)


def check_headers(headers: Headers) -> None:
    """Raise `BodyError` unless the headers declare uncompressed JSON in UTF-8."""
    message = Message()
    message["content-type"] = headers.get("content-type", "")
    charset = message.get_content_charset("utf-8")
    if not headers.get("content-type") or message.get_content_type() != "application/json":
        media_type = headers.get("content-type", "").partition(";")[0].strip() or "none"
        text = f"the body must be JSON, with the header 'Content-Type: application/json'; got {media_type!r}"
        raise BodyError(text, code="unsupported_media_type", status=415)
    if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):  # ASCII is valid UTF-8
        text = f"the body must be UTF-8; Content-Type has the charset {charset!r}"
        raise BodyError(text, code="unsupported_charset", status=415)
    codings = ",".join(headers.getlist("content-encoding")).lower().split(",")
    if encoded := [coding.strip() for coding in codings if coding.strip() not in ("", "identity")]:
        text = f"the body must not be compressed; got Content-Encoding {', '.join(encoded)!r}: send it uncompressed"
        raise BodyError(text, code="unsupported_content_encoding", status=415)


# The endpoints of files, and the bytes of a form besides its file.
UPLOADS = frozenset({"/files", "/v1/files"})
_FORM = 64 * 2**10


def max_body(path: str, settings: Settings) -> int:
    """The maximum bytes of a body sent to this path."""
    return settings.max_file + _FORM if path in UPLOADS else settings.max_body


def too_large(most: int) -> BodyError:
    return BodyError(f"the body is too large: at most {most} bytes are allowed", code="body_too_large", status=413)


class Leases:
    """The leases of a request, until it ends. It may end while a thread adds one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, tuple[Lease, Callable[[], None]]] = {}
        self._closed = False

    def of(self, name: str, acquire: Callable[[], Lease], release: Callable[[Lease], None]) -> Lease:
        """The lease of a model; a new one if there is none."""
        with self._lock:
            if name in self._leases:
                return self._leases[name][0]
            lease = acquire()
            if self._closed:
                release(lease)
            else:
                self._leases[name] = lease, lambda: release(lease)
            return lease

    def close(self) -> None:
        with self._lock:
            self._closed = True
            leases, self._leases = self._leases, {}
        for _, release in leases.values():
            release()


class Client:
    """Watches for the client to disconnect after its body has been read.

    name: see `client_of`. memory: reserved for its request. body_bytes: the length of its body. leases: of models on
    demand, until it is closed. pending: the model that it waits for.
    """

    def __init__(self, request: Request, body_bytes: int) -> None:
        self.name: str = request.scope["onward.client"]
        self.memory: Reservation = request.scope["onward.memory"]
        self.body_bytes = body_bytes
        self.disconnected = False
        self.leases = Leases()
        self.pending: ModelPending | None = None
        self._callback: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._listen(request))

    async def until(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait for a result, or cancel it if the client disconnects first. Raises `ClientDisconnect`."""
        waiting = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ClientDisconnect
            return waiting.result()
        finally:
            waiting.cancel()
            del waiting  # else its error would refer to itself

    def new_reservation(self) -> Reservation:
        """An empty reservation for its response."""
        return self.memory.budget.reservation(self.name)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the client disconnects, immediately if it already has."""
        self._callback = callback
        if self.disconnected:
            callback()

    def close(self) -> None:
        self._task.cancel()
        self.leases.close()

    async def _listen(self, request: Request) -> None:
        with contextlib.suppress(ClientDisconnect):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    break
        self.disconnected = True
        if self._callback is not None:
            self._callback()
