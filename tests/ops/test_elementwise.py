"""rms_norm, swiglu and rotate, compared with their definitions in float64."""

import pytest
import torch
from rounding import DTYPES, ODD_SIZES, UNIT, assert_within, random

from onward import ops
from onward.models.rope import Linear, RotarySchedule, Unscaled

U32 = UNIT[torch.float32]
CONTEXT = 256
PLAIN = RotarySchedule(16, 10000.0, Unscaled(CONTEXT))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_equals_its_definition(dtype, size):
    x, weight = random(3, 5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    x64 = x.to(torch.float64)
    exact = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.to(torch.float64)
    got = ops.rms_norm(x, weight, eps=1e-5)
    assert got.dtype == dtype
    # Two roundings to the dtype (after the cast, after the weight) on top of a float32 mean of `size` squares.
    assert_within(got, exact, (2.1 * UNIT[dtype] + (size + 6) * U32) * exact.abs())


def test_rms_norm_casts_back_before_it_multiplies_by_the_weight():
    x, weight = random(64, 127, dtype=torch.bfloat16), random(127, dtype=torch.bfloat16, seed=1)
    x64 = x.to(torch.float64)
    normalised = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    cast_first = normalised.to(torch.bfloat16) * weight
    cast_last = (normalised * weight.to(torch.float64)).to(torch.bfloat16)
    got = ops.rms_norm(x, weight, eps=1e-6)
    assert (got == cast_first).float().mean() > 0.999  # a float32 result may fall on the other side of a tie
    assert (got == cast_last).float().mean() < 0.9


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(ops.rms_norm(torch.zeros(2, 3), torch.ones(3)), torch.zeros(2, 3))


def test_rms_norm_squares_in_float32():
    """In float16 the square of 1000 would overflow."""
    got = ops.rms_norm(torch.full((1, 4), 1000.0, dtype=torch.float16), torch.ones(4, dtype=torch.float16))
    assert torch.equal(got, torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_equals_its_definition(dtype, size):
    gate, up = 4 * random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    g64, u64 = gate.to(torch.float64), up.to(torch.float64)
    exact = g64 * g64.sigmoid() * u64
    # Two roundings to the dtype, and a float32 exponential good to a few units.
    smallest = torch.finfo(dtype).smallest_normal
    assert_within(ops.swiglu(gate, up), exact, (2.1 * UNIT[dtype] + 8 * U32) * exact.abs() + smallest)


def radians(batch, tokens, pairs):
    return 10 * random(batch, tokens, pairs, seed=7)


@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("pairs", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_equals_complex_multiplication(dtype, pairs, tokens):
    x = random(2, 3, tokens, 2 * pairs, dtype=dtype)
    angle = radians(2, tokens, pairs)
    x64 = x.to(torch.float64)
    turn = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.to(torch.float64)).unsqueeze(1)
    turned = torch.complex(x64[..., :pairs], x64[..., pairs:]) * turn
    exact = torch.cat((turned.real, turned.imag), dim=-1)
    size = (x64[..., :pairs].abs() + x64[..., pairs:].abs()).repeat(1, 1, 1, 2)
    # A float32 cos and sin (good to a unit or so), two products and their sum, then one rounding to the dtype.
    got = ops.rotate(x, *ops.rotary_angles(angle))
    assert got.dtype == dtype
    assert_within(got, exact, 6 * U32 * size + 1.01 * UNIT[dtype] * exact.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaved_pairs_are_adjacent(dtype):
    x, turned = random(2, 3, 5, 17, dtype=dtype), list(range(0, 8, 2)) + list(range(1, 8, 2))
    cos, sin = ops.rotary_angles(radians(2, 5, 4))
    want = x.clone()
    want[..., turned] = ops.rotate(x[..., turned], cos, sin)
    assert_within(ops.rotate(x, cos, sin, interleaved=True), want, 6 * U32 * x.abs().max() + 1.01 * UNIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_leaves_features_past_the_pairs_unchanged(dtype):
    x = random(2, 3, 5, 17, dtype=dtype)
    cos, sin = ops.rotary_angles(radians(2, 5, 4))
    got = ops.rotate(x, cos, sin)
    assert torch.equal(got[..., 8:], x[..., 8:])
    assert torch.equal(got[..., :8], ops.rotate(x[..., :8], cos, sin))


def test_rotate_gives_each_row_its_own_angles():
    x = random(2, 3, 5, 8)
    cos, sin = ops.rotary_angles(radians(2, 5, 4))
    alone = [ops.rotate(x[b : b + 1], cos[b : b + 1], sin[b : b + 1]) for b in range(2)]
    assert torch.equal(ops.rotate(x, cos, sin), torch.cat(alone))


def test_position_zero_is_not_rotated():
    x = random(1, 2, 1, 16)
    assert torch.equal(ops.rotate(x, *PLAIN.angles(torch.zeros(1, 1, dtype=torch.int32), CONTEXT)), x)


def test_products_of_rotated_vectors_depend_only_on_their_distance():
    q, k = random(1, 1, 1, 16), random(1, 1, 1, 16, seed=1)

    def product(query_at, key_at):
        turned = [ops.rotate(x, *PLAIN.angles(torch.tensor([[at]]), CONTEXT)) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    # An angle of up to 200 radians is known to 200 * 2^-24, and so is the product, for vectors of length 4.
    assert product(13, 5) == pytest.approx(product(200, 192), abs=16 * 200 * U32)
    assert product(13, 5) != pytest.approx(product(13, 6), abs=1e-2)


def test_linear_scaling_divides_the_whole_position():
    schedule = RotarySchedule(16, 10000.0, Linear(4.0, CONTEXT))
    offset, index = 40, torch.arange(8).unsqueeze(0)
    quarter = PLAIN.angles((offset + 4 * index) // 4, CONTEXT)
    for got, want in zip(schedule.angles(offset + 4 * index, CONTEXT), quarter, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=20 * U32)
