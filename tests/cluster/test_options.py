"""The options of a deployment are checked by the command, not in the replicas."""

import asyncio
import hashlib
import json
import time
import warnings
from dataclasses import asdict
from typing import Any

import pytest

from onward.cli.main import run
from onward.cluster import channel as bridge
from onward.cluster.call import ReplyBatch, RouteAttempt
from onward.cluster.channel import ReplyQueue
from onward.errors import RequestError
from onward.server import Settings

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from onward.cluster import ray_router
    from onward.cluster.deployment import Replica
    from onward.cluster.options import DeployOptions
    from onward.cluster.ray_router import RayReplicas


DIGEST = f"sha256:{hashlib.sha256(b'secret').hexdigest()}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": 2}, "'replica' is not a deployment option"),
        ({"settings": {"api_key": ["secret"]}}, "unknown option 'api_key': did you mean api_keys"),
        ({"retries": {"attempt": 2}}, "unknown option 'attempt': did you mean attempts"),
        ({"settings": ["secret"]}, "settings must be a mapping of options; got one list$"),
        ({"settings": '{"api_keys": ["secret"]'}, "settings must be a mapping of options; got one str$"),
        ({"settings": {"api_keys": ["secret"]}}, "api_keys must be a list of digests.* write sha256:DIGEST"),
        ({"settings": {"api_keys": [DIGEST, "secret"]}}, "api_keys must be a list of digests"),
        ({"settings": {"api_keys": 5}}, "api_keys must be a list of digests"),
        ({"retries": "3"}, "retries must be a mapping of options; got 3"),
        ({"load": 8}, "load must be a mapping of options; got 8"),
        ({"engine": "many"}, "engine must be a mapping of options; got 'many'"),
        ({"fused": True}, "'fused' is not a deployment option: replicas always answer through the ingress"),
        ({"affinity": 1}, "affinity must be true or false; got 1"),
        ({"replicas": 0}, "replicas must be a whole number of 1 or more; got 0"),
        ({"cpus": "nan"}, "cpus must be a number above 0"),
        ({"settings": {"response_store": "r.db"}}, "response_store must be an absolute path.*; got 'r.db'"),
        ({"settings": {"response_store": ":memory:"}}, "response_store must be an absolute path"),
        ({"load": {"prefix_cache_dir": "prefixes"}}, "prefix_cache_dir must be an absolute path.*; got 'prefixes'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        DeployOptions.of(options)
    assert "secret" not in str(raised.value)


def test_valid_options_are_accepted() -> None:
    given = {"replicas": "3", "affinity": "false", "settings": f'{{"api_keys": ["{DIGEST}"]}}', "name": "1"}
    options = DeployOptions.of(given)
    assert (options.replicas, options.affinity, options.name) == (3, False, "1")
    assert options.settings == {"api_keys": (DIGEST,)}
    assert DeployOptions.of(asdict(options)) == options == DeployOptions.of(json.loads(json.dumps(asdict(options))))


@pytest.mark.parametrize("name", ["api_keys", "hosts", "cors_origins"])
@pytest.mark.parametrize("value", ["secret", 5, [5]])
def test_a_string_is_no_list_of_strings(name: str, value: Any) -> None:
    """Each character of a key would be a key."""
    with pytest.raises(RequestError, match=f"{name} must be a list of strings; got") as raised:
        Settings(**{name: value})
    assert name != "api_keys" or "secret" not in str(raised.value)


def test_removed_flags_name_their_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", "demo", "--fused"]) == 2
    assert "no option --fused; replicas always answer through the ingress" in capsys.readouterr().err


def test_stored_responses_are_refused_in_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", "demo", "--response-store", "r.db", "--address", "auto"]) == 2
    assert "--response-store works on one machine: remove it, or remove --address" in capsys.readouterr().err


class Handle:
    """Ray Serve's handle of replicas, which are one object of this process."""

    deployment_id = "Replica"

    def __init__(self, replica: Any, method: str = "") -> None:
        self._replica, self._method = replica, method

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        return Handle(self._replica, method_name)

    def remote(self, **options: Any) -> Any:
        return getattr(self._replica, self._method)(**options)


def test_an_ingress_renews_the_lease_of_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_router, "RENEW_INTERVAL", 0.1)
    monkeypatch.setattr(ray_router, "_cancel", lambda response: None)
    monkeypatch.setattr(bridge, "_LEASE", 1.0)
    replica = Replica.__new__(Replica)
    replica._name, replica._fingerprint, replica._queues = "a", "same", {}

    async def run() -> None:
        batches = RayReplicas(Handle(replica)).batches("a", "one")
        await anext(batches)
        queue = replica._queues["one"]
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            await anext(batches)
        assert not queue.is_closed
        await batches.aclose()
        await asyncio.wait_for(queue.wait_closed(), 60)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replica_sends_nothing_to_another_replicas_channel() -> None:
    """Ray may send a call elsewhere than it was to go."""
    replica = Replica.__new__(Replica)
    replica._name, replica._fingerprint, replica._queues = "a", "same", {"one": ReplyQueue("a", "same")}

    async def batches(of: str) -> list[ReplyBatch]:
        await replica._queues["one"].put(1, {"type": "http.response.body", "body": b"x"})
        coming = replica.batches(RouteAttempt(only=of), "one")
        got = [await anext(coming)]
        got += [batch async for batch in coming] if of != "a" else []
        await coming.aclose()
        return got

    (batch,) = asyncio.run(batches("b"))
    assert (batch.replica, batch.items) == ("a", ())
    assert list(replica._queues) == ["one"]
    (batch,) = asyncio.run(batches("a"))
    assert [message["body"] for message in batch.items[0].messages] == [b"xx"]
