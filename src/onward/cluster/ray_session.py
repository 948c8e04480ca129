"""A Ray session, on a running cluster or on one started for this process."""

import contextlib
import io
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from onward.errors import RequestError, one_line

_STORE_BYTES = 128 * 2**20  # of Ray's object store, which only small messages pass through
_CONNECT_TIMEOUT = 5.0  # seconds for a cluster to accept a connection


@contextlib.contextmanager
def connected(address: str | None, processors: int) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs. Raises `RequestError`: Ray is not installed, the address is
    invalid or does not answer, or Ray does not start here.

    address: HOST:PORT or ray://HOST:PORT of a running cluster, or "auto" for this machine's, with its own
        authentication. None starts one on this machine for the block, regardless of RAY_ADDRESS and RAY_AUTH_MODE: it
        listens on the loopback interface alone, and requires a token. Only this user can read that, and Ray's files and
        logs, which are removed after the block.
    processors: CPUs of a cluster started here, in Ray's accounting.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else replicas yield to every other process
    try:
        import ray
        from ray._private import utils
        from ray.exceptions import RayError
    except ImportError as error:
        raise RequestError("replicas run on Ray: pip install 'onward[cluster]'") from error
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address is None:
            options = {"address": "local", "num_cpus": processors, "include_dashboard": False}
            options |= {"object_store_memory": _STORE_BYTES, "_node_ip_address": "127.0.0.1"}
            options["_temp_dir"] = stack.enter_context(_private_folder())
        elif address != "auto":
            _check_connection(address)
        try:
            # Ray would store this process's command line, which may contain an API key.
            with _replaced(utils, "get_entrypoint_name", lambda: "onward"), _loopback(address is None):
                ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        except (OSError, RuntimeError, ValueError, RayError) as error:
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
def _private_folder() -> Iterator[str]:
    """A temporary folder of this user alone, for Ray's files (its own folder is open to all), and for a new token that
    Ray requires during the block."""
    parent = os.environ.get("RAY_TMPDIR")
    with tempfile.TemporaryDirectory(prefix="onward-ray-", dir=parent, ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "token")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, "RAY_AUTH_TOKEN": None}
        with _environment(variables):
            yield folder


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of Ray's authentication for the block; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    from ray import _raylet

    raylet: Any = _raylet  # its stub lacks them
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    raylet.Config.initialize("")  # Ray caches the variables
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _loopback(is_local: bool) -> contextlib.AbstractContextManager[None]:
    """Let a cluster that `ray.init` starts have the address 127.0.0.1, as it has on macOS. On Linux, Ray would replace
    it, so that other machines can join, and listen on all interfaces."""
    from ray._private import ray_constants

    return _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False) if is_local else contextlib.nullcontext()


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
