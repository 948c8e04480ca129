"""A deployment while it runs: on this machine alone, or on a cluster that is there."""

import asyncio
import contextlib
import io
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

import onward
from onward.cluster.deploy_options import DeployOptions
from onward.cluster.deployment import REPLICA, ingress_of, replicas_of
from onward.cluster.ingress import Ingress
from onward.cluster.ray_session import connected
from onward.errors import EngineError, one_line, warn
from onward.server import Settings, bound, log_to_stderr
from onward.server.lifecycle import Server, address_of, config_of
from onward.server.log import log

__all__ = ["DeployOptions", "log_to_stderr", "running", "until_signal"]

_APPLICATION = "onward"


@contextlib.contextmanager
def running(
    options: DeployOptions, host: str = "127.0.0.1", port: int = 8000, address: str | None = None
) -> Iterator[str]:
    """Deploy, and yield the URL once all replicas are there. Afterwards nothing of it is left.

    What else runs on the cluster goes on: another deployment of this command too, whose application has another name.

    The ingress is this process.

    address: of a Ray cluster, "auto" for the one of this machine; None: Ray is started here, for this alone.

    Raises:
        RequestError: of `connected`, or the address cannot be listened at. EngineError: the replicas do not start.
    """
    most = options.max_replicas or options.replicas
    if address is None and options.threads is None:
        options = replace(options, threads=max(1, onward.num_threads() // most))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Ray counts processors; how many threads a replica runs is ours to say.
    processors = int(most * options.cpus) + 2
    with closing(bound(host, port)) as listener, connected(address, processors):
        # On a cluster several commands may start at the same moment.
        name = _APPLICATION if address is None else f"{_APPLICATION}-{secrets.token_hex(4)}"
        try:
            ingress = ingress_of(_start(name, replicas_of(options)), options)
            _pass_warnings_on(name)
            with _serving(ingress, listener, Settings(**options.settings).drain):
                yield address_of(listener)
        finally:
            with contextlib.redirect_stdout(io.StringIO()):  # Ray prints, as a failure, that its controller has ended
                _end(name)


def _start(name: str, replicas: Any) -> Any:
    """A handle of the replicas, once all are there. No proxy of Ray's is before them."""
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        return serve.run(replicas, name=name, route_prefix=None, logging_config=quiet)
    except (RuntimeError, RayServeException) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise EngineError(f"the replicas do not start: {one_line(cause)}") from error


def _pass_warnings_on(name: str) -> None:
    """Warn of what a replica was warned of, in a process whose output nobody sees. They all load the same."""
    for message in serve.get_deployment_handle(REPLICA, app_name=name).warned.remote().result():
        warn(message)


def _end(name: str) -> None:
    """End an application, and Ray Serve with it where it was the only one."""
    try:
        others = serve.status().applications.keys() - {name}
    except RayError:  # what keeps the applications is gone
        others = set()
    if others:
        serve.delete(name)
    else:
        serve.shutdown()


@contextlib.contextmanager
def _serving(ingress: Ingress, listener: socket.socket, drain: float) -> Iterator[None]:
    """The ingress in a thread of this process. At the end requests that run have `drain` seconds to end."""
    server = Server(config_of(ingress))
    listener.listen()  # who connects before the thread accepts waits, and is not refused
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="onward-ingress")
    thread.start()
    try:
        yield
        if thread.is_alive() and ingress.inside:
            log("drains", requests=ingress.inside, seconds=drain)
            asyncio.run_coroutine_threadsafe(ingress.drain(drain), loops[0]).result()
    finally:
        server.should_exit = True
        thread.join()


def until_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    came = threading.Event()
    before = {number: signal.signal(number, lambda *_: came.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not came.wait(1.0):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
