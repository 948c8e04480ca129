"""linear with packed weights, compared with its definition in float64, and bit for bit between divisions of the work.

U is the unit roundoff of float32. A sequential sum of K products in float32 is within
(K + 1) U sum |x w| of the true sum (Higham, Accuracy and Stability, 3.1: K - 1 additions, one
rounding of each product in the portable library, a bias).
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES
from packed import FLOAT_FORMATS, GROUP, Packed, aligned_bytes
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.native.interface import Format
from onward.ops.packed import LinearArguments

U = 2.0**-24
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SIZES = (1, 3, 17, 31, 33, 127, 1000)
shapes = st.tuples(st.sampled_from((1, 2, 5, 9, 17, 33)), st.sampled_from(SIZES), st.sampled_from(SIZES))
seeds = st.integers(0, 2**31)
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_within(got: Tensor, want: Tensor, bound: Tensor, what: str = "") -> None:
    """got, rounded to its dtype, is within bound of want (float64)."""
    rounded = bound + ROUNDING[got.dtype] * (want.abs() + bound)
    excess = ((got.double() - want).abs() - rounded).max().item()
    assert excess <= 0, f"{what}: {excess} beyond the bound of {rounded.max().item()}"


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 as integers in -127 … 127 and their scales, as the kernels take them."""
    absmax = x.abs().amax(-1, keepdim=True)
    # Not 127 / absmax, which torch computes as 127 * (1 / absmax), with two roundings.
    reciprocal = torch.where(absmax > 0, torch.full_like(absmax, 127.0) / absmax, torch.zeros_like(absmax))
    return (x * reciprocal).round(), absmax / 127


def in_steps_of_powers(groups: Tensor) -> Tensor:
    """float32 groups [..., 32] as float64 multiples of the least power of two that makes the largest at most 127."""
    steps = groups.abs().amax(-1, keepdim=True).double() / 127
    steps = torch.where(steps > 0, 2.0 ** steps.log2().ceil(), 1.0)
    return (groups.double() / steps).round() * steps


@pytest.mark.parametrize("fmt", FLOAT_FORMATS)
@given(
    shape=shapes, seed=seeds, x_dtype=st.sampled_from(DTYPES), out_dtype=st.sampled_from(DTYPES), biased=st.booleans()
)
@per_isa
def test_float_weights_agree_with_the_definition(
    isa: str,
    fmt: Format,
    shape: tuple[int, int, int],
    seed: int,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    biased: bool,
) -> None:
    t, n, k = shape
    weight = Packed.random(fmt, n, k, drawn(seed))
    x = torch.randn(t, k, generator=drawn(seed + 1)).to(x_dtype)
    bias = torch.randn(n, generator=drawn(seed + 2)) if biased else None
    # bf16 weights round the activations to bf16 first; other formats take them as they are.
    taken = x.bfloat16().double() if fmt == Format.BF16 else x.double()
    want, size = taken @ weight.values.T, taken.abs() @ weight.values.abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    assert_within(weight.linear(x, bias, out_dtype), want, (k + 2) * U * size)


@given(shape=shapes, seed=seeds, x_dtype=st.sampled_from(DTYPES))
@per_isa
def test_int8_equals_the_exact_integer_product(
    isa: str, shape: tuple[int, int, int], seed: int, x_dtype: torch.dtype
) -> None:
    t, n, k = shape
    weight = Packed.random(Format.INT8, n, k, drawn(seed))
    x = torch.randn(t, k, generator=drawn(seed + 1)).to(x_dtype)
    integers, x_scale = quantized(x.float())
    assert weight.integers is not None
    assert weight.scales is not None
    product = integers.double() @ weight.integers.double().T  # exact: below 2^53
    assert torch.equal(weight.linear(x), product.float() * x_scale * weight.scales)


@given(shape=shapes, seed=seeds, x_dtype=st.sampled_from(DTYPES))
@per_isa
def test_int4_agrees_with_the_definition_on_quantized_activations(
    isa: str, shape: tuple[int, int, int], seed: int, x_dtype: torch.dtype
) -> None:
    t, n, k = shape
    weight = Packed.random(Format.INT4, n, k, drawn(seed))
    x = torch.randn(t, k, generator=drawn(seed + 1)).to(x_dtype)
    groups = -(-k // GROUP)
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - k)).view(t, groups, GROUP)
    taken = in_steps_of_powers(padded).view(t, -1)[:, :k]
    # Each group: an exact integer, an exact product of the scales, one rounding of the step; then + 0.
    bound = (groups + 1) * U * (taken.abs() @ weight.values.abs().T)
    assert_within(weight.linear(x), taken @ weight.values.T, bound)


@pytest.mark.parametrize("size", [2.0**-95, 1e-20, 1.0, 127.0, 127.00001, 1e20, 1e33])
@pytest.mark.parametrize("scale", [2.0**-24, 6.1e-5, 1.0, 65504.0])
def test_int4_accepts_scales_of_every_size(isa: str, size: float, scale: float) -> None:
    """The last place of a float counts by the scale of a group: it may neither vanish nor be too large for one."""
    q = torch.randint(-8, 8, (33, 64), generator=drawn(15)).to(torch.int8)
    weight = Packed.of_int4(q, torch.full((33, 2), scale).half() * torch.tensor([1.0, -1.0]).half())
    size = min(size, 3e38 / (64 * 8 * scale))  # so that no sum overflows
    x = torch.rand(20, 64, generator=drawn(16)) * size
    x[:, ::32] = size
    taken = in_steps_of_powers(x.view(20, 2, 32)).view(20, 64)
    got = weight.linear(x)
    assert_within(got, taken @ weight.values.T, 3 * U * (taken.abs() @ weight.values.abs().T))
    for t in (1, 4, 9):
        assert torch.equal(weight.linear(x[:t]), got[:t])


@pytest.mark.parametrize("scale", [0.0, -0.0, float("inf"), -float("inf"), float("nan")])
def test_int4_scales_of_zero_and_nonfinite_scales(isa: str, scale: float) -> None:
    """A group with the scale 0 contributes nothing; one with a nonfinite scale makes its output nonfinite."""
    q = torch.randint(-8, 8, (33, 128), generator=drawn(17)).to(torch.int8)
    scales = torch.full((33, 4), 0.5).half()
    scales[5, 1] = scale
    weight, x = Packed.of_int4(q, scales), torch.randn(20, 128, generator=drawn(18)) * 100
    without = x.clone()
    without[:, 32:64] = 0
    for t in (1, 4, 9, 20):
        got = weight.linear(x[:t])
        if scale == 0:
            assert torch.equal(got[:, 5], weight.linear(without[:t])[:, 5])
        else:
            assert not torch.isfinite(got[:, 5]).any()
            assert torch.isfinite(got[:, :5]).all()
            assert torch.isfinite(got[:, 6:]).all()


@pytest.mark.parametrize("fmt", [Format.INT8, Format.INT4])
def test_quantized_activations_are_within_half_a_step(isa: str, fmt: Format) -> None:
    weight = Packed.random(fmt, 33, 1000, drawn(1))
    x = torch.randn(9, 1000, generator=drawn(2)) * torch.logspace(-3, 3, 1000)
    width, most = (GROUP, 2.0) if fmt == Format.INT4 else (1000, 1.0)
    steps = torch.stack([part.abs().amax(-1) * (most / 127) for part in x.split(width, -1)], -1).double()
    step = steps.repeat_interleave(width, -1)[:, :1000]
    want = x.double() @ weight.values.T
    # Half a step for each input (of int4 up to twice as wide), a little more for the roundings of it and of the sum.
    bound = (0.5 + 1e-4) * step @ weight.values.abs().T + 1000 * U * (x.double().abs() @ weight.values.abs().T)
    assert_within(weight.linear(x), want, bound)


@pytest.mark.parametrize("fmt", Format)
@given(
    n=st.sampled_from((1, 17, 70, 200)),
    k=st.sampled_from((1, 31, 64, 127, 200)),
    t=st.integers(1, 600),
    start=st.integers(0, 599),
    threads=st.integers(1, 4),
    seed=seeds,
)
@per_isa
def test_batched_row_equals_the_row_alone(
    isa: str, fmt: Format, n: int, k: int, t: int, start: int, threads: int, seed: int
) -> None:
    weight = Packed.random(fmt, n, k, drawn(seed))
    x = torch.randn(600, k, generator=drawn(seed + 1))
    native.set_num_threads(2)
    together = weight.linear(x)
    native.set_num_threads(threads)
    some = slice(start, min(start + t, 600))
    assert torch.equal(weight.linear(x[some]), together[some])
    assert torch.equal(weight.linear(x[start : start + 1]), together[start : start + 1])


@pytest.mark.parametrize("fmt", Format)
def test_every_number_of_rows_gives_the_same_bits(isa: str, fmt: Format) -> None:
    weight = Packed.random(fmt, 100, 96, drawn(3))
    x = torch.randn(70, 96, generator=drawn(4))
    together = weight.linear(x)
    for t in range(1, 70):
        assert torch.equal(weight.linear(x[:t]), together[:t]), t


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.stride(2)
def test_large_matrices_split_into_many_chunks(isa: str, fmt: Format) -> None:
    weight = Packed.random(fmt, 1000, 700, drawn(5))
    x = torch.randn(300, 700, generator=drawn(6))
    together = weight.linear(x)
    for threads in (1, 2, 3, 4):
        native.set_num_threads(threads)
        assert torch.equal(weight.linear(x), together)
        for row in (0, 151, 299):
            assert torch.equal(weight.linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_and_strided_rows(isa: str, fmt: Format, dtype: torch.dtype) -> None:
    t, n, k = 7, 33, 65
    weight = Packed.random(fmt, n, k, drawn(7))
    x = torch.randn(t, k, generator=drawn(8)).to(dtype)
    wide = torch.full((t, k + 9), float("nan"), dtype=dtype)
    wide[:, 1 : k + 1] = x
    out = torch.full((t, n + 5), 7.0, dtype=dtype)
    weight.linear(wide[:, 1 : k + 1], out=out[:, 1 : n + 1])
    assert torch.equal(out[:, 1 : n + 1], weight.linear(x, out=dtype))
    assert (out[:, :1] == 7).all(), "wrote before the row"
    assert (out[:, n + 1 :] == 7).all(), "wrote past the row"


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_gives_nan(isa: str, fmt: Format, bad: float) -> None:
    weight = Packed.random(fmt, 20, 100, drawn(9))
    x = torch.randn(3, 100, generator=drawn(10))
    good = weight.linear(x)
    x[1, 70] = bad
    out = weight.linear(x)
    assert not torch.isfinite(out[1]).any()
    assert torch.equal(out[::2], good[::2])


@pytest.mark.parametrize("fmt", Format)
def test_zero_rows_and_tiny_rows(isa: str, fmt: Format) -> None:
    weight = Packed.random(fmt, 20, 100, drawn(11))
    x = torch.zeros(2, 100)
    x[1] = 1e-38
    out = weight.linear(x)
    assert (out[0] == 0).all()
    assert (out[1].abs() < 1e-34).all()


def test_int8_sums_of_the_longest_row_do_not_overflow(isa: str) -> None:
    k = 65536
    weight = Packed.of_int8(torch.full((1, k), 127, dtype=torch.int8), torch.ones(1))
    assert weight.linear(torch.ones(1, k)).item() == pytest.approx(127 * k, rel=4 * U)
    assert weight.linear(-torch.ones(1, k)).item() == pytest.approx(-127 * k, rel=4 * U)


def test_no_rows_no_outputs_and_no_inputs(isa: str) -> None:
    weight = Packed.random(Format.F32, 5, 0, drawn(12))
    bias = torch.arange(5.0)
    assert torch.equal(weight.linear(torch.empty(2, 0), bias), bias.expand(2, 5))
    for fmt in Format:  # more rows than a stream has, too
        weight = Packed.random(fmt, 5, 0, drawn(12))
        assert torch.equal(weight.linear(torch.empty(40, 0), bias), bias.expand(40, 5))
    assert Packed.random(Format.BF16, 5, 8, drawn(13)).linear(torch.empty(0, 8)).shape == (0, 5)
    assert Packed.random(Format.BF16, 0, 8, drawn(14)).linear(torch.ones(3, 8)).shape == (3, 0)


def test_invalid_arguments_are_refused(isa: str) -> None:
    library = native.library()
    assert library is not None
    assert library.onward_linear_packed_bytes(99, 16, 16) == -1
    assert library.onward_linear_packed_bytes(Format.INT8, 16, 65537) == -1
    x = aligned_bytes(4096, fill=0)
    product = LinearArguments(n=16, packed=x.data_ptr(), out=x.data_ptr(), out_stride=16)
    status = library.onward_linear_many(product, 1, 99, 1, 16, x.data_ptr(), 0, 16)
    with pytest.raises(NativeError, match="onward_linear_many failed: bad argument"):
        library.check(status, "onward_linear_many")
