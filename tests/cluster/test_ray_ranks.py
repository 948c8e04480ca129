"""Ranks of a model as actors of Ray, in a placement group."""

import os
import warnings
from collections.abc import Iterator

import pytest

import onward
from onward.distributed import ray_ranks
from onward.errors import RankError, RequestError

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray

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
    monkeypatch.setattr(ray_ranks, "_ROOM", 2.0)
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


def test_ray_has_to_be_there() -> None:
    with pytest.raises(RequestError, match="this process is in none"):
        onward.load("demo", pipeline=2, address="ray")
