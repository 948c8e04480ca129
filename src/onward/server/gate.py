"""What every request passes: its id, whether it may come in, and its line in the log."""

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.errors import EngineError, OnwardError
from onward.protocols import BodyError, error_fields
from onward.server.client import too_large
from onward.server.errors import defect_answer, error_answer
from onward.server.log import log, log_defect, refusal
from onward.server.page_files import PAGE_FILES
from onward.server.service import Service


def check_key(authorization: bytes | None, digests: Collection[bytes]) -> None:
    """authorization: the header of that name. digests: SHA-256 of each key; checking takes as long for any other text.

    Raises:
        BodyError: there are keys, and the header has none of them.
    """
    if not digests:
        return
    scheme, _, key = (authorization or b"").partition(b" ")
    given = hashlib.sha256(key.strip()).digest()
    matches = [hmac.compare_digest(given, digest) for digest in digests]  # all of them, in any case
    if scheme.lower() != b"bearer" or not any(matches):
        problem = "no API key" if authorization is None else "a wrong API key"
        message = f"{problem}: this server wants the header 'Authorization: Bearer KEY'"
        raise BodyError(message, code="invalid_api_key", status=401)


def check_host(host: bytes | None, hosts: Iterable[str]) -> None:
    """A page of a stranger's can point its own name at this machine; the Host header then tells.

    hosts: names that are right; none allows any.

    Raises:
        BodyError: another name.
    """
    names = {name.lower() for name in hosts}
    if not names:
        return
    name = (host or b"").decode("latin-1").lower()
    name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
    if name.strip("[]") not in names:
        message = f"this server does not answer to the name {name!r}; --allow-host makes it"
        raise BodyError(message, code="unknown_host", status=403)


# What whoever watches over a server asks for, and the page, which asks for the key itself.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ready", "/openapi.json"})

# The status in the log and the metrics where a client leaves before its answer begins (nginx's).
_CLIENT_LEFT = 499

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class AccessRecord:
    """What the log says of a request. Endpoints add to `fields`."""

    def __init__(self, scope: Scope) -> None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        self.headers = headers
        self.status = 0
        self.fields: dict[str, Any] = {}
        self._scope, self._began = scope, time.perf_counter()

    def note_error(self, fields: Mapping[str, Any], *, whole: bool = False) -> None:
        """Note why the request was refused. fields: of the error. whole: with what the message quotes of the body."""
        self.fields |= refusal(fields, whole=whole)

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
    """Of a request that has passed the gate."""
    access: AccessRecord = scope["onward.access"]
    return access


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.settings.api_keys]
        self.inside = 0  # requests

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
                more_body = message.get("more_body", False)
                message = {"type": "http.response.body", "body": b"", "more_body": more_body}
            await send(message)

        self.inside += 1
        try:
            # A HEAD is answered as a GET is, without the body.
            inner = {**scope, "method": "GET"} if is_head else scope
            await self._passed(access, inner, receive, send_with_id)
        finally:
            access.status = access.status or _CLIENT_LEFT
            self._service.metrics.statuses[access.status] += 1
            if self._service.settings.access_log:
                access.write()
            self.inside -= 1  # last: who waits for an idle server finds the line

    async def _passed(self, access: AccessRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                self._check(access, scope)
            except OnwardError as error:
                fields = error_fields(error)
                self._service.metrics.refusals[fields["code"]] += 1
                access.note_error(fields, whole=self._service.settings.log_prompts)
                await error_answer(error)(scope, receive, send)
                return
            await self._app(scope, receive, send)
        except Exception as error:
            log_defect(error, id=access.id, path=scope["path"])
            if not access.status:
                await defect_answer()(scope, receive, send)

    def _check(self, access: AccessRecord, scope: Scope) -> None:
        """Raises what keeps the request out."""
        settings, headers = self._service.settings, access.headers
        check_host(headers.get(b"host"), settings.hosts)
        path = scope["path"]
        if path not in OPEN_PATHS and scope["method"] != "OPTIONS":
            check_key(headers.get(b"authorization"), self._keys)
        if scope["method"] != "POST":
            return
        if self._service.draining:
            raise EngineError("the server shuts down and takes no more requests")
        if self.inside > settings.max_requests:
            message = f"the server holds {settings.max_requests} requests, as many as it takes"
            raise BodyError(message, code="too_many_requests", status=503)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > settings.max_body:
            raise too_large(settings)
