"""A session of Ray: this process as part of a cluster that runs, or of one that is started for it alone."""

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from onward.errors import RequestError, one_line

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
