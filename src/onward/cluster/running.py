"""A deployment while it runs: on this machine alone, or on a cluster that is there."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import ray
from ray import serve

import onward
from onward.cluster.deploy_options import DeployOptions
from onward.cluster.deployment import application, ingress_of, replicas_of
from onward.cluster.ingress import Ingress
from onward.errors import EngineError, RequestError, one_line
from onward.server import bound, log_to_stderr
from onward.server.lifecycle import Server, address_of, config_of

__all__ = ["DeployOptions", "log_to_stderr", "running", "until_signal"]

# What Ray's object store takes of a machine: answers pass it in small parts.
_STORE = 100 * 2**20
# Seconds in which a cluster has to answer.
_CONNECT = 5.0
_APPLICATION = "onward"


@contextlib.contextmanager
def running(
    options: DeployOptions, host: str = "127.0.0.1", port: int = 8000, address: str | None = None
) -> Iterator[str]:
    """Deploy, and yield the URL once all replicas are there. Afterwards nothing of it is left.

    The ingress is this process. Fused replicas listen themselves on this machine (Linux), and are behind Ray's proxy on
    a cluster.

    address: of a Ray cluster, "auto" for the one of this machine; None: Ray is started here, for this alone.

    Raises:
        RequestError: the address does not answer, or cannot be listened at. EngineError: the replicas do not start.
    """
    most = options.max_replicas or options.replicas
    if address is None and options.threads is None:
        options = replace(options, threads=max(1, onward.num_threads() // most))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with closing(bound(host, port)) as listener:
        url = address_of(listener)
        at = host, int(url.rpartition(":")[2])
        _connect(options, address)
        try:
            if options.fused:
                listener.close()  # others listen there
                if address is None and sys.platform == "linux":
                    _start({"location": "NoServer"}, replicas_of(options, at), None)
                else:
                    _start({"host": host, "port": at[1]}, application(options), "/")
                yield url
            else:
                ingress = ingress_of(_start({"location": "NoServer"}, replicas_of(options), None), options)
                with _serving(ingress, listener):
                    yield url
        finally:
            serve.shutdown()
            ray.shutdown()


def _start(http_options: dict[str, Any], deployed: Any, route_prefix: str | None) -> Any:
    serve.start(http_options=http_options, logging_config={"log_level": "WARNING"})
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        return serve.run(deployed, name=_APPLICATION, route_prefix=route_prefix, logging_config=quiet)
    except RuntimeError as error:
        raise EngineError(f"the replicas do not start: {one_line(error)}") from error


@contextlib.contextmanager
def _serving(ingress: Ingress, listener: socket.socket) -> Iterator[None]:
    """The ingress in a thread of this process."""
    server = Server(config_of(ingress))
    listener.listen()  # who connects before the thread accepts waits, and is not refused
    thread = threading.Thread(target=server.run, args=([listener],), name="onward-ingress")
    thread.start()
    try:
        yield
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


def _connect(options: DeployOptions, address: str | None) -> None:
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        # Ray counts processors; how many threads a replica runs is ours to say.
        most = options.max_replicas or options.replicas
        ray.init(
            num_cpus=int(most * options.cpus) + 2,
            include_dashboard=False,
            object_store_memory=_STORE,
            **common,
        )
        return
    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RequestError(f"no Ray cluster answers at {address!r}: {one_line(error)}") from error


def _check_answers(address: str) -> None:
    """Ray itself would look for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise RequestError(f"the address of a Ray cluster is HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address!r}: {error.strerror or error}; start one with ray start --head"
        raise RequestError(message) from error
