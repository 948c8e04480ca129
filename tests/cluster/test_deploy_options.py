"""What is deployed is checked where it is said, not in the replicas."""

import asyncio
import warnings
from typing import Any

import pytest

from onward.cluster.bridge import Outbox
from onward.cluster.call import Parcel, Route
from onward.errors import RequestError
from onward.server import Settings

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    from onward.cluster import running
    from onward.cluster.deploy_options import DeployOptions
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
        ({"fused": "no"}, "fused must be true or false; got 'no'"),
        ({"affinity": 1}, "affinity must be true or false; got 1"),
        ({"replicas": 0}, "replicas must be a whole number of 1 or more; got 0"),
        ({"cpus": "nan"}, "cpus must be a number above 0"),
    ],
)
def test_a_mistake_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DeployOptions.of(given)


def test_what_is_right_is_taken() -> None:
    options = DeployOptions.of({"replicas": "3", "fused": "true", "settings": '{"api_keys": ["secret"]}', "name": "1"})
    assert (options.replicas, options.fused, options.name) == (3, True, "1")
    assert options.settings == {"api_keys": ["secret"]}


@pytest.mark.parametrize("name", ["api_keys", "hosts", "cors_origins"])
@pytest.mark.parametrize("value", ["secret", 5, [5]])
def test_one_text_is_no_list_of_texts(name: str, value: Any) -> None:
    """Each character of a key would be a key."""
    with pytest.raises(RequestError, match=f"{name} must be a list of texts; got"):
        Settings(**{name: value})


def test_without_an_address_ray_is_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its own variable names."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    running._connect(DeployOptions(), None)
    assert canonicalize_bootstrap_address(given["address"]) is None


@pytest.mark.parametrize("host", ["..", "x" * 70])
def test_an_address_that_is_none(host: str) -> None:
    with pytest.raises(RequestError, match="no Ray cluster answers at"):
        running._check_answers(f"{host}:1")


def test_a_replica_gives_no_words_to_a_channel_of_another() -> None:
    """Ray may send a call elsewhere than it was to go."""
    replica = Replica.__new__(Replica)
    replica._name, replica._fingerprint, replica._outboxes = "a", "same", {"one": Outbox("a", "same")}

    async def parcels(of: str) -> list[Parcel]:
        await replica._outboxes["one"].put(1, {"type": "http.response.body", "body": b"x"})
        coming = replica.parcels(Route(only=of), "one")
        got = [await anext(coming)]
        got += [parcel async for parcel in coming] if of != "a" else []
        await coming.aclose()
        return got

    (parcel,) = asyncio.run(parcels("b"))
    assert (parcel.replica, parcel.parts) == ("a", ())
    assert list(replica._outboxes) == ["one"]
    (parcel,) = asyncio.run(parcels("a"))
    assert [message["body"] for message in parcel.parts[0].messages] == [b"xx"]
