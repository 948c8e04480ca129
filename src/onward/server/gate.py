"""The gate in front of the endpoints and of an ingress: request ids, access checks and the access log."""

import ipaddress
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.errors import EngineError, OnwardError
from onward.protocols import BodyError, error_fields
from onward.server.client import MemoryBudget, api_key_of, client_of, max_body, too_large
from onward.server.errors import DEFECT, error_answer
from onward.server.log import log, log_defect, refusal
from onward.server.settings import Settings
from onward.server.tracing import RequestSpan, Tracing
from onward.util.api_keys import ApiKeys

# The status in the log and the metrics if the client disconnects before the response starts (nginx's).
CLIENT_CLOSED = 499
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready", "/openapi.json"})


def is_open(path: str) -> bool:
    """Whether a path needs no API key: those for monitoring, and the pages; the one at / asks its user for the key."""
    return path in _OPEN_PATHS or path.startswith("/page/")


class AccessRecord:
    """The access log entry of a request. Endpoints add to `fields`. span: if requests are traced."""

    def __init__(self, scope: Scope) -> None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        id = headers.get(b"x-request-id", b"")
        self.id = id.decode() if _REQUEST_ID.fullmatch(id) else f"req_{uuid.uuid4().hex}"
        self.headers = headers
        self.status = 0
        self.fields: dict[str, Any] = {}
        self.span: RequestSpan | None = None
        self._scope, self._began = scope, time.perf_counter()

    def noting(self, send: Send) -> Send:
        """`send`, noting the status and adding the header x-request-id. The response to HEAD has no body."""
        is_head = self._scope["method"] == "HEAD"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                if all(name.lower() != b"x-request-id" for name, _ in message["headers"]):  # from a replica
                    names = (b"x-request-id", b"request-id")  # OpenAI's clients read the first, Anthropic's the second
                    ids = [(name, self.id.encode()) for name in names]
                    message = {**message, "headers": [*message["headers"], *ids]}
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        return send_with_id

    def write(self) -> None:
        client = self._scope.get("client")
        log(
            "request",
            id=self.id,
            client=client[0] if client else None,
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            ms=round((time.perf_counter() - self._began) * 1e3, 1),
            **self.fields,
        )


def access_of(scope: Scope) -> AccessRecord:
    """The access log entry of a request that passed through the gate."""
    return scope["onward.access"]  # type: ignore[no-any-return]


class RequestCounts:
    """Counts of requests: refusals by error code, and responses by status."""

    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()


class Gated(Protocol):
    """What stands behind a gate. memory: of all requests. draining: whether it is shutting down. tracing: None if
    requests are not traced."""

    settings: Settings
    memory: MemoryBudget
    draining: bool
    tracing: Tracing | None

    @property
    def metrics(self) -> RequestCounts: ...


class Gate:
    """ASGI middleware that checks access, assigns request ids and writes the access log.

    It checks the Host header, the API key, shutdown, concurrent requests and the declared length of a body. Then the
    scope has the entries onward.access (an `AccessRecord`), onward.client (`client_of`) and onward.memory.
    """

    def __init__(self, app: ASGIApp, gated: Gated) -> None:
        self._app, self._gated = app, gated
        self._settings, self._keys = gated.settings, ApiKeys(gated.settings.api_keys)
        self._hosts = {name.lower() for name in gated.settings.hosts}
        self.in_flight = 0

    def with_cors(self) -> ASGIApp:
        """The gate, with CORS headers for the origins in the settings, also on rejected requests."""
        if not self._settings.cors_origins:
            return self
        return CORSMiddleware(
            self,
            allow_origins=self._settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-onward-ignored"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = scope["onward.access"] = AccessRecord(scope)
        client = scope.setdefault("onward.client", client_of(scope, access.headers, self._settings))
        scope["onward.memory"] = self._gated.memory.reservation(client)
        self.in_flight += 1
        try:
            # HEAD is handled as GET, without the body.
            handled = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            if self._gated.tracing is not None:
                access.span = self._gated.tracing.begin(handled)
            await self._handle(access, handled, receive, access.noting(send))
        finally:
            scope["onward.memory"].release()
            access.status = access.status or CLIENT_CLOSED
            if access.span is not None:
                access.span.end(access.status, access.id, access.fields)
            self._gated.metrics.statuses[access.status] += 1
            if self._settings.access_log:
                access.write()
            self.in_flight -= 1  # last, so that the log line is there once the server is idle

    async def _handle(self, access: AccessRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                self._check(scope, access.headers)
            except OnwardError as error:
                fields = error_fields(error)
                self._gated.metrics.refusals[fields["code"]] += 1
                access.fields |= refusal(fields, with_values=self._settings.log_prompts)
                await error_answer(error, scope["path"], access.id)(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Exception as error:
            log_defect(error, id=access.id, path=scope["path"])
            if not access.status:
                defect = BodyError(DEFECT, code="internal_error", status=500)
                await error_answer(defect, scope["path"], access.id)(scope, receive, send)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise an `OnwardError` if the request is refused."""
        self._check_host(headers.get(b"host", b""))
        if not is_open(scope["path"]) and scope["method"] != "OPTIONS":
            self._check_key(api_key_of(headers))
        if scope["method"] != "POST":
            return
        if self._gated.draining:
            raise EngineError("the server is shutting down and takes no more requests")
        if self.in_flight > self._settings.max_requests:
            message = f"the server is at its limit of {self._settings.max_requests} concurrent requests"
            raise BodyError(message, code="too_many_requests", status=503)
        length, most = headers.get(b"content-length", b"0"), max_body(scope["path"], self._settings)
        if length.isdigit() and int(length[:20]) > most:
            raise too_large(most)

    def _check_host(self, host: bytes) -> None:
        """Refuse unknown names: DNS rebinding lets another site's page reach this machine under its own name. Addresses
        are accepted, which such a page does not have: health checks use them."""
        name = host.decode("latin-1").lower()
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
        if self._hosts and name.strip("[]") not in self._hosts and not _is_address(name.strip("[]")):
            message = f"this server does not answer to the name {name!r}; allow it with --allow-host"
            raise BodyError(message, code="unknown_host", status=403)

    def _check_key(self, key: bytes | None) -> None:
        if self._keys and not self._keys.contains(key or b""):
            problem = "no API key" if key is None else "a wrong API key"
            message = f"{problem}: this server requires the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise BodyError(message, code="invalid_api_key", status=401)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
