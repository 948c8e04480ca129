"""Launch a deployment on Ray, and run it until a signal."""

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
from onward.cluster.deployment import REPLICA, ingress_of, replicas_of
from onward.cluster.ingress import Ingress
from onward.cluster.options import DeployOptions
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
    """Deploy, and yield the URL once all replicas are ready. Afterwards the deployment is removed.

    Other deployments on the cluster are unaffected, including those of this command, whose applications have other
    names. The ingress runs in this process. Raises `RequestError`: as `connected`, or the server cannot listen on the
    address. Raises `EngineError`: the replicas do not start.

    address: of a Ray cluster, "auto" for this machine's; None starts Ray for this deployment alone.
    """
    replicas = options.max_replicas or options.replicas
    if address is None and options.threads is None:
        options = replace(options, threads=max(1, onward.num_threads() // replicas))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Ray accounts for CPUs only; the number of threads is set above.
    processors = int(replicas * options.cpus) + 2
    with closing(bound(host, port)) as listener, connected(address, processors):
        # Several commands may start on a cluster at the same time.
        name = _APPLICATION if address is None else f"{_APPLICATION}-{secrets.token_hex(4)}"
        try:
            ingress = ingress_of(_start(name, replicas_of(options)), options)
            _repeat_warnings(name)
            with _serving(ingress, listener, Settings(**options.settings).drain):
                yield address_of(listener)
        finally:
            with contextlib.redirect_stdout(io.StringIO()):  # Ray prints its controller's end as a failure
                _end(name)


def _start(name: str, replicas: Any) -> Any:
    """Start the replicas without Ray's proxy, and return a handle once all are ready."""
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        return serve.run(replicas, name=name, route_prefix=None, logging_config=quiet)
    except (RuntimeError, RayServeException) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise EngineError(f"the replicas do not start: {one_line(cause)}") from error


def _repeat_warnings(name: str) -> None:
    """Repeat a replica's warnings in this process, since the replica's output is not shown. All replicas have the
    same."""
    for message in serve.get_deployment_handle(REPLICA, app_name=name).load_warnings.remote().result():
        warn(message)


def _end(name: str) -> None:
    """Remove an application, and shut down Ray Serve if there is no other."""
    try:
        others = serve.status().applications.keys() - {name}
    except RayError:  # the controller is gone
        others = set()
    if others:
        serve.delete(name)
    else:
        serve.shutdown()


@contextlib.contextmanager
def _serving(ingress: Ingress, listener: socket.socket, drain: float) -> Iterator[None]:
    """Run the ingress in a thread. At the end, running requests get `drain` seconds to finish."""
    server = Server(config_of(ingress))
    listener.listen()  # queues connections until the thread accepts them
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="onward-ingress")
    thread.start()
    try:
        yield
        if thread.is_alive() and ingress.in_flight:
            log("drains", requests=ingress.in_flight, seconds=drain)
            asyncio.run_coroutine_threadsafe(ingress.drain(drain), loops[0]).result()
    finally:
        server.should_exit = True
        thread.join()


def until_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    received = threading.Event()
    before = {number: signal.signal(number, lambda *_: received.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not received.wait(1.0):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
