"""The bits of a row depend on nothing else: not on B or T, other rows, its chunk or the number of threads.

Each op runs on a whole [B, T], and on a few tokens of one of its rows with another number of threads.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import DTYPES, random, same_bits
from torch import Tensor

from onward import native, ops
from onward.quantization import quantize_int4, quantize_int8, quantize_iq4_nl

# The definitions are torch's, whose sums go in an order that depends on the shape.
KERNELS_ALONE = True
LONGEST = 600
few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
threads = st.integers(1, 4)
seeds = st.integers(0, 2**16)
dtypes = st.sampled_from(DTYPES)
widths = st.sampled_from((1, 17, 64, 100, 333))


@st.composite
def cuts(draw) -> tuple[int, int, int, int, int]:
    """B, T, a row, and the first and last + 1 of some of its tokens; often one alone, often all."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, LONGEST))
    start = draw(st.integers(0, tokens - 1))
    end = draw(st.just(start + 1) | st.integers(start + 1, tokens))
    return batch, tokens, draw(st.integers(0, batch - 1)), start, end


cases = given(cut=cuts(), counts=st.tuples(threads, threads), seed=seeds, dtype=dtypes, width=widths)


def assert_batched_equals_alone(op: Callable[[Tensor], Tensor], x: Tensor, cut, counts) -> None:
    """op maps x [B, T, K] to [B, T, N]."""
    _, _, row, start, end = cut
    native.set_num_threads(counts[0])
    whole = op(x)
    native.set_num_threads(counts[1])
    assert same_bits(op(x[row : row + 1, start:end]), whole[row : row + 1, start:end])
    assert same_bits(op(x[row, start]), whole[row, start])


WEIGHTS = {
    "stock dtype": ops.pack,
    "int8": quantize_int8,
    "int4": quantize_int4,
    "iq4_nl": quantize_iq4_nl,
}


@pytest.mark.parametrize("weights", WEIGHTS)
@cases
@few
def test_linear(weights, cut, counts, seed, dtype, width):
    weight = WEIGHTS[weights](random(50, width, dtype=dtype, seed=seed))
    bias = random(50, dtype=dtype, seed=seed) if seed % 2 else None
    x = random(*cut[:2], width, dtype=dtype, seed=seed)
    assert_batched_equals_alone(lambda x: ops.linear(x, weight, bias), x, cut, counts)


NORMS = {
    "rms_norm": lambda x, weight: ops.rms_norm(x, weight),
    "rms_norm of 1 + w": lambda x, weight: ops.rms_norm(x, weight, offset=1.0),
    "layer_norm": lambda x, weight: ops.layer_norm(x, weight, weight),
    "swiglu": lambda x, _: ops.swiglu(x, -x),
    "geglu": lambda x, _: ops.geglu(x, -x),
    "add": lambda x, _: ops.add(x, x),
}


@pytest.mark.parametrize("op", NORMS)
@cases
@few
def test_norms_and_elementwise_ops(op, cut, counts, seed, dtype, width):
    weight = random(width, dtype=dtype, seed=seed)
    x = random(*cut[:2], width, dtype=dtype, seed=seed)
    assert_batched_equals_alone(lambda x: NORMS[op](x, weight), x, cut, counts)


@given(
    cut=cuts(),
    counts=st.tuples(threads, threads),
    seed=seeds,
    dtype=dtypes,
    heads=st.integers(1, 3),
    pairs=st.sampled_from((1, 8, 17)),
    interleaved=st.booleans(),
)
@few
def test_rope_and_rotate(cut, counts, seed, dtype, heads, pairs, interleaved):
    batch, tokens, row, start, end = cut
    x = random(batch, heads, tokens, 2 * pairs + 3, dtype=dtype, seed=seed)
    offsets = torch.arange(batch, dtype=torch.int32) * 1000 + seed
    cos, sin = ops.rotary_angles(100 * random(batch, tokens, pairs, seed=seed))
    one, part = slice(row, row + 1), slice(start, end)
    native.set_num_threads(counts[0])
    turned = ops.rope(x, offsets, dims=2 * pairs, scale=0.3, interleaved=interleaved)
    rotated = ops.rotate(x, cos, sin, interleaved=interleaved)
    native.set_num_threads(counts[1])
    alone = ops.rope(x[one, :, part], int(offsets[row]) + start, dims=2 * pairs, scale=0.3, interleaved=interleaved)
    assert same_bits(alone, turned[one, :, part])
    alone = ops.rotate(x[one, :, part], cos[one, part], sin[one, part], interleaved=interleaved)
    assert same_bits(alone, rotated[one, :, part])


@st.composite
def attentions(draw):
    """Keyword arguments of an attention, and its q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], S >= T."""
    batch, tokens, *_ = cut = draw(cuts())
    groups, group, dim = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((16, 17, 40)))
    dtype, seed, keys = draw(dtypes), draw(seeds), tokens + draw(st.integers(0, 700))
    q = 2 * random(batch, groups * group, tokens, dim, dtype=dtype, seed=seed)
    value_dim = draw(st.sampled_from((dim, 24)))
    k, v = (random(batch, groups, keys, width, dtype=dtype, seed=seed + i) for i, width in ((1, dim), (2, value_dim)))
    options = {
        "window": draw(st.none() | st.integers(1, keys)),
        "sinks": draw(st.none() | st.just(random(groups * group, seed=seed))),
        "softcap": draw(st.sampled_from((None, None, 2.0))),
    }
    return cut, q, k, v, options


@given(drawn=attentions(), counts=st.tuples(threads, threads), data=st.data())
@few
def test_cached_attention(drawn, counts, data):
    (batch, tokens, row, start, end), q, k, v, options = drawn
    room = k.shape[2] - tokens
    offsets = torch.tensor([data.draw(st.integers(0, room)) for _ in range(batch)], dtype=torch.int32)
    one, part = slice(row, row + 1), slice(start, end)
    native.set_num_threads(counts[0])
    whole = ops.cached_attention(q, k, v, offsets, **options)
    native.set_num_threads(counts[1])
    alone = ops.cached_attention(q[one, :, part], k[one], v[one], offsets[one] + start, **options)
    assert same_bits(alone, whole[one, :, part])


@given(drawn=attentions(), counts=st.tuples(threads, threads), causal=st.booleans())
@few
def test_dense_attention(drawn, counts, causal):
    (_, tokens, row, start, end), q, k, v, options = drawn
    causal = causal or options["window"] is not None
    mask = None if causal else random(tokens, k.shape[2])
    one, part = slice(row, row + 1), slice(start, end)
    # Bottom right: the keys of a causal part end where its last query stands.
    seen = slice(k.shape[2] - tokens + end if causal else k.shape[2])
    native.set_num_threads(counts[0])
    whole = ops.scaled_dot_product_attention(q, k, v, mask=mask, causal=causal, **options)
    native.set_num_threads(counts[1])
    alone = ops.scaled_dot_product_attention(
        q[one, :, part],
        k[one, :, seen],
        v[one, :, seen],
        mask=None if mask is None else mask[part],
        causal=causal,
        **options,
    )
    assert same_bits(alone, whole[one, :, part])
