"""Rows of 8-bit integers with a scale: kernels write and read the same rows as the definition."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import random

from onward import ops
from onward.ops.heads import BLOCK
from onward.ops.kv_format import FORMATS

INT8 = FORMATS[torch.int8]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
drawn = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def empty(batch, heads, positions, dim):
    return torch.full((batch, heads, positions, INT8.width(dim)), 85, dtype=torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 24, 64, 80, 128, 576])
def test_rows_equal_those_stored_by_the_format(form, dtype, dim):
    new = random(2, 3, 20, dim).to(dtype)
    new[0, 0, :8] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1e-38, 1e-5, 6e4, -6e4]).to(dtype)[:, None]
    new[0, 1, 0, 0], new[0, 1, 1, 0], new[0, 1, 2, dim // 2] = torch.nan, torch.inf, 5e4
    cache, offsets = empty(2, 3, 40, dim), torch.tensor([3, 20], dtype=torch.int32)
    expected = cache.clone()
    ops.write_cache(cache, new, offsets)
    for row, start in enumerate(offsets.tolist()):
        expected[row, :, start : start + 20] = INT8.store(new[row])
    # The payload of a NaN is arbitrary.
    scales = [each[..., dim:].contiguous().view(torch.float32) for each in (cache, expected)]
    assert torch.equal(*(scale.nan_to_num(7.0) for scale in scales))
    assert torch.equal(cache[..., :dim], expected[..., :dim])


def test_a_row_loads_within_half_a_step_of_its_source():
    new = random(4, 2, 50, 64) * torch.logspace(-20, 20, 50).unsqueeze(1)
    step = new.abs().amax(-1, keepdim=True) / 127
    assert ((INT8.load(INT8.store(new)) - new).abs() <= step * (0.5 + 127 * 2**-22)).all()
    broken = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [1.0, -torch.inf]])
    assert INT8.load(INT8.store(broken)).isnan().all()
    assert torch.equal(INT8.load(INT8.store(torch.full((3, 8), 1e-31))), torch.zeros(3, 8))


@drawn
@given(
    dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3), tokens=st.sampled_from((1, 2, 5, 64, 130)),
    past=st.integers(0, 700), group=st.sampled_from((1, 2, 5, 8)), dim=st.sampled_from((8, 24, 64, 128)),
    latent=st.booleans(), paged=st.booleans(), window=st.sampled_from((None, 1, 70)), with_sinks=st.booleans(),
    softcap=st.sampled_from((None, 1.5)), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_attention_equals_that_of_the_loaded_rows(
    form, dtype, batch, tokens, past, group, dim, latent, paged, window, with_sinks, softcap, seed
):
    """To the rounding of weights, of outputs and of sums of up to 830 products below 4 in magnitude: a weight is
    rounded to the dtype, by half a step of it relative to a value below 4, and so is an output. Kernels sum integers,
    without an error; instead queries and weights are rounded by at most 2^-16 of the largest of a head or block."""
    heads, value_dim = 2, max(1, dim // 2) if latent else dim
    length = -(-(past + tokens) // BLOCK) * BLOCK
    starts = torch.tensor([max(0, past - 3 * row) for row in range(batch)], dtype=torch.int32)
    rows = [INT8.store(random(batch, heads, length, dim, seed=seed % 1000 + i).clamp(-4, 4)) for i in range(2)]
    q = random(batch, heads * group, tokens, dim, seed=7).clamp(-4, 4).to(dtype)
    options = {
        "window": window, "softcap": softcap, "scale": 0.3 / dim**0.5,
        "sinks": random(heads * group, seed=3) if with_sinks else None,
    }  # fmt: skip
    keys, values, table = *rows, None
    if paged:
        order = torch.randperm(batch * length // BLOCK, generator=torch.Generator().manual_seed(seed))
        table = order.view(batch, -1).to(torch.int32)
        keys, values = (torch.empty(len(order), heads, BLOCK, x.shape[3], dtype=torch.int8) for x in rows)
        for to, x in zip((keys, values), rows, strict=True):
            to[order] = x.unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1)
    own = {"value_dim": value_dim} if latent else {}
    got = ops.cached_attention(q, keys, None if latent else values, starts, table=table, **own, **options)
    k, v = (INT8.load(x) for x in rows)
    for row, start in enumerate(starts.tolist()):
        end = start + tokens
        v_row = (k[..., :value_dim] if latent else v)[row : row + 1, :, :end]
        expected = ops.attention.reference(
            q[row : row + 1].float(), k[row : row + 1, :, :end], v_row, causal=True, **options
        )
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(got[row : row + 1].float(), expected, rtol=0, atol=4 * (2 * unit + 830 * 2**-23))


@pytest.mark.parametrize("dim", [32, 128, 576, 2048])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_the_largest_features_fit(form, dim, sign):
    """All features of queries and keys at their largest: the score of every key but one is `sign`, and that one's 0."""
    k, v = torch.full((1, 1, BLOCK, dim), 2.0), torch.zeros(1, 1, BLOCK, dim)
    k[:, :, 5], v[:, :, 5] = 0.0, 1.0
    q, last = torch.full((1, 1, 1, dim), sign / 2 / dim), torch.tensor([BLOCK - 1], dtype=torch.int32)
    got = ops.cached_attention(q, INT8.store(k), INT8.store(v), last, scale=1.0)
    expected = 1 / (1 + (BLOCK - 1) * torch.tensor(sign).exp())
    torch.testing.assert_close(got, expected.expand_as(got), rtol=2**-13, atol=0)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_nonfinite_queries_and_values_reach_only_what_attends_to_them(form, tokens):
    """A query of zeros gives the mean of its values; one with a NaN or an infinite feature gives NaN, and so does every
    query that sees such a value."""
    heads, dim, past = 4, 64, 100
    q, k, v = (random(1, n, past + tokens, dim, seed=n) for n in (heads, 2, 2))
    q, at = q[:, :, past:].clone(), torch.tensor([past], dtype=torch.int32)
    rows = [torch.nn.functional.pad(INT8.store(x), (0, 0, 0, 192 - past - tokens)) for x in (k, v)]
    plain = ops.cached_attention(q, *rows, at)
    q[0, 0, 0], q[0, 1, 0, 3], q[0, 2, 0, 5] = 0.0, torch.nan, torch.inf
    got = ops.cached_attention(q, *rows, at)
    torch.testing.assert_close(got[0, 0, 0], INT8.load(rows[1])[0, 0, : past + 1].mean(0), rtol=0, atol=2**-13)
    assert got[0, 1:3, 0].isnan().all()
    assert torch.equal(got[0, 3], plain[0, 3])
    assert torch.equal(got[:, :, 1:], plain[:, :, 1:])
    v[0, 1, past + tokens - 1, 7] = torch.nan
    rows[1][:, :, : past + tokens] = INT8.store(v)
    got = ops.cached_attention(q, *rows, at)
    assert got[0, 2:, -1].isnan().all()
    if form != "definition":  # there a weight of 0 doesn't hide a NaN
        assert torch.equal(got[0, 3, :-1], plain[0, 3, :-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
def test_chunks_batches_and_single_queries_have_the_same_bits(form, dtype, paged):
    if form == "definition":
        pytest.skip("torch promises no bits")
    dim, total = 64, 300
    q, k, v = (random(3, heads, total, dim, seed=heads).to(dtype) for heads in (4, 2, 2))
    blocks = -(-total // BLOCK)
    table = torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(1)).view(3, -1).to(torch.int32)

    def attended(rows, steps):
        shape = (3 * blocks, 2, BLOCK, dim) if paged else (len(rows), 2, blocks * BLOCK, dim)
        keys, values = empty(*shape), empty(*shape)
        own, outs, at = table[rows] if paged else None, [], 0
        for step in steps:
            offsets = torch.full((len(rows),), at, dtype=torch.int32)
            part = slice(at, at + step)
            ops.write_cache(keys, k[rows][:, :, part], offsets, own)
            ops.write_cache(values, v[rows][:, :, part], offsets, own)
            outs.append(ops.cached_attention(q[rows][:, :, part], keys, values, offsets, table=own))
            at += step
        return torch.cat(outs, 2)

    whole = attended([0, 1, 2], [total])
    for rows in ([0], [1, 2]):
        for steps in ([1] * total, [7, 100, 1, 192], [total - 1, 1]):
            assert torch.equal(attended(rows, steps), whole[rows])
