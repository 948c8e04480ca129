"""From floats to integers: the maximum change of a weight, and the gain from searching scales."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_cases import DTYPES, FORMATS, GROUP, IQ4_NL, SHAPES, noise, spread

from onward.errors import RequestError
from onward.ops import QuantizedWeight
from onward.quantization import (
    quantize_int4,
    quantize_int8,
    quantize_iq4_nl,
    quantize_weight,
    relative_rms_error,
)


def grouped(weight):
    """float64 [rows, groups, 32], the last group filled up with zeros."""
    return torch.nn.functional.pad(weight.to(torch.float64), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def squared_error_by_group(weight, other):
    return (grouped(weight) - grouped(other)).square().sum(-1)


def absmax_int4(weight):
    """The plain rule: the element of largest magnitude at ±7, its scale in float16."""
    parts = grouped(weight)
    scale = (parts.abs().amax(-1, keepdim=True) / 7).to(torch.float16).to(torch.float64)
    q = (parts / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-8, 7)
    return (q * scale).flatten(1)[:, : weight.shape[1]]


def q4_0(weight):
    """llama.cpp's rule: the element of largest magnitude at -8, its scale in float16."""
    parts = grouped(weight)
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    q = (parts * (-8 / extreme)).nan_to_num(0.0).add(8.5).floor().clamp(0, 15) - 8
    return (q * (extreme / -8).to(torch.float16).to(torch.float64)).flatten(1)[:, : weight.shape[1]]


def of_table(weight, place):
    """IQ4_NL with the element of largest magnitude at `place`: the scales [rows, groups, 1] and the values."""
    parts = grouped(weight)
    scale = (parts.gather(-1, parts.abs().argmax(-1, keepdim=True)) / place).to(torch.float16).to(torch.float64)
    return scale, (nearest_in_table(parts / scale) * scale).flatten(1)[:, : weight.shape[1]]


def nearest_in_table(quotients):
    table = torch.tensor(IQ4_NL, dtype=torch.float64)
    return table[(quotients.nan_to_num(0.0).unsqueeze(-1) - table).abs().argmin(-1)]


KINDS = {
    "normal": noise,
    "heavy-tailed": lambda *shape: noise(*shape) / noise(*shape, seed=1).abs().clamp_min(0.05),
    "uniform": lambda *shape: torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5,
    "small": lambda *shape: noise(*shape) * 1e-4,
    "one-sided": lambda *shape: noise(*shape).abs(),
}


@given(shape=SHAPES)
def test_int8_moves_a_weight_by_half_a_step_at_most(shape):
    weight = noise(*shape)
    step = weight.abs().amax(1, keepdim=True) / 127
    moved = (quantize_int8(weight).dequantize() - weight).abs()
    # and by the float32 roundings of the scale, the quotient and the product, each of a number up to absmax
    assert bool((moved <= step * (0.5 + 127 * 3 * 2.0**-24)).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["int4", "iq4_nl"])
@given(shape=SHAPES)
def test_no_group_is_worse_than_with_plain_rules(kind, format, shape):
    weight = KINDS[kind](*shape)
    if format == "iq4_nl":  # fills up the last group with zeros, and 0 is not in its table
        weight = torch.nn.functional.pad(weight, (0, -shape[1] % GROUP))
    rules = {"int4": (absmax_int4, q4_0), "iq4_nl": [lambda w, at=at: of_table(w, at)[1] for at in (-127, 113)]}
    ours = squared_error_by_group(weight, quantize_weight(weight, format).dequantize())
    # Errors are compared in float32. There each x - q * scale is off by up to 4 units of x (quotient, product,
    # difference and what they decide), and a sum of 32 squares by 32 units: on either side of the comparison.
    unit, size = 2.0**-24, grouped(weight).square().sum(-1)
    for plain in rules[format]:
        theirs = squared_error_by_group(weight, plain(weight))
        slack = 2 * 4 * unit * (size * theirs).sqrt() + (4 * unit) ** 2 * size + GROUP * unit * theirs
        assert bool((ours <= theirs + 2 * slack).all())


@pytest.mark.parametrize("kind", KINDS)
def test_int4_errs_less_than_q4_0_and_much_less_than_absmax(kind):
    weight = KINDS[kind](64, 1000)
    ours = squared_error_by_group(weight, quantize_int4(weight).dequantize()).sum()
    assert ours < 0.97 * squared_error_by_group(weight, q4_0(weight)).sum()
    assert ours < 0.9 * squared_error_by_group(weight, absmax_int4(weight)).sum()


@given(rows=st.integers(1, 20), groups=st.integers(1, 4), kind=st.sampled_from(("normal", "uniform", "one-sided")))
def test_an_iq4_nl_group_errs_by_12_of_113_of_its_maximum_at_most(rows, groups, kind):
    """With the extreme at 113 all lie in -113 … 113 steps, and there half the widest gap, 89 to 113, is 12 steps. Where
    the scale was rounded down in float16, the extreme itself lies 113 / 2^11 steps beyond the table."""
    weight = KINDS[kind](rows, groups * GROUP)
    scale, _ = of_table(weight, 113)
    ours = squared_error_by_group(weight, quantize_iq4_nl(weight).dequantize())
    most = GROUP * (12 * scale.abs().squeeze(-1)).square()
    assert bool((ours <= most * (1 + 1e-4)).all())  # errors are compared in float32: 40 units of 2^-24


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "small"])
def test_iq4_nl_errs_less_than_int4_for_many_small_weights(kind):
    """(7.3 / 8.1)² of the squared error was measured for normal weights, and less for heavier tails."""
    weight = KINDS[kind](64, 1024)
    ours = squared_error_by_group(weight, quantize_iq4_nl(weight).dequantize()).sum()
    assert ours < 0.9 * squared_error_by_group(weight, quantize_int4(weight).dequantize()).sum()


@pytest.mark.parametrize("format", ["int4", "iq4_nl"])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "uniform"])
def test_scales_are_nearly_optimal(kind, format):
    """Against 1,500 scales a group, the search loses less than 1 % of the squared error."""
    unit = 1 if format == "int4" else 127 / 8
    nearest = (lambda x: x.round().clamp(-8, 7)) if format == "int4" else nearest_in_table
    weight = KINDS[kind](4, 512)
    parts = grouped(weight)
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    best = parts.square().sum(-1)
    for place in torch.cat((torch.linspace(-13, -3, 750), torch.linspace(3, 13, 750))).tolist():
        scale = (extreme / (place * unit)).to(torch.float16).to(torch.float64)
        best = torch.minimum(best, (parts - nearest(parts / scale) * scale).square().sum(-1))
    ours = squared_error_by_group(weight, quantize_weight(weight, format).dequantize()).sum()
    assert ours < 1.01 * best.sum()


@pytest.mark.parametrize("end", [-8, 7, -7])
@given(rows=st.integers(1, 20), inputs=st.integers(1, 100), seed=st.integers(0, 99))
def test_int4_reproduces_a_weight_of_four_bits(end, rows, inputs, seed):
    """Where a group uses the range to either end, its scale is found again."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-7, 8, (rows, inputs), generator=generator)
    q[:, ::GROUP] = end
    scales = (torch.rand(rows, -(-inputs // GROUP), generator=generator) + 0.1).to(torch.float16)
    weight = (q * spread(scales, inputs)).to(torch.float32)
    assert torch.equal(quantize_int4(weight).dequantize(), weight)


@pytest.mark.parametrize("end", [0, 15])
@given(rows=st.integers(1, 20), groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_iq4_nl_reproduces_a_weight_of_its_table(end, rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, groups * GROUP), generator=generator, dtype=torch.int8)
    q[:, ::GROUP] = end
    scales = (torch.rand(rows, groups, generator=generator) + 0.1).to(torch.float16)
    weight = QuantizedWeight.pack("iq4_nl", q, scales).dequantize()
    assert torch.equal(quantize_iq4_nl(weight).dequantize(), weight)


@given(rows=st.integers(1, 20), inputs=st.integers(1, 100), seed=st.integers(0, 99))
def test_int8_reproduces_a_weight_of_eight_bits_within_rounding(rows, inputs, seed):
    q = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(seed))
    q[:, 0] = 127
    weight = q * noise(rows, 1).abs()
    assert torch.equal(quantize_int8(weight).unpack()[0], q.to(torch.int8))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_quantized_independently(format):
    weight = noise(600, 500)  # more than is taken at once
    whole = quantize_weight(weight, format).dequantize()
    for rows in (slice(0, 1), slice(599, 600), slice(250, 283)):
        assert torch.equal(quantize_weight(weight[rows], format).dequantize(), whole[rows])


@pytest.mark.parametrize("format", ["int4", "iq4_nl"])
def test_the_last_group_is_padded_with_zeros(format):
    weight = noise(5, 70)
    filled = torch.nn.functional.pad(weight, (0, 26))
    whole, filled = (quantize_weight(each, format).dequantize() for each in (weight, filled))
    assert torch.equal(whole, filled[:, :70])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_float_dtype_and_layout_is_accepted_and_restored(format, dtype):
    weight = noise(33, 64).to(dtype)
    quantized = quantize_weight(weight.T.contiguous().T, format)
    assert quantized.dtype == dtype
    assert torch.equal(quantized.dequantize(), quantize_weight(weight.float(), format).to(dtype=dtype).dequantize())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 190 * 2.0**-149, 1e-38, 1e-12, 1e-7])
def test_zeros_and_tiny_weights_stay_small_and_finite(format, size):
    weight = torch.full((3, 40), size)
    weight[1] *= -1
    weight[2] = noise(40)
    got = quantize_weight(weight, format).dequantize()
    assert bool((got[:2].abs() <= 2 * size).all())
    assert bool((got.sign() * weight.sign() >= 0).all())
    assert relative_rms_error(weight[2:], quantize_weight(weight[2:], format)) < 0.1


def test_int8_takes_the_largest_floats():
    weight = torch.tensor([[3.4e38, -1e38, 0.0]])
    torch.testing.assert_close(quantize_int8(weight).dequantize(), weight, rtol=0.01, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_the_relative_error_is_the_root_of_squares_over_squares(format):
    weight = noise(700, 400)
    quantized = quantize_weight(weight, format)
    w64, q64 = weight.double(), quantized.dequantize().double()
    expected = math.sqrt((w64 - q64).square().sum() / w64.square().sum())
    assert relative_rms_error(weight, quantized) == pytest.approx(expected, rel=1e-5)
    assert relative_rms_error(torch.zeros(2, 3), quantize_weight(torch.zeros(2, 3), format)) == 0
    with pytest.raises(RequestError, match=r"\[700, 399\] cannot be compared with a quantized one \[700, 400\]"):
        relative_rms_error(weight[:, 1:], quantized)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("weight", "complaint"),
    [
        (torch.ones(32), r"float matrix \[N, K\]; got torch.float32 \[32\]"),
        (torch.ones(2, 3, 4), r"float matrix.*\[2, 3, 4\]"),
        (torch.ones(2, 3, dtype=torch.int8), r"float matrix.*int8"),
        (torch.ones(2, 3, dtype=torch.complex64), r"float matrix.*complex64"),
        (torch.ones(0, 3), r"float matrix.*\[0, 3\]"),
        (torch.ones(3, 0), r"float matrix.*\[3, 0\]"),
        (torch.ones(1, 65537), "at most 65536 inputs"),
        (torch.ones(2, 3, device="meta"), "plain tensor; got .*meta"),
        (torch.ones(2, 3).to_sparse(), "plain tensor; got torch.sparse_coo"),
        (torch.tensor([[1.0, torch.nan]]), "contains an infinity or a NaN"),
        (torch.tensor([[1.0], [-torch.inf]]), "contains an infinity or a NaN"),
    ],
)
def test_invalid_weights_are_refused(format, weight, complaint):
    with pytest.raises(RequestError, match=complaint):
        quantize_weight(weight, format)


def test_oversized_weights_and_unknown_formats_are_refused():
    quantize_int4(torch.full((1, 32), 458528.0))
    with pytest.raises(RequestError, match="up to 458528; got one of 500000: use int8"):
        quantize_int4(torch.full((1, 32), 500000.0))
    quantize_iq4_nl(torch.full((1, 32), 8319008.0))
    with pytest.raises(RequestError, match=r"scales of iq4_nl .* up to 8319008; got one of 8\.4e\+06: use int8"):
        quantize_iq4_nl(torch.full((1, 32), 8.4e6))
    with pytest.raises(RequestError, match="must be 'int8', 'int4' or 'iq4_nl'; got 'fp4'"):
        quantize_weight(torch.ones(2, 2), "fp4")
