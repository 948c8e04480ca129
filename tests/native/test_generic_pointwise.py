"""Casts, unary and binary operations and where, for any types and strides, compared with torch in float64."""

import math

import pytest
import torch
from generic_calls import ELEMENTS, FLOATS, assert_rounded, binary, laid_out, layouts, poison, shapes, unary, where
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.native.generic import Binary, Unary
from onward.native.interface import Element

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(tuple(ELEMENTS))
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 88.0, -88.0, 104.0, -104.0])

FUNCTIONS = {
    Unary.NEG: torch.neg, Unary.ABS: torch.abs, Unary.EXP: torch.exp, Unary.LOG: torch.log, Unary.SQRT: torch.sqrt,
    Unary.RSQRT: torch.rsqrt, Unary.RECIPROCAL: torch.reciprocal, Unary.SIN: torch.sin, Unary.COS: torch.cos,
    Unary.TANH: torch.tanh, Unary.SIGMOID: torch.sigmoid, Unary.SILU: lambda x: x * torch.sigmoid(x),
    Unary.RELU: torch.relu, Unary.GELU: lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    Unary.GELU_TANH: lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    Unary.SQUARE: torch.square, Unary.ERF: torch.erf, Unary.FLOOR: torch.floor, Unary.CEIL: torch.ceil,
    Unary.SIGN: torch.sign, Unary.LOG1P: torch.log1p, Unary.EXPM1: torch.expm1, Unary.EXP2: torch.exp2,
}  # fmt: skip
TESTS = {Unary.LOGICAL_NOT: torch.logical_not, Unary.ISNAN: torch.isnan, Unary.ISINF: torch.isinf}
INTEGER = {Unary.BITWISE_NOT: torch.bitwise_not, Unary.SQUARE: torch.square} | {
    op: FUNCTIONS[op] for op in (Unary.NEG, Unary.ABS, Unary.RELU, Unary.SIGN, Unary.FLOOR, Unary.CEIL)
}
FLOAT_BINARY = {
    Binary.ADD: torch.add, Binary.SUB: torch.sub, Binary.MUL: torch.mul, Binary.DIV: torch.div,
    Binary.MIN: torch.minimum, Binary.MAX: torch.maximum,
}  # fmt: skip
COMPARISONS = {
    Binary.EQ: torch.eq, Binary.NE: torch.ne, Binary.LT: torch.lt, Binary.LE: torch.le, Binary.GT: torch.gt,
    Binary.GE: torch.ge,
}  # fmt: skip
DIVISIONS = {Binary.FLOOR_DIV: torch.floor_divide, Binary.REMAINDER: torch.remainder}
INTEGER_BINARY = COMPARISONS | DIVISIONS | {
    Binary.ADD: torch.add, Binary.SUB: torch.sub, Binary.MUL: torch.mul, Binary.MIN: torch.minimum,
    Binary.MAX: torch.maximum, Binary.AND: torch.bitwise_and, Binary.OR: torch.bitwise_or,
    Binary.XOR: torch.bitwise_xor,
}  # fmt: skip


def sample(seed: int, shape: list[int], dtype: torch.dtype, scale: float = 4.0) -> Tensor:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x > 0 if dtype == torch.bool else x.to(dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.nan_to_num(nan=123.0), want.nan_to_num(nan=123.0))


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_functions_are_the_nearest_float(isa: str, op: Unary, dtype: torch.dtype) -> None:
    wide = torch.linspace(-30, 30, 20_001)
    small = torch.logspace(-30, 2, 4001)
    x = torch.cat((EDGES, wide, small, -small, sample(1, [2000], torch.float32, 0.01))).to(dtype)
    want = FUNCTIONS[op](x.double())
    got = unary(op, x)
    if dtype == torch.float64:
        # A few roundings in either of the two, those of the argument x^2 / 2 times as large where e^(-x^2 / 2) falls.
        assert torch.allclose(got, want, rtol=2.0**-48 * 900, atol=1e-300, equal_nan=True)
    else:
        assert_rounded(got, want)


@pytest.mark.parametrize("op", [Unary.SIN, Unary.COS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_of_many_turns(isa: str, op: Unary, dtype: torch.dtype) -> None:
    x = torch.cat((torch.logspace(0, math.log10(2.0**31), 20_000), torch.tensor([1e12, -3e30, math.inf]))).to(dtype)
    x = torch.cat((x, -x))
    got = unary(op, x, torch.float32)
    # The series end at 1e-11.
    assert_rounded(got, FUNCTIONS[op](x.double()), 1e-11)


@given(
    seed=seeds,
    shape=shapes,
    layout=layouts,
    out_layout=layouts,
    dtype=st.sampled_from(FLOATS),
    threads=st.integers(1, 3),
)
@per_isa
def test_strides_and_threads_do_not_matter(
    isa: str, seed: int, shape: list[int], layout: str, out_layout: str, dtype: torch.dtype, threads: int
) -> None:
    native.set_num_threads(threads)
    x = sample(seed, shape, dtype)
    out = laid_out(poison(shape, dtype), out_layout)
    unary(Unary.EXP, laid_out(x, layout), out)
    assert torch.equal(out, unary(Unary.EXP, x))
    y = sample(seed + 1, shape, dtype)
    binary(Binary.DIV, Element.F32, laid_out(x, layout), y, out)
    assert same(out.contiguous(), (x.float() / y.float()).to(dtype)) or (isa == "avx512" and dtype == torch.bfloat16)
    assert_rounded(out.contiguous(), x.double() / y.double())


@given(seed=seeds, shape=shapes, layout=layouts, source=dtypes, target=dtypes)
@per_isa
def test_casts_equal_torch(
    isa: str, seed: int, shape: list[int], layout: str, source: torch.dtype, target: torch.dtype
) -> None:
    x = sample(seed, shape, source, 100.0)
    assert same(unary(Unary.COPY, laid_out(x, layout), target), x.to(target))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_every_short_float_is_cast_as_by_torch(isa: str, source: torch.dtype, target: torch.dtype) -> None:
    # All 16-bit patterns that are no bf16 subnormals (AVX-512 writes those as 0), what lies between them, and the
    # limits of float16.
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    limits = torch.tensor([65504.0, 65519.9, 65520.0, 6e-8, 3e-8, 2.9e-8])
    patterns = torch.cat((bits.view(torch.bfloat16).float(), bits.view(torch.float16).float(), limits, EDGES))
    patterns = torch.cat((patterns, patterns * 1.00390625, patterns * 1.0009765625))
    x = patterns[(patterns.abs() >= 2.0**-126) | (patterns == 0) | patterns.isnan()].to(source)
    x = x[(x.float().abs() >= 2.0**-126) | (x == 0) | x.isnan()]
    assert same(unary(Unary.COPY, x, target), x.to(target))


def test_large_tensors_are_split_over_threads(isa: str) -> None:
    native.set_num_threads(2)
    x = sample(3, [300, 1001], torch.float32)
    assert torch.equal(unary(Unary.COPY, x.t(), torch.float64), x.t().double())
    assert torch.equal(binary(Binary.ADD, Element.F32, x, x[0], torch.float32), x + x[0])
    assert torch.equal(unary(Unary.NEG, x, x.clone()), -x)


@pytest.mark.parametrize("value", [2.0**31, 2.0**63, -(2.0**63) * 1.5, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("target", [torch.int32, torch.int64])
def test_floats_outside_the_integer_range_become_the_minimum(isa: str, value: float, target: torch.dtype) -> None:
    got = unary(Unary.COPY, torch.tensor([value, 7.9, -7.9]), target)
    fits = math.isfinite(value) and abs(value) <= torch.iinfo(target).max
    assert got.tolist() == [int(value) if fits else torch.iinfo(target).min, 7, -7]


@pytest.mark.parametrize("op", TESTS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_comparisons_give_booleans(isa: str, op: Unary, dtype: torch.dtype) -> None:
    x = EDGES.to(dtype) if dtype.is_floating_point else torch.tensor([0, 1, 3]).to(dtype)
    assert same(unary(op, x, torch.bool), TESTS[op](x))


@pytest.mark.parametrize("op", INTEGER)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_stay_exact(isa: str, op: Unary, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([0, 1, -1, 5, -77, limits.max, limits.min + 1], dtype=dtype)
    assert same(unary(op, x), INTEGER[op](x))


def test_booleans_and_functions_of_integers(isa: str) -> None:
    x = torch.tensor([True, False])
    assert unary(Unary.BITWISE_NOT, x).tolist() == [False, True]
    numbers = torch.arange(-5, 6)
    assert_rounded(unary(Unary.EXP, numbers, torch.float32), numbers.double().exp())
    assert_rounded(unary(Unary.SIGMOID, x, torch.bfloat16), x.double().sigmoid())


@given(seed=seeds, shape=shapes, layout=layouts, dtype=st.sampled_from((*FLOATS, torch.float64)))
@per_isa
def test_arithmetic_of_floats(isa: str, seed: int, shape: list[int], layout: str, dtype: torch.dtype) -> None:
    a, b = sample(seed, shape, dtype), sample(seed + 1, shape, dtype)
    a, b = laid_out(a, layout), b
    compute = ELEMENTS[dtype] if dtype == torch.float64 else Element.F32
    for op, function in FLOAT_BINARY.items():
        got, want = binary(op, compute, a, b, dtype), function(a.double(), b.double())
        if dtype == torch.float64:
            assert torch.allclose(got, want, rtol=2.0**-48, equal_nan=True)
        else:
            assert_rounded(got, want)
    for op, function in COMPARISONS.items():
        assert same(binary(op, compute, a, b, torch.bool), function(a, b))
        assert same(binary(op, compute, a.round(), b.round(), torch.bool), function(a.round(), b.round()))
    if dtype in (torch.float32, torch.float64):
        for op, function in DIVISIONS.items():
            assert same(binary(op, compute, a, b, dtype), function(a, b))


@pytest.mark.parametrize("op", [*FLOAT_BINARY, *COMPARISONS, *DIVISIONS])
def test_extremes_of_floats(isa: str, op: Binary) -> None:
    a, b = EDGES.repeat_interleave(len(EDGES)), EDGES.repeat(len(EDGES))
    function = (FLOAT_BINARY | COMPARISONS | DIVISIONS)[op]
    want = function(a, b)
    got = binary(op, Element.F32, a, b, want.dtype)
    if op in FLOAT_BINARY:
        assert_rounded(got, function(a.double(), b.double()))
    else:
        assert same(got, want)


@given(seed=seeds, shape=shapes, layout=layouts, dtype=st.sampled_from((torch.int32, torch.int64)))
@per_isa
def test_arithmetic_of_integers(isa: str, seed: int, shape: list[int], layout: str, dtype: torch.dtype) -> None:
    a, b = sample(seed, shape, dtype, 1000), sample(seed + 1, shape, dtype, 5)
    a, b = laid_out(a, layout), b.where(b != 0, 3)
    for op, function in INTEGER_BINARY.items():
        want = function(a, b)
        assert same(binary(op, Element.I64, a, b, want.dtype), want)


@pytest.mark.parametrize("op", DIVISIONS)
def test_integers_at_the_limits(isa: str, op: Binary) -> None:
    lowest = torch.iinfo(torch.int64).min
    a = torch.tensor([lowest, lowest, 7])
    wrapped = {Binary.FLOOR_DIV: [lowest, lowest // 2, -7], Binary.REMAINDER: [0, 0, 0]}[op]
    assert binary(op, Element.I64, a, torch.tensor([-1, 2, -1]), torch.int64).tolist() == wrapped
    with pytest.raises(NativeError, match="bad argument"):
        binary(op, Element.I64, a, torch.tensor([1, 0, 1]), torch.int64)


@given(seed=seeds, dtype=st.sampled_from(FLOATS), columns=st.sampled_from((1, 3, 64, 65, 600)))
@per_isa
def test_rows_columns_and_single_values_broadcast(isa: str, seed: int, dtype: torch.dtype, columns: int) -> None:
    x = sample(seed, [2, 7, columns], dtype)
    others = (x[:1, :1, :1], x[:1, :1], x[:, :, :1], x[:, :1], torch.tensor(2.5, dtype=torch.float64), torch.tensor(3))
    for other in others:
        want = x.double() * other.double()
        assert_rounded(binary(Binary.MUL, Element.F32, x, other, dtype), want)
        assert_rounded(binary(Binary.MUL, Element.F32, other, x, dtype), want)


@given(seed=seeds, shape=shapes, layout=layouts, a_dtype=dtypes, b_dtype=dtypes)
@per_isa
def test_where_equals_torch(
    isa: str, seed: int, shape: list[int], layout: str, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> None:
    condition = sample(seed, shape, torch.bool)
    a, b = sample(seed + 1, shape, a_dtype), sample(seed + 2, shape, b_dtype)
    want = torch.where(condition, a, b)
    assert same(where(laid_out(condition, layout), a, laid_out(b, layout), want.dtype), want)
    scalar = torch.tensor(-math.inf, dtype=torch.float64)
    if a_dtype.is_floating_point:
        assert same(where(condition, a, scalar, a_dtype), a.masked_fill(~condition, -math.inf))


@pytest.mark.parametrize("shape", [[0], [3, 0], [0, 4]])
def test_empty_tensors(isa: str, shape: list[int]) -> None:
    x = torch.zeros(shape)
    assert unary(Unary.EXP, x).shape == x.shape
    assert binary(Binary.ADD, Element.F32, x, x, torch.float32).shape == x.shape
    assert where(x > 0, x, x, torch.float32).shape == x.shape


def test_unknown_codes_are_refused(isa: str) -> None:
    x = torch.zeros(3)
    for bad in (-1, max(Unary) + 1):
        with pytest.raises(NativeError, match="bad argument"):
            unary(bad, x)  # type: ignore[arg-type]
    with pytest.raises(NativeError, match="bad argument"):
        binary(Binary.AND, Element.F32, x, x, torch.float32)
    with pytest.raises(NativeError, match="bad argument"):
        binary(Binary.DIV, Element.I64, x, x, torch.float32)
    with pytest.raises(NativeError, match="bad argument"):
        unary(Unary.BITWISE_NOT, x)


def test_every_operation_of_the_library_is_listed(isa: str) -> None:
    """Every listed operation exists; the next code does not (checked above)."""
    x = torch.ones(1)
    for op in Unary:
        unary(op, x.int() if op == Unary.BITWISE_NOT else x)
    for binary_op in Binary:
        compute = Element.F32 if binary_op == Binary.DIV else Element.I64
        binary(binary_op, compute, x, x, torch.float32)
