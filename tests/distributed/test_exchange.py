"""The exchange through shared memory: everybody gets everybody's data of the same turn."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_threads import same

import onward
from onward.distributed.exchange import MOST_BYTES, Exchange, is_usable, new_file
from onward.errors import RankError
from onward.testing import random_checkpoint

pytestmark = pytest.mark.skipif(not is_usable(), reason="needs Linux on x86-64")


@pytest.mark.parametrize("world", [2, 3])
def test_all_get_all_in_order(world: int) -> None:
    file = new_file(world)
    ranks = [Exchange(file, rank, world) for rank in range(world)]
    file.unlink()

    def turns(rank: int) -> None:
        for turn in range(300):
            size = 1 + turn % 7
            got = ranks[rank].gathered(torch.full((2, size), rank * 1000 + turn, dtype=torch.bfloat16))
            wanted = [torch.full((2, size), other * 1000 + turn, dtype=torch.bfloat16) for other in range(world)]
            assert torch.equal(torch.cat(got), torch.cat(wanted))

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(turns, range(world)))


def test_a_dead_rank_is_noticed() -> None:
    def check() -> None:
        raise RankError("it has ended")

    file = new_file(2)
    exchange = Exchange(file, 0, 2, check)
    file.unlink()
    with pytest.raises(RankError, match="ended"):
        exchange.gathered(torch.zeros(3))
    assert not exchange.takes(torch.zeros(MOST_BYTES))


def test_processes_exchange_through_memory(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, dtype=torch.bfloat16)
    one, split = onward.load(folder), onward.load(folder, tensor=2)
    exchange = split.model.forward.group.links.exchange
    assert exchange is not None
    assert not exchange.file.exists(), "it lives in memory alone"
    assert same(one, split, temperature=0)
