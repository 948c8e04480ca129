"""A session of Ray, on a running cluster or on one started for this process alone, and a deployment in it."""

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

# Bytes of Ray's object store: what replicas send passes it in small parts.
_STORE = 128 * 2**20
# Seconds in which a cluster has to answer.
_CONNECT = 5.0


@contextlib.contextmanager
def connected(address: str | None, processors: int) -> Iterator[None]:
    """Part of a cluster of Ray, while the block runs.

    Ray authenticates as it does by itself: a cluster that is started here has a token, since it listens on all
    addresses of the machine, and RAY_AUTH_MODE says otherwise.

    Args:
        address: HOST:PORT or ray://HOST:PORT of a cluster that runs, or "auto" for that of this machine. None starts
            one on this machine for the block, whatever RAY_ADDRESS names.
        processors: of a cluster that is started here, in Ray's accounts.

    Raises:
        RequestError: Ray is not installed, the address is none or does not answer, or Ray does not start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else all that runs beside goes before replicas
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise RequestError("replicas run on Ray: pip install 'onward[cluster]'") from error
    chosen: dict[str, Any] = {"address": address}
    if address is None:
        chosen = {"address": "local", "num_cpus": processors, "include_dashboard": False}
        chosen |= {"object_store_memory": _STORE}
    elif address != "auto":
        _check_answers(address)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **chosen)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        failure = "Ray does not start here" if address is None else f"no Ray cluster answers at {address!r}"
        raise RequestError(f"{failure}: {one_line(error)}") from error
    try:
        yield
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself would look for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise RequestError(f"the address of a Ray cluster is HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two for what is no port or no host's name
        reason = getattr(error, "strerror", None) or error
        message = f"no Ray cluster answers at {address!r}: {reason}; start one with ray start --head"
        raise RequestError(message) from error


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
