"""What is deployed is checked where it is said, not in the replicas."""

import asyncio
import time
import warnings
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
    from onward.cluster import deployment
    from onward.cluster.deployment import RayReplicas
    from onward.cluster.options import DeployOptions
    from onward.cluster.replica import Replica


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replica": 2}, "'replica' is no option of a deployment"),
        ({"settings": {"api_key": ["secret"]}}, "unknown option 'api_key': did you mean api_keys"),
        ({"retries": {"attempt": 2}}, "unknown option 'attempt': did you mean attempts"),
        ({"settings": [1]}, r"settings must be a mapping of options; got \[1\]"),
        ({"retries": "3"}, "retries must be a mapping of options; got 3"),
        ({"load": 8}, "load must be a mapping of options; got 8"),
        ({"engine": "many"}, "engine must be a mapping of options; got 'many'"),
        ({"fused": True}, "'fused' is no option of a deployment: replicas always answer through the ingress"),
        ({"affinity": 1}, "affinity must be true or false; got 1"),
        ({"replicas": 0}, "replicas must be a whole number of 1 or more; got 0"),
        ({"cpus": "nan"}, "cpus must be a number above 0"),
    ],
)
def test_a_mistake_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DeployOptions.of(given)


def test_what_is_right_is_taken() -> None:
    given = {"replicas": "3", "affinity": "false", "settings": '{"api_keys": ["secret"]}', "name": "1"}
    options = DeployOptions.of(given)
    assert (options.replicas, options.affinity, options.name) == (3, False, "1")
    assert options.settings == {"api_keys": ["secret"]}


@pytest.mark.parametrize("name", ["api_keys", "hosts", "cors_origins"])
@pytest.mark.parametrize("value", ["secret", 5, [5]])
def test_one_text_is_no_list_of_texts(name: str, value: Any) -> None:
    """Each character of a key would be a key."""
    with pytest.raises(RequestError, match=f"{name} must be a list of texts; got"):
        Settings(**{name: value})


def test_a_flag_that_is_gone_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", "demo", "--fused"]) == 2
    assert "no such option: --fused; replicas always answer through the ingress" in capsys.readouterr().err


class Handle:
    """Ray Serve's handle of replicas, which are one object of this process."""

    deployment_id = "Replica"

    def __init__(self, replica: Any, method: str = "") -> None:
        self._replica, self._method = replica, method

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        return Handle(self._replica, method_name)

    def remote(self, **given: Any) -> Any:
        return getattr(self._replica, self._method)(**given)


def test_an_ingress_says_that_it_listens_as_long_as_its_channel_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "LISTENING", 0.1)
    monkeypatch.setattr(deployment, "_cancel", lambda response: None)
    monkeypatch.setattr(bridge, "_PATIENCE", 1.0)
    replica = Replica.__new__(Replica)
    replica._name, replica._fingerprint, replica._outboxes = "a", "same", {}

    async def run() -> None:
        parcels = RayReplicas(Handle(replica)).parcels("a", "one")
        await anext(parcels)
        outbox = replica._outboxes["one"]
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            await anext(parcels)
        assert not outbox.is_closed
        await parcels.aclose()
        await asyncio.wait_for(outbox.closed(), 10)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_replica_gives_no_words_to_a_channel_of_another() -> None:
    """Ray may send a call elsewhere than it was to go."""
    replica = Replica.__new__(Replica)
    replica._name, replica._fingerprint, replica._outboxes = "a", "same", {"one": ReplyQueue("a", "same")}

    async def parcels(of: str) -> list[ReplyBatch]:
        await replica._outboxes["one"].put(1, {"type": "http.response.body", "body": b"x"})
        coming = replica.parcels(RouteAttempt(only=of), "one")
        got = [await anext(coming)]
        got += [parcel async for parcel in coming] if of != "a" else []
        await coming.aclose()
        return got

    (parcel,) = asyncio.run(parcels("b"))
    assert (parcel.replica, parcel.items) == ("a", ())
    assert list(replica._outboxes) == ["one"]
    (parcel,) = asyncio.run(parcels("a"))
    assert [message["body"] for message in parcel.items[0].messages] == [b"xx"]
