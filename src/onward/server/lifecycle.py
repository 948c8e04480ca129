"""The life of a server process: listen, accept bounded connections, serve, drain at the first signal, stop."""

import asyncio
import atexit
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from onward.errors import RequestError
from onward.protocols import BodyError
from onward.server.app import App
from onward.server.errors import error_answer
from onward.server.log import log
from onward.util import lanes

# Seconds that cancelled requests get to report the error to their clients, and that the rest of the shutdown gets.
_CANCEL_GRACE, _EXIT_GRACE = 5.0, 5.0
# Connections besides those of requests, and open files besides connections.
_OTHER_CONNECTIONS, _OTHER_FILES = 256, 128
# How long sent data may stay unacknowledged before the system closes the connection.
_UNREAD_MS = 120_000

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
            error = BodyError(message, code=code, status=status)
            url = getattr(self, "url", b"").decode("latin-1").partition("?")[0]
            response = error_answer(error, url, headers={"connection": "close"})
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


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handling: `run` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def config_of(app: ASGIApp, max_requests: int = 4096) -> uvicorn.Config:
    """max_requests: concurrent requests of the application; sets the maximum number of connections."""
    files = min(_raise_file_limit(), 2**20) - _OTHER_FILES
    limits = {"max_connections": max(1, min(max_requests + _OTHER_CONNECTIONS, files))}
    return uvicorn.Config(
        app,
        http=type("BoundedConnection", (Connection,), limits),
        log_config=None,
        loop="asyncio",  # the one that `run` uses, even if uvloop is installed
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )


def _raise_file_limit() -> int:
    """Allow as many open files as the system does, and return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def bound(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """Return a socket bound to an address, for a server to listen on. port: 0 picks a free one.

    Raises:
        RequestError: the address is in use, or doesn't belong to this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"the server cannot listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for clients that never read
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(f"the server cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def run(app: App, listener: socket.socket, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process immediately, and so does the end of
    the drain time, some seconds later, if anything still runs.

        onward.server.run(app, onward.server.bound("127.0.0.1", 8000))

    listener: see `bound`. ready: called with the URL once the server listens.

    Raises:
        RequestError: the server cannot listen on the socket.
    """
    # Texts are encoded one at a time; the library would start a thread for each processor.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    atexit.register(_abandon_threads)
    asyncio.run(_run(app, listener, ready))


def _abandon_threads() -> None:
    """End the process without waiting for threads: one in native code would return to an interpreter that is gone."""
    if lanes.busy():
        _end_now(0)


def _end_now(status: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_after(seconds: float) -> None:
    """End the process after this time, even if something is still running."""

    def end() -> None:
        log("ends at once", seconds=seconds)
        _end_now(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


async def _run(app: App, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
    app.files.open()
    server = Server(config_of(app, app.service.settings.max_requests))
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if drains:
            log("ends at once", signal=signal.Signals(number).name)
            app.files.close()
            _end_now(128 + number)
        seconds = app.service.settings.drain
        log("drains", signal=signal.Signals(number).name, seconds=seconds)
        _end_after(seconds + _CANCEL_GRACE + _EXIT_GRACE)
        drains.append(loop.create_task(drain(app, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        serving = loop.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            url = address_of(listener)
            log("serves", url=url, models=app.service.models.names())
            gc.collect()
            gc.freeze()  # keep the garbage collector from scanning the model during requests
            if ready is not None:
                ready(url)
        await serving
    except OSError as error:
        raise RequestError(f"the server cannot listen on {address_of(listener)}: {error.strerror or error}") from error
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def drain(app: App, server: uvicorn.Server) -> None:
    """Refuse new requests, wait for running ones up to the drain timeout, cancel the rest, and stop."""
    service = app.service
    service.draining = True
    app.batches.stop()

    def cancel() -> None:
        log("cancels", requests=len(service.live), batches=app.batches.running)
        service.cancel_all()
        app.batches.interrupt()

    def running() -> int:
        return (
            app.gate.in_flight
            + app.batches.running
            + (0 if service.background is None else len(service.background.running))
        )

    await drain_requests(running, service.settings.drain, cancel)
    server.should_exit = True


async def drain_requests(in_flight: Callable[[], int], seconds: float, cancel: Callable[[], None]) -> None:
    """Wait up to `seconds` for requests to finish, then cancel the others and let them report that to their clients.
    in_flight: returns the number of requests."""
    await _wait_idle(in_flight, seconds)
    if in_flight():
        cancel()
        await _wait_idle(in_flight, _CANCEL_GRACE)


async def _wait_idle(in_flight: Callable[[], int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while in_flight() and time.monotonic() < end:
        await asyncio.sleep(0.02)
