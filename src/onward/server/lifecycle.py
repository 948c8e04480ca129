"""The life of a server process: listen, serve, drain at the first signal, stop."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from onward.errors import RequestError
from onward.server.app import App
from onward.server.log import log

# Seconds that cancelled requests get to report the error to their clients.
_CANCEL_GRACE = 5.0
# How long sent data may stay unacknowledged before the system closes the connection.
_UNREAD_MS = 120_000


class Server(uvicorn.Server):
    """uvicorn's server, with signal handling left to `run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def config_of(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        loop="asyncio",  # the one that `run` uses, even if uvloop is installed
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )


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
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process immediately.

        onward.server.run(app, onward.server.bound("127.0.0.1", 8000))

    listener: see `bound`. ready: called with the URL once the server listens.

    Raises:
        RequestError: the server cannot listen on the socket.
    """
    asyncio.run(_run(app, listener, ready))


async def _run(app: App, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
    server = Server(config_of(app))
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if drains:
            log("ends at once", signal=signal.Signals(number).name)
            sys.stderr.flush()
            os._exit(128 + number)
        log("drains", signal=signal.Signals(number).name, seconds=app.service.settings.drain)
        drains.append(loop.create_task(drain(app, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        serving = loop.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            url = address_of(listener)
            log("serves", url=url, models=[model.name for model in app.service.models])
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

    def cancel() -> None:
        log("cancels", requests=len(service.live))
        service.cancel_all()

    await drain_requests(lambda: app.gate.in_flight, service.settings.drain, cancel)
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
