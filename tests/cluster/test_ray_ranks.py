"""Ranks as Ray actors in a placement group; replicas whose models are divided into ranks."""

import os
import signal
import time
import warnings
from collections.abc import Iterator

import pytest
from streams import STORY, ancestors, check_same, free_port, read, signal_it, undisturbed

import onward
from onward.distributed import launchers as ray_ranks
from onward.errors import RankError, RequestError

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray

    from onward.cluster.deployment import running
    from onward.cluster.options import DeployOptions

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def test_ranks_in_a_placement_group(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = onward.load("demo").generate("Once upon", max_new_tokens=32, seed=4)
    lm = onward.load("demo", pipeline=3, address="ray")
    got = lm.generate("Once upon", max_new_tokens=32, seed=4)
    assert got.token_ids == expected.token_ids
    (group,) = ray.util.placement_group_table().values()
    assert (group["state"], len(group["bundles"])) == ("CREATED", 2)
    monkeypatch.setattr(ray_ranks, "_PLACEMENT_TIMEOUT", 2.0)
    with pytest.raises(RankError, match="no 1 free processors"):
        onward.load("demo", pipeline=2, address="ray")
    stream = lm.stream("Once upon", max_new_tokens=1000, ignore_eos=True)
    next(stream)
    ray.kill(lm.model.forward.group.processes._actors[1])  # type: ignore[attr-defined]
    with pytest.raises(RankError, match="rank"):
        list(stream)
    del lm, stream
    lm = onward.load("demo", pipeline=2, address="ray")
    assert lm.generate("Once upon", max_new_tokens=32, seed=4).token_ids == expected.token_ids


def test_ray_must_be_installed() -> None:
    with pytest.raises(RequestError, match="and this one isn't connected"):
        onward.load("demo", pipeline=2, address="ray")


def test_replicas_of_two_ranks_each() -> None:
    options = DeployOptions(replicas=2, threads=1, load={"pipeline": 2}, retries={"quarantine": 0.0})
    whole = onward.load("demo").generate(STORY["prompt"], max_new_tokens=400, temperature=0.5, seed=10)
    with running(options, port=(port := free_port())):
        expected = undisturbed(port, STORY)
        assert expected.content[0][0][1][0] == whole.text
        got = read(port, STORY, 20, signal_it(signal.SIGKILL))
        check_same(got, expected)
        served_by = undisturbed(port, STORY)
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        (rank,) = [pid for pid in pids if _is_rank_of(pid, served_by.pid)]
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + 90
        while (again := undisturbed(port, STORY)).replica == served_by.replica and time.monotonic() < end:
            time.sleep(0.5)
        check_same(again, expected)
        assert again.replica != served_by.replica, "a replica that lost a rank is replaced"


def _is_rank_of(pid: int, replica: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"onward.distributed" in file.read() and ancestors(pid)[0] == replica
    except OSError:
        return False
