"""The life of a server: it listens, serves, drains at the first signal and ends."""

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

# How long requests that were cancelled get to tell their clients.
_LAST_WORDS = 5.0
# How long data may stay unread in a socket before the system closes it.
_UNREAD_MS = 120_000


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to `run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def config_of(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        log_config=None,
        loop="asyncio",  # the one that `run` takes, whatever else is installed
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )


def bound(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket for a server to listen at. port: 0 takes a free one.

    Raises:
        RequestError: the address is in use, or is none of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"the server cannot listen at {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # clients that never read
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(f"the server cannot listen at {host}:{port}: {error.strerror or error}") from error
    return listener


def run(app: App, listener: socket.socket, ready: Callable[[str], None] | None = None) -> None:
    """Serve until a signal comes (SIGTERM or SIGINT), then drain. A second signal ends the process at once.

        onward.server.run(app, onward.server.bound("127.0.0.1", 8000))

    listener: see `bound`. ready: is called with the address, when the server listens.

    Raises:
        RequestError: it cannot listen there.
    """
    asyncio.run(_run(app, listener, ready))


async def _run(app: App, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
    server = Server(config_of(app))
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def signalled(number: int) -> None:
        if draining:
            log("ends at once", signal=signal.Signals(number).name)
            sys.stderr.flush()
            os._exit(128 + number)
        log("drains", signal=signal.Signals(number).name, seconds=app.service.settings.drain)
        draining.append(loop.create_task(drain(app, server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    try:
        serving = loop.create_task(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            at = address_of(listener)
            log("serves", url=at, models=[model.name for model in app.service.models])
            if ready is not None:
                ready(at)
        await serving
    except OSError as error:
        raise RequestError(f"the server cannot listen at {address_of(listener)}: {error.strerror or error}") from error
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def address_of(listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def drain(app: App, server: uvicorn.Server) -> None:
    """Take no more requests, let those that run end within the time for it, cancel the others, and stop."""
    service = app.service
    service.draining = True

    def cancel() -> None:
        log("cancels", requests=len(service.live))
        service.end()

    await emptied(lambda: app.gate.inside, service.settings.drain, cancel)
    server.should_exit = True


async def emptied(inside: Callable[[], int], seconds: float, cancel: Callable[[], None]) -> None:
    """Let requests end within so many seconds, then cancel the others and give them a little for their last words.

    inside: how many there are.
    """
    if not await _is_empty(inside, seconds):
        cancel()
        await _is_empty(inside, _LAST_WORDS)


async def _is_empty(inside: Callable[[], int], seconds: float) -> bool:
    """Whether nobody waits for an answer any more, within so many seconds."""
    end = time.monotonic() + seconds
    while inside() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return not inside()
