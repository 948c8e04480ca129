"""A cluster shared with others: commands deploy side by side, and remove only their own applications."""

import json
import os
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from streams import STORY, deployed, read

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

SECONDS = 90


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster with an application of somebody else's."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 6, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster.address
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def test_commands_share_a_cluster_with_others(address: str) -> None:
    @serve.deployment
    class Other:
        async def __call__(self) -> str:
            return "here"

    others: Any = serve.run(Other.bind(), name="other", route_prefix=None)  # type: ignore[attr-defined]
    commands = [ExitStack(), ExitStack()]
    try:
        with ThreadPoolExecutor() as pool:  # both start at the same moment
            ports = pool.map(lambda command: command.enter_context(deployed("--address", address))[0], commands)
        port, another = ports
        assert _ours() == 2
        assert _models(port) == _models(another)
        first, second = (read(one, STORY) for one in (port, another))
        assert first.content == second.content
        assert first.replica != second.replica
        commands[1].close()
        assert _ours() == 1
        assert read(port, STORY).content == first.content
    finally:
        for command in commands:
            command.close()
    assert set(serve.status().applications) == {"other"}
    assert others.remote().result() == "here"


def _ours() -> int:
    """The number of applications, not counting the other user's."""
    return len(serve.status().applications.keys() - {"other"})


def _models(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=SECONDS) as answer:
        return [model["id"] for model in json.load(answer)["data"]]
