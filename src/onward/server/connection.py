"""HTTP connections with limits: the size and time of a request's head, and the number of connections."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from onward.server.errors import plain_error

# Bytes of a request line and its headers, and the number of headers.
MAX_HEAD, MAX_HEADERS = 64 * 2**10, 128
# Seconds for a request line and its headers to arrive.
HEAD_SECONDS = 10.0


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits.

    max_connections: beyond it, a new connection replaces one without a request, so that /health stays reachable. If all
        have requests, the new one is refused.
    """

    max_connections = 4096

    _head_bytes: int | None = 0  # received of the current head; None while a body arrives
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close another connection that has no request, or else this one."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        others = [each for each in others if not each.transport.is_closing()]
        if len(others) < self.max_connections:
            return
        if (idle := next((each for each in others if each.is_idle), None)) is not None:
            idle.transport.abort()
        else:
            self._refuse(503, f"the server has {self.max_connections} connections", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, or only a part of its head."""
        return self._head_bytes is not None and (self.cycle is None or self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._timer is None:
                self._start_timer()
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._head_bytes = None
        size = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def _refuse_head(self) -> None:
        message = f"the request line and headers may have {MAX_HEAD:,} bytes, and {MAX_HEADERS} headers"
        self._refuse(431, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error, unless an answer is being sent, and close the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is None or self.cycle.response_complete:
            response = plain_error(status, message, code, {"connection": "close"})
            headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
            self.transport.write(STATUS_LINE[status] + headers + b"\r\n" + bytes(response.body))
        self.transport.close()

    def _start_timer(self) -> None:
        def late() -> None:
            self._refuse(408, f"the headers did not arrive within {HEAD_SECONDS:g} s", "request_timeout")

        self._timer = self.loop.call_later(HEAD_SECONDS, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
