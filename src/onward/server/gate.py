"""The gate in front of the application: request ids, access checks and the access log."""

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.errors import EngineError, OnwardError
from onward.protocols import BodyError, error_fields
from onward.server.client import too_large
from onward.server.errors import DEFECT, error_answer, plain_error
from onward.server.log import log, log_defect, refusal
from onward.server.page_files import PAGE_FILES
from onward.server.service import Service

# Paths that need no API key: for monitoring, and the page, which asks its user for the key.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ready", "/openapi.json"})
# The status in the log and the metrics if the client disconnects before the response starts (nginx's).
CLIENT_CLOSED = 499
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class AccessRecord:
    """The access log entry of a request. Endpoints add to `fields`."""

    def __init__(self, scope: Scope) -> None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        id = headers.get(b"x-request-id", b"")
        self.id = id.decode() if _REQUEST_ID.fullmatch(id) else f"req_{uuid.uuid4().hex}"
        self.headers = headers
        self.status = 0
        self.fields: dict[str, Any] = {}
        self._scope, self._began = scope, time.perf_counter()

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


class Gate:
    """ASGI middleware that refuses requests, assigns request ids and writes the access log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.settings.api_keys]
        self._hosts = {name.lower() for name in service.settings.hosts}
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = scope["onward.access"] = AccessRecord(scope)
        is_head = scope["method"] == "HEAD"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", access.id.encode())]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        self.in_flight += 1
        try:
            # HEAD is handled as GET, without the body.
            await self._handle(access, {**scope, "method": "GET"} if is_head else scope, receive, send_with_id)
        finally:
            access.status = access.status or CLIENT_CLOSED
            self._service.metrics.statuses[access.status] += 1
            if self._service.settings.access_log:
                access.write()
            self.in_flight -= 1  # last, so that the log line is there once the server is idle

    async def _handle(self, access: AccessRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                self._check(access.headers, scope)
            except OnwardError as error:
                fields = error_fields(error)
                self._service.metrics.refusals[fields["code"]] += 1
                access.fields |= refusal(fields, with_values=self._service.settings.log_prompts)
                await error_answer(error)(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Exception as error:
            log_defect(error, id=access.id, path=scope["path"])
            if not access.status:
                await plain_error(500, DEFECT, "internal_error")(scope, receive, send)

    def _check(self, headers: Mapping[bytes, bytes], scope: Scope) -> None:
        """Raise an `OnwardError` if the request is refused before it reaches the application."""
        settings = self._service.settings
        self._check_host(headers.get(b"host", b""))
        if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers.get(b"authorization"))
        if scope["method"] != "POST":
            return
        if self._service.draining:
            raise EngineError("the server is shutting down and takes no more requests")
        if self.in_flight > settings.max_requests:
            message = f"the server is at its limit of {settings.max_requests} concurrent requests"
            raise BodyError(message, code="too_many_requests", status=503)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > settings.max_body:
            raise too_large(settings)

    def _check_host(self, host: bytes) -> None:
        """Refuse unknown names: DNS rebinding lets another site's page reach this machine under its own name."""
        name = host.decode("latin-1").lower()
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
        if self._hosts and name.strip("[]") not in self._hosts:
            message = f"this server does not answer to the name {name!r}; allow it with --allow-host"
            raise BodyError(message, code="unknown_host", status=403)

    def _check_key(self, authorization: bytes | None) -> None:
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them: constant time
        if self._keys and (scheme.lower() != b"bearer" or not any(matches)):
            problem = "no API key" if authorization is None else "a wrong API key"
            message = f"{problem}: this server requires the header 'Authorization: Bearer KEY'"
            raise BodyError(message, code="invalid_api_key", status=401)
