"""A Ray session, on a running cluster or on one started for this process, and a deployment in it."""

import asyncio
import contextlib
import io
import logging
import os
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
from onward.errors import EngineError, RequestError, one_line, warn
from onward.server import Settings, bound, log_to_stderr
from onward.server.lifecycle import Server, address_of, config_of
from onward.server.log import log

__all__ = ["DeployOptions", "log_to_stderr", "running", "until_signal"]

_STORE_BYTES = 128 * 2**20  # of Ray's object store, which only small messages pass through
_CONNECT_TIMEOUT = 5.0  # seconds for a cluster to accept a connection
_APPLICATION = "onward"


@contextlib.contextmanager
def connected(address: str | None, processors: int) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs. Raises `RequestError`: Ray is not installed, the address is
    invalid or does not answer, or Ray does not start here.

    Ray's own authentication applies: a cluster started here has a token, since it listens on all of the machine's
    addresses, unless RAY_AUTH_MODE says otherwise.

    address: HOST:PORT or ray://HOST:PORT of a running cluster, or "auto" for this machine's. None starts one on this
        machine for the block, regardless of RAY_ADDRESS.
    processors: CPUs of a cluster started here, in Ray's accounting.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else replicas yield to every other process
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise RequestError("replicas run on Ray: pip install 'onward[cluster]'") from error
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "num_cpus": processors, "include_dashboard": False}
        options |= {"object_store_memory": _STORE_BYTES}
    elif address != "auto":
        _check_connection(address)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        failure = "Ray does not start here" if address is None else f"no Ray cluster answers at {address!r}"
        raise RequestError(f"{failure}: {one_line(error)}") from error
    try:
        yield
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            ray.shutdown()


def _check_connection(address: str) -> None:
    """Fail early: Ray itself would retry for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise RequestError(f"the address of a Ray cluster is HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two for an invalid port or host name
        reason = getattr(error, "strerror", None) or error
        message = f"no Ray cluster answers at {address!r}: {reason}; start one with ray start --head"
        raise RequestError(message) from error


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
