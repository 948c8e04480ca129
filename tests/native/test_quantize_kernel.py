"""The kernel that quantizes weights has the bits of the definition, in every library."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES

from onward import native
from onward.errors import RequestError
from onward.ops.quantized import ROUNDED_FORMATS
from onward.quantization import quantize_weight, relative_rms_error, rounding

SIZES = (1, 3, 15, 16, 17, 31, 32, 33, 64, 95, 127, 300)
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
matrices = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 2**31), st.sampled_from(DTYPES))
kinds = st.sampled_from((1.0, 30.0, 1e-4, 1e-7, 0.0, "sparse", "equal"))


def weight_of(matrix, kind):
    rows, inputs, seed, dtype = matrix
    # A row stride, as a slice of a larger tensor has.
    x = torch.randn(rows, inputs + 3, generator=torch.Generator().manual_seed(seed))[:, :inputs]
    if kind == "sparse":
        return (x * (x > 1)).to(dtype)
    return x.sign().to(dtype) if kind == "equal" else (x * kind).to(dtype)


@pytest.mark.parametrize("fmt", ROUNDED_FORMATS)
@given(matrix=matrices, kind=kinds)
@per_isa
def test_the_kernel_has_the_bits_of_the_definition(isa, fmt, matrix, kind):
    weight = weight_of(matrix, kind)
    quantized, error = rounding.quantize_and_measure(weight, fmt)
    assert torch.equal(quantized.data, rounding.definition(weight, fmt).data)
    # 32 squares summed in float32, each off by 3 roundings and their sum by 31; the root halves that. Sums of groups
    # are taken in float64.
    assert error == pytest.approx(relative_rms_error(weight, quantized), rel=17 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("fmt", ROUNDED_FORMATS)
@given(matrix=matrices, threads=st.integers(1, 4))
@per_isa
def test_bits_do_not_depend_on_threads_or_other_rows(isa, fmt, matrix, threads):
    weight = weight_of(matrix, 1.0)
    native.set_num_threads(1)
    alone = quantize_weight(weight[-1:], fmt).dequantize()
    whole = quantize_weight(weight, fmt)
    native.set_num_threads(threads)
    assert torch.equal(quantize_weight(weight, fmt).data, whole.data)
    assert torch.equal(whole.dequantize()[-1:], alone)


@given(matrix=matrices, place=st.integers(0, 2**20), value=st.sampled_from((math.nan, math.inf, -math.inf)))
@per_isa
def test_a_nonfinite_weight_is_found_at_any_position(isa, matrix, place, value):
    weight = weight_of(matrix, 1.0).clone()
    weight.view(-1)[place % weight.numel()] = value
    for fmt in ROUNDED_FORMATS:
        with pytest.raises(RequestError, match="finite"):
            quantize_weight(weight, fmt)


def test_large_weights_need_int8(isa):
    weight = torch.full((3, 40), 1e30)
    quantized, error = rounding.quantize_and_measure(weight, "int8")
    assert quantized.shape == (3, 40)
    assert error < torch.finfo(torch.float32).eps
    for fmt in ("int4", "iq4_nl"):
        with pytest.raises(RequestError, match=f"the scales of {fmt} are float16.*use int8"):
            quantize_weight(weight, fmt)
