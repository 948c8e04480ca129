"""Paged caches: the ops and the cache give the results of the dense cache."""

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import random

from onward import ops
from onward.cache import CachePlan, KVCache, KVPool, LayerShape, PagedKVCache, SizedCache
from onward.errors import RequestError
from onward.ops.heads import BLOCK
from onward.program import NamedDims
from onward.testing import tiny_model

PLAN = CachePlan((LayerShape(2, 8, 8),) * 2, torch.float32)


def shuffled(batch, blocks_a_row, seed=0):
    """A cache over blocks in an order drawn by lot, full of NaN."""
    return filled(KVPool(PLAN, batch * blocks_a_row + 2), batch, blocks_a_row, seed)


def filled(blocks, batch, blocks_a_row, seed=0):
    order = torch.randperm(blocks.count, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    cache = blocks.view(order[: batch * blocks_a_row].view(batch, blocks_a_row))
    for leaf in (*cache.keys, *cache.values):
        leaf.fill_(float("nan"))
    return cache


def dense_copy(cache):
    """The rows of layer 1, [B, G, S, D]: keys and values."""
    return [leaf[cache.table.long()].transpose(1, 2).flatten(2, 3) for leaf in (cache.keys[1], cache.values[1])]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3), blocks_a_row=st.integers(1, 4), tokens=st.sampled_from((1, 3, 64, 100)),
    window=st.sampled_from((None, 1, 70)), with_sinks=st.booleans(), softcap=st.sampled_from((None, 1.5)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)  # fmt: skip
def test_paged_attention_equals_the_dense_cache(
    form, batch, blocks_a_row, tokens, window, with_sinks, softcap, seed, data
):
    """And it writes the same places. With kernels bit for bit; else to the rounding of sums of up to 256 products below
    4 (each within 256 / 2 * 2^-23 of the exact sum, relative to 4)."""
    tokens = min(tokens, BLOCK * blocks_a_row)
    paged = shuffled(batch, blocks_a_row, seed=seed)
    dense = KVCache.of(PLAN, batch, paged.max_len)
    starts = [data.draw(st.integers(0, paged.max_len - tokens)) for _ in range(batch)]
    for row, start in enumerate(starts):  # the past
        for dense_leaf, leaf in zip((*dense.keys, *dense.values), (*paged.keys, *paged.values), strict=True):
            dense_leaf[row] = float("nan")
            dense_leaf[row, :, :start] = random(2, start, 8, seed=row)
            whole = dense_leaf[row].unflatten(1, (blocks_a_row, BLOCK))
            leaf[paged.table[row].long()] = whole.transpose(0, 1)
        paged.table[row, -(-(start + tokens) // BLOCK) :] = -1
    q, k, v = random(batch, 4, tokens, 8), random(batch, 2, tokens, 8, seed=1), random(batch, 2, tokens, 8, seed=2)
    offsets = torch.tensor(starts, dtype=torch.int32)
    options = {"window": window, "sinks": random(4, seed=3) if with_sinks else None, "scale": 0.3, "softcap": softcap}
    wanted, got = (cache.attend(1, q, k, v, offsets, **options) for cache in (dense, paged))
    if form != "definition":
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, rtol=0, atol=256 * 2**-23 * 4)
    for row, start in enumerate(starts):
        end = start + tokens
        for leaf, dense_leaf in ((paged.keys[1], dense.keys[1]), (paged.values[1], dense.values[1])):
            blocks = leaf[paged.table[row, : -(-end // BLOCK)].long()].transpose(0, 1).flatten(1, 2)
            assert torch.equal(blocks[:, :end], dense_leaf[row, :, :end])
            assert blocks[:, end:].isnan().all()
    assert paged.keys[0].isfinite().sum() == sum(starts) * 2 * 8


def test_a_compiled_call_writes_and_returns_the_same():
    paged, other = shuffled(2, 2), shuffled(2, 2)
    q, k, v = random(2, 4, 3, 8), random(2, 2, 3, 8, seed=1), random(2, 2, 3, 8, seed=2)
    offsets = torch.tensor([0, 62], dtype=torch.int32)
    paged.attend(1, *(random(2, 2, 62, 8),) * 3, torch.zeros(2, dtype=torch.int32))
    other.attend(1, *(random(2, 2, 62, 8),) * 3, torch.zeros(2, dtype=torch.int32))
    compiled = torch.compile(lambda cache: cache.attend(1, q, k, v, offsets), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(other), paged.attend(1, q, k, v, offsets))
    for ours, theirs in zip(dense_copy(paged), dense_copy(other), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_gradients_flow_through_the_table():
    paged = shuffled(1, 2)
    k = random(1, 2, 70, 8)
    paged.attend(1, k, k, k, torch.zeros(1, dtype=torch.int32))
    q = random(1, 4, 1, 8).requires_grad_()
    keys, values = dense_copy(paged)
    at = torch.tensor([69], dtype=torch.int32)
    dense = torch.autograd.grad(ops.cached_attention(q, keys, values, at).sum(), q)
    through = ops.cached_attention(q, paged.keys[1], paged.values[1], at, table=paged.table)
    torch.testing.assert_close(torch.autograd.grad(through.sum(), q), dense)


def test_under_autocast_only_the_rows_blocks_are_cast():
    paged = shuffled(1, 2)
    k = random(1, 2, 70, 8)
    paged.attend(1, k, k, k, torch.zeros(1, dtype=torch.int32))
    keys, values = dense_copy(paged)
    q, at = random(1, 4, 1, 8).bfloat16(), torch.tensor([69], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.cached_attention(q, paged.keys[1], paged.values[1], at, table=paged.table)
        assert torch.equal(got, ops.cached_attention(q, keys, values, at))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 99]], "blocks 0 to 6; row 0 of the table names"),
        ([[0, -1]], "blocks 0 to 6; row 0 of the table names"),
        ([[0]], "64 positions has no room for 2 at 63"),
        ([[0, 1], [2, 3]], r"int32 \[B, M\], over blocks \[N, G, 64, D\], for 1 rows"),
    ],
)
def test_a_mismatched_table_is_refused(table, message):
    paged = KVPool(PLAN, 6).view(torch.tensor(table, dtype=torch.int32))
    k, at = random(1, 2, 2, 8), torch.tensor([63], dtype=torch.int32)
    with pytest.raises(RequestError, match=message):
        paged.attend(0, k, k, k, at)
    with pytest.raises(RequestError, match=message):
        ops.cached_attention(k, paged.keys[0], paged.values[0], at, table=paged.table)
    assert not paged.keys[0].any()


@pytest.mark.parametrize("table", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.int32), torch.zeros(3, 2).int().T])
def test_a_view_needs_a_table_of_int32_rows(table):
    with pytest.raises(RequestError, match=r"int32 \[B, M\] with contiguous rows"):
        KVPool(PLAN, 6).view(table)


def test_dense_blocks_must_have_64_positions():
    cache, new, zero = torch.zeros(4, 2, 32, 8), random(1, 2, 1, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RequestError, match=r"over blocks \[N, G, 64, D\]"):
        ops.write_cache(cache, new, zero, torch.zeros(1, 1, dtype=torch.int32))


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────


def test_views_share_tensors_and_report_their_size():
    blocks = KVPool(replace(PLAN, dtype=torch.bfloat16), 5)
    one, other = (blocks.view(torch.zeros(rows, 3, dtype=torch.int32)) for rows in (2, 4))
    assert one.keys is other.keys
    assert one.values is other.values
    assert (other.batch, other.max_len) == (4, 192)
    assert blocks.block_nbytes == 2 * 2 * 2 * 64 * 8 * 2
    assert isinstance(one, SizedCache)
    assert isinstance(one, NamedDims)
    assert "4 rows of 3 blocks" in repr(other)
    assert "5 blocks of 64 positions" in repr(blocks)


@pytest.mark.parametrize("positions", [0, 1, 63, 64])
def test_a_copy_covers_the_first_positions_of_all_layers(positions):
    blocks = KVPool(PLAN, 3)
    cache = filled(blocks, 1, 1)
    source, to = cache.table[0, 0].item(), (cache.table[0, 0].item() + 1) % blocks.count
    for layer, leaf in enumerate((*cache.keys, *cache.values)):
        leaf[source] = random(2, 64, 8, seed=layer)
    blocks.copy(source, to, positions)
    for leaf in (*cache.keys, *cache.values):
        assert torch.equal(leaf[to, :, :positions], leaf[source, :, :positions])
        assert leaf[to, :, positions:].isnan().all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_blocks_take_memory_as_they_are_written_and_release_it():
    blocks = KVPool(CachePlan((LayerShape(2, 64, 64),) * 2, torch.bfloat16), 1 << 22)
    assert blocks.count * blocks.block_nbytes == 1 << 38  # more than the machine has
    before = _resident_bytes()
    cache = blocks.view(torch.arange(512, dtype=torch.int32).view(1, -1) + 3)
    cache.keys[1][3:515] = 1.0
    cache.values[1][3:515] = 1.0
    grown = _resident_bytes() - before
    assert grown > 8 << 20
    blocks.give_back([*range(3, 260), 262, *range(263, 515)])
    # Two blocks are left; a block is 64 kB.
    assert _resident_bytes() - before < grown // 4
    assert cache.keys[1][260:262].min() == 1.0
    assert not cache.keys[1][3:260].any()
    assert not cache.values[1][262:515].any()


def test_releasing_blocks_without_their_own_mapping_does_nothing():
    blocks = KVPool(PLAN, 3)
    cache = filled(blocks, 1, 1)
    blocks.give_back(range(3))
    assert cache.keys[0].isnan().all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how large a map may be is the system's to say")
def test_failed_allocations_are_a_clear_error():
    with pytest.raises(RequestError, match=r"cannot allocate .*TB for a cache"):
        KVPool(CachePlan((LayerShape(8, 128, 128),) * 8, torch.float32), 1 << 40)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_quantized_and_pickled_models_allocate_blocks_too():
    from onward.language_model import quantize

    model = tiny_model("qwen3", hidden_size=64, intermediate_size=96)
    for each in (model, quantize(model, "int8"), pickle.loads(pickle.dumps(model))):
        cache = each.new_blocks(3).view(torch.zeros(1, 2, dtype=torch.int32))
        assert isinstance(cache, PagedKVCache)
        assert cache.keys[0].dtype == model.new_cache(1, 1).keys[0].dtype
        assert len(cache.keys) == len(model.new_cache(1, 1).keys)
