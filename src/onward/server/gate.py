"""The gate in front of the application: request ids, access checks and the access log."""

import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.errors import OnwardError
from onward.protocols import error_fields
from onward.server.access import Access
from onward.server.client import client_of
from onward.server.errors import DEFECT, error_answer, plain_error
from onward.server.log import log, log_defect, refusal
from onward.server.service import Service

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

    def noting(self, send: Send) -> Send:
        """`send`, noting the status and adding the header x-request-id. The response to HEAD has no body."""
        is_head = self._scope["method"] == "HEAD"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                if all(name.lower() != b"x-request-id" for name, _ in message["headers"]):  # from a replica
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", self.id.encode())]}
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


class Gate:
    """ASGI middleware that checks access, assigns request ids and writes the access log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._access = Access(service.settings)
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = scope["onward.access"] = AccessRecord(scope)
        client = scope.setdefault("onward.client", client_of(scope, access.headers, self._service.settings))
        scope["onward.memory"] = self._service.memory.reservation(client)
        self.in_flight += 1
        try:
            # HEAD is handled as GET, without the body.
            handled = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._handle(access, handled, receive, access.noting(send))
        finally:
            scope["onward.memory"].release()
            access.status = access.status or CLIENT_CLOSED
            self._service.metrics.statuses[access.status] += 1
            if self._service.settings.access_log:
                access.write()
            self.in_flight -= 1  # last, so that the log line is there once the server is idle

    async def _handle(self, access: AccessRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                draining = self._service.draining
                self._access.check(scope, access.headers, in_flight=self.in_flight, draining=draining)
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
