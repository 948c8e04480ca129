"""A machine of a cluster, or Ray's control store, is lost in the middle of a text."""

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.replicas import wait_for_replicas
from streams import STORY, Stream, ancestors, check_same, descendants, free_port, read, undisturbed

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.context import _set_global_client

    from onward.cluster.deployment import application, running
    from onward.cluster.options import DeployOptions
    from onward.errors import RequestError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

# A replica takes all of a machine but the first, on which the proxy and the ingress are.
OPTIONS = DeployOptions(replicas=2, cpus=2, threads=1, retries={"silence": 4.0})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def port(cluster: Any) -> Iterator[int]:
    """Of Ray's own proxy, with the ingress as a deployment."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        # Ray would start a proxy on each machine. All of these machines have one address, so that a client would
        # reach any of them, the lost one too.
        serve.start(http_options={"host": "127.0.0.1", "port": (free := free_port()), "location": "HeadOnly"})
        serve.run(application(OPTIONS), name="onward", route_prefix="/")
        yield free
    finally:
        ray.shutdown()
        _set_global_client(None)  # of a cluster whose memory is gone by now, which Ray Serve would ask first


@pytest.mark.parametrize("at", [0, 20])
@pytest.mark.parametrize("fault", ["killed", "its raylet hangs", "it hangs"])
def test_a_lost_machine(port: int, cluster: Any, fault: str, at: int) -> None:
    """Before the first token, and in the middle. Another machine takes its place."""
    wait_for_replicas(OPTIONS.replicas)
    expected = undisturbed(port, STORY)
    lost: list[int] = []  # its raylet, and everything else that is stopped

    def lose_it(stream: Stream) -> None:
        of_replica = stream.pid or expected.pid  # before it answers, it is most likely the same
        is_raylet = [b"raylet" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ancestors(of_replica)]
        lost.append(ancestors(of_replica)[is_raylet.index(True)])
        lost.extend(descendants(lost[0]) if fault == "it hangs" else [])
        for pid in lost:
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    try:
        got = read(port, STORY, at, lose_it)
    finally:
        node = next(node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid == lost[0])
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    check_same(got, expected)


def test_a_client_resumes_its_stream_after_losing_the_ingress(port: int) -> None:
    expected = undisturbed(port, STORY)

    def kill_ingress(stream: Stream) -> None:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read().startswith(b"ray::ServeReplica:onward:Ingress") and os.getpid() in ancestors(int(pid)):
                    os.kill(int(pid), signal.SIGKILL)

    first = read(port, STORY, 20, kill_ingress)
    assert not first.is_whole
    end = time.monotonic() + 60
    while True:
        rest = read(port, STORY, headers={"Last-Event-ID": first.last_id})
        if rest.status == 200 or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert rest.is_whole
    first.events += rest.events
    assert first.content == expected.content


@pytest.mark.parametrize(("fault", "at"), [("hangs", 0), ("hangs", 20), ("is killed", 20)])  # it does not come back
def test_streams_continue_without_the_gcs(port: int, cluster: Any, fault: str, at: int) -> None:
    expected = undisturbed(port, STORY)
    if fault == "is killed":
        got = read(port, STORY, at, lambda _: cluster.head_node.kill_gcs_server())
    else:
        memory = cluster.head_node.all_processes["gcs_server"][0].process
        try:
            got = read(port, STORY, at, lambda _: memory.send_signal(signal.SIGSTOP))
        finally:
            memory.send_signal(signal.SIGCONT)
    check_same(got, expected)


def test_an_unreachable_address() -> None:
    for address in (f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{free_port()}"):
        with pytest.raises(RequestError, match="no Ray cluster answers at"), running(OPTIONS, address=address, port=0):
            pass
