"""Attention, compared with its definition in float64: grouped, causal to the bottom right, windowed, cached."""

import itertools
from functools import lru_cache

import pytest
import torch
from rounding import DTYPES, UNIT, assert_within, random

from onward import ops
from onward.errors import RequestError
from onward.ops.attention import reference

FORMS = {"fast": ops.scaled_dot_product_attention, "reference": reference}
# (queries, keys): equal, one query, fewer queries than keys, and more of both than any block they may be cut into.
LENGTHS = [(1, 1), (1, 33), (3, 3), (3, 17), (17, 31), (31, 33), (33, 127), (127, 127), (257, 300)]
HEADS = [(1, 1, 1), (4, 2, 16), (6, 1, 3), (3, 3, 33)]  # (query heads, key/value heads, features)


def definition(q, k, v, *, visible=None, scale=None, softcap=None):
    """softmax(q k^T * scale) v in float64, over the keys `visible` bool [T, S]; and the bound of its rounding.

    Scores are sums of D products: delta is how far float32 (or, for a short dtype, one rounding of a score to it)
    may move one. A softcap brings scores nearer to each other, and rounds them: a division, a tanh, a product. A score
    moved by delta multiplies its weight by e^(2 delta) at most, after normalisation; then come the weights' own
    rounding, S + 4 float32 operations, and the last rounding.
    """
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = (t.to(torch.float64) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q64 @ k64.transpose(-1, -2) * scale
    size = (q64.abs() @ k64.abs().transpose(-1, -2) * scale).max()
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    roundings = q.shape[-1] + 2 + 8 * (softcap is not None)
    delta = (roundings * UNIT[torch.float32] + (q.dtype != torch.float32) * 2 * UNIT[q.dtype]) * size
    weights = 2 * UNIT[q.dtype] + (k.shape[2] + 4) * UNIT[torch.float32]
    return scores.softmax(-1) @ v64, (torch.expm1(2 * delta) + weights) * v64.abs().max()


@lru_cache
def bottom_right(queries, keys, window=None):
    """Said by loops, to share nothing with the code: query i is at position keys - queries + i."""
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(keys)):
        at = keys - queries + i
        visible[i, j] = j <= at and (window is None or j > at - window)
    return visible


def qkv(queries, keys, heads, dtype=torch.float32, batch=2):
    query_heads, kv_heads, dim = heads
    return (
        random(batch, query_heads, queries, dim, dtype=dtype),
        random(batch, kv_heads, keys, dim, dtype=dtype, seed=1),
        random(batch, kv_heads, keys, dim, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_without_a_mask_equals_its_definition(which, lengths, heads):
    q, k, v = qkv(*lengths, heads)
    assert_within(FORMS[which](q, k, v), *definition(q, k, v))
    assert_within(FORMS[which](q, k, v, scale=0.7), *definition(q, k, v, scale=0.7))


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 40, 150])
def test_causal_is_aligned_bottom_right_and_windows_end_at_the_query(which, lengths, heads, window):
    q, k, v = qkv(*lengths, heads)
    visible = bottom_right(*lengths, window)
    assert_within(FORMS[which](q, k, v, causal=True, window=window), *definition(q, k, v, visible=visible))


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_short_dtypes_lose_only_their_rounding(which, dtype, lengths):
    q, k, v = qkv(*lengths, (4, 2, 16), dtype)
    got = FORMS[which](q, k, v, causal=True, window=5)
    assert got.dtype == dtype
    assert_within(got, *definition(q, k, v, visible=bottom_right(*lengths, 5)))


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 20])
def test_a_softcap_is_applied_before_the_mask(which, dtype, lengths, softcap):
    q, k, v = qkv(*lengths, (4, 2, 16), dtype)
    got = FORMS[which](3 * q, k, v, causal=True, softcap=softcap)
    assert_within(got, *definition(3 * q, k, v, visible=bottom_right(*lengths), softcap=softcap))


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (33, 5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_values_may_have_another_width(which, lengths, widths, causal):
    q, k, _ = qkv(*lengths, (4, 2, widths[0]))
    _, _, v = qkv(*lengths, (4, 2, widths[1]))
    got = FORMS[which](q, k, v, causal=causal)
    assert got.shape == (*q.shape[:3], widths[1])
    assert_within(got, *definition(q, k, v, visible=bottom_right(*lengths) if causal else None))


def test_fewer_queries_equal_the_last_rows_of_the_whole():
    q, k, v = qkv(33, 33, (4, 2, 16))
    whole = ops.scaled_dot_product_attention(q, k, v, causal=True)
    last = ops.scaled_dot_product_attention(q[:, :, -7:], k, v, causal=True)
    _, bound = definition(q, k, v, visible=bottom_right(33, 33))
    assert_within(last, whole[:, :, -7:].to(torch.float64), 2 * bound)


OFFSETS = [0, 13, 30, 6]
ROOM = 40


@pytest.mark.parametrize("tokens", [1, 3, 10])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_cached_attention_reads_each_row_to_its_own_length(tokens, window, heads):
    """Every position that no query of the row may see is NaN: past its last one, and before its window."""
    q, keys, values = qkv(tokens, ROOM, heads, batch=len(OFFSETS))
    want = []
    for row, offset in enumerate(OFFSETS):
        end, start = offset + tokens, 0 if window is None else max(0, offset + 1 - window)
        k, v = keys[row : row + 1, :, start:end].clone(), values[row : row + 1, :, start:end].clone()
        want.append(definition(q[row : row + 1], k, v, visible=bottom_right(tokens, end - start, window)))
        for buffer in (keys, values):
            buffer[row, :, end:] = float("nan")
            buffer[row, :, :start] = float("nan")
    got = ops.cached_attention(q, keys, values, torch.tensor(OFFSETS, dtype=torch.int32), window=window)
    assert_within(got, torch.cat([exact for exact, _ in want]), max(bound for _, bound in want))


def test_cached_attention_refuses_positions_past_the_cache():
    q, keys, values = qkv(3, 8, (4, 2, 16))
    with pytest.raises(RequestError, match="8 positions has no room for"):
        ops.cached_attention(q, keys, values, torch.tensor([0, 6], dtype=torch.int32))


@pytest.mark.parametrize("window", [0, -1])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_window_that_excludes_the_query_is_refused(queries, window):
    with pytest.raises(RequestError, match=f"window must be .* got {window}"):
        ops.scaled_dot_product_attention(*qkv(queries, 5, (2, 1, 4)), causal=True, window=window)


@pytest.mark.parametrize("softcap", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_softcap_must_be_finite_and_positive(softcap):
    with pytest.raises(RequestError, match=f"softcap must be .* got {softcap!r}"):
        ops.scaled_dot_product_attention(*qkv(1, 5, (2, 1, 4)), softcap=softcap)


def test_causal_with_more_queries_than_keys_is_refused():
    with pytest.raises(RequestError, match="3 keys, 5 queries"):
        ops.scaled_dot_product_attention(*qkv(5, 3, (2, 1, 4)), causal=True)


def test_an_unknown_option_raises():
    with pytest.raises(TypeError, match="dropout"):
        ops.scaled_dot_product_attention(*qkv(1, 1, (1, 1, 1)), dropout=0.5)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 3, 1, 4), (1, 2, 5, 4), (1, 2, 5, 4)),  # heads no multiple of key/value heads
        ((1, 2, 1, 4), (1, 2, 5, 4), (1, 2, 6, 4)),  # more values than keys
        ((1, 2, 1, 4), (1, 2, 5, 3), (1, 2, 5, 3)),  # other features
        ((2, 2, 1, 4), (1, 2, 5, 4), (1, 2, 5, 4)),  # other rows
        ((2, 1, 4), (2, 5, 4), (2, 5, 4)),  # no batch
        ((1, 2, 1, 4), (1, 0, 5, 4), (1, 0, 5, 4)),  # no keys for any head
    ],
)
def test_mismatched_shapes_are_refused(shapes):
    with pytest.raises(RequestError, match=r"expects k \[B, G, S, D\] and v \[B, G, S, E\]"):
        ops.scaled_dot_product_attention(*(random(*shape) for shape in shapes))
