"""A Ray session, on a running cluster or on one started for this process."""

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from onward.errors import RequestError, one_line

_STORE_BYTES = 128 * 2**20  # of Ray's object store, which only small messages pass through
_CONNECT_TIMEOUT = 5.0  # seconds for a cluster to accept a connection


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
