"""The dense cache writes at the given positions, and nowhere else."""

import os
import sys
from pathlib import Path

import pytest
import torch
from rounding import random

from onward import KVCache, ops
from onward.cache import SizedCache
from onward.errors import RequestError

NAN = float("nan")


def empty(batch=3, max_len=9):
    cache = KVCache.new(
        num_layers=2,
        batch=batch,
        num_kv_heads=2,
        max_len=max_len,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for buffer in (*cache.keys, *cache.values):
        buffer.fill_(NAN)
    return cache


def write(cache, layer, k, v, offsets):
    ops.write_cache(cache.keys[layer], k, offsets)
    ops.write_cache(cache.values[layer], v, offsets)


def test_each_row_is_written_only_at_its_own_positions():
    cache = empty()
    k, v = random(3, 2, 3, 4), random(3, 2, 3, 4, seed=1)
    offsets = [0, 6, 2]
    write(cache, 1, k, v, torch.tensor(offsets, dtype=torch.int32))
    for buffer, new in ((cache.keys[1], k), (cache.values[1], v)):
        for row, offset in enumerate(offsets):
            assert torch.equal(buffer[row, :, offset : offset + 3], new[row])
        assert buffer.isfinite().sum() == new.numel()
    assert cache.keys[0].isnan().all()
    assert cache.values[0].isnan().all()


def test_writing_again_overwrites():
    cache = empty(batch=1)
    at = torch.tensor([4], dtype=torch.int32)
    write(cache, 0, random(1, 2, 1, 4), random(1, 2, 1, 4), at)
    k, v = random(1, 2, 1, 4, seed=5), random(1, 2, 1, 4, seed=6)
    write(cache, 0, k, v, at)
    assert torch.equal(cache.keys[0][:, :, 4:5], k)
    assert torch.equal(cache.values[0][:, :, 4:5], v)


def test_a_row_past_the_end_is_refused():
    cache = empty()
    at = torch.tensor([0, 7, 0], dtype=torch.int32)
    with pytest.raises(RequestError, match="9 positions has no room for 3 at 7"):
        write(cache, 0, random(3, 2, 3, 4), random(3, 2, 3, 4), at)


def test_traced_and_eager_write_the_same():
    k, v, at = random(3, 2, 3, 4), random(3, 2, 3, 4, seed=1), torch.tensor([0, 6, 2], dtype=torch.int32)
    eager, compiled = empty(), empty()
    write(eager, 0, k, v, at)
    torch.compile(lambda cache: write(cache, 0, k, v, at), fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(eager.keys[0].nan_to_num(7.0), compiled.keys[0].nan_to_num(7.0))
    assert torch.equal(eager.values[0].nan_to_num(7.0), compiled.values[0].nan_to_num(7.0))


def test_a_cache_reports_its_size():
    cache = empty(batch=3, max_len=9)
    assert (cache.batch, cache.max_len) == (3, 9)
    assert cache.nbytes == 2 * 2 * (3 * 2 * 9 * 4) * 4
    assert isinstance(cache, SizedCache)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_cache_takes_memory_as_it_is_written():
    before = _resident_bytes()
    cache = KVCache.new(
        num_layers=2,
        batch=1,
        num_kv_heads=2,
        max_len=1 << 19,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert cache.nbytes == 1 << 29
    cache.keys[1][0, 1, :1000] = 1.0
    # A tenth of it would be far more than page tables and other memory of the process.
    assert _resident_bytes() - before < cache.nbytes // 10
    assert cache.keys[1][0, 1, :1001].sum() == 1000 * 64
    assert not cache.values[1][0, 1, :1000].any()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_device_may_be_named():
    for device in ("cpu", torch.device("cpu"), "meta"):
        cache = KVCache.new(
            num_layers=1, batch=2, num_kv_heads=1, max_len=4, head_dim=2, dtype=torch.float32, device=device
        )
        assert {leaf.device for leaf in (*cache.keys, *cache.values)} == {torch.device(device)}
