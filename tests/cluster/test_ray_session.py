"""Connecting to Ray or starting it: the same code and error for deployments and batches."""

import os
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from onward.cluster.ray_session import connected
from onward.errors import RequestError

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray
    from ray._private import ray_constants, utils
    from ray._private.services import canonicalize_bootstrap_address
    from ray.exceptions import AuthenticationError


@pytest.fixture
def ray_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which Ray would be started; it isn't. The environment doesn't change."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    options: dict[str, Any] = {}

    def init(**ray_options: Any) -> None:
        options.update(ray_options, loopback=not ray_constants.ENABLE_RAY_CLUSTER, says=utils.get_entrypoint_name())

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: options.update(shut=True))
    return options


def test_ray_is_started_locally_without_an_address(
    ray_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regardless of Ray's own variables, and only for this process."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "known")
    with connected(None, 3):
        assert canonicalize_bootstrap_address(ray_options["address"]) is None
        assert ray_options["num_cpus"] == 3
        assert (ray_options["_node_ip_address"], ray_options["loopback"]) == ("127.0.0.1", True)
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in os.environ, "it would come before the file"
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert len(token.read_text()) == 64
        assert ray_options["_temp_dir"] == str(token.parent)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)] == [0o600, 0o700]
        assert "shut" not in ray_options
    assert ray_options["shut"]
    assert not token.parent.exists()
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("disabled", "known")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.parametrize("address", [None, "auto"])
def test_ray_does_not_see_the_command_line(address: str | None, ray_options: dict[str, Any]) -> None:
    """There may be an API key in it, and Ray shows it to all users of a cluster."""
    with connected(address, 1):
        assert ray_options["says"] == "onward"


def test_the_session_ends_after_an_error_too(ray_options: dict[str, Any]) -> None:
    with pytest.raises(KeyError), connected("auto", 3):
        raise KeyError
    assert ray_options["address"] == "auto"
    assert ray_options.keys().isdisjoint({"num_cpus", "_node_ip_address"})
    assert not ray_options["loopback"]
    assert ray_options["shut"]


@pytest.mark.parametrize("address", ["..:1", f"{'x' * 70}:1", "127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_an_unreachable_address(address: str, ray_options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no Ray cluster answers at"), connected(address, 1):
        pass
    assert not ray_options


@pytest.mark.parametrize("address", ["nowhere", "", ":1", "head:", "ray://head"])
def test_an_invalid_address(address: str, ray_options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="is HOST:PORT"), connected(address, 1):
        pass
    assert not ray_options


@pytest.mark.parametrize("kind", [RuntimeError, ConnectionError, AuthenticationError])
@pytest.mark.parametrize(("address", "says"), [(None, "does not start here"), ("auto", "answers at 'auto'")])
def test_rays_output_is_one_line(
    address: str | None, says: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**ray_options: Any) -> None:
        raise kind("no\nroom")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RequestError, match=says) as failed, connected(address, 1):
        pass
    assert "\n" not in str(failed.value)


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match="pip install 'onward\\[cluster\\]'"), connected(None, 1):
        pass
