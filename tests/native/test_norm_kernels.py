"""rms_norm and layer_norm, compared with their definitions in float64, and bit for bit between rows.

U is the unit roundoff of float32. Each term of a sum over D goes through at most D / 64 + 7 additions, with an error
of U each; a relative error e of the mean square is an error e / 2 of the factor.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES, layer_norm, rms_norm
from torch import Tensor

from onward import native

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-24}
SIZES = (1, 3, 17, 31, 33, 64, 127, 1000, 1024)
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same rows farther apart, at an odd address."""
    memory = torch.zeros(x.shape[0] * (x.shape[1] + 5) + 1, dtype=x.dtype)[1:].view(x.shape[0], -1)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]


def assert_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    bound = bound + ROUNDING[got.dtype] * (want.abs() + bound) + SMALLEST[got.dtype]
    excess = ((got.double() - want).abs() - bound).max().item()
    assert excess <= 0, f"{excess} beyond the bound"


@given(
    seed=seeds,
    rows=st.integers(1, 5),
    dim=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from((0.0, 1.0)),
    after_cast=st.booleans(),
    eps=st.sampled_from((1e-6, 1e-5, 0.1)),
)
@per_isa
def test_rms_norm_agrees_with_the_definition(
    isa: str, seed: int, rows: int, dim: int, dtype: torch.dtype, offset: float, after_cast: bool, eps: float
) -> None:
    x, weight = normal(seed, rows, dim, dtype=dtype), normal(seed + 1, dim, dtype=dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    factor = weight.double() + offset
    # The factor, then three roundings: times x, weight + offset, times weight; and the cast.
    relative = (dim / 64 + 8 + 4) / 2 * U + 3 * U
    bound = (exact * factor).abs() * relative + U * exact.abs() * offset
    if after_cast:
        bound = bound + 1.01 * (ROUNDING[dtype] * exact.abs() + SMALLEST[dtype]) * factor.abs()
    got = rms_norm(x, weight, eps=eps, offset=offset, after_cast=after_cast)
    assert_within(got, exact * factor, bound)
    assert_within(rms_norm(x, None, eps=eps), exact, exact.abs() * relative)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_multiplies_after_the_cast_or_before(isa: str, dtype: torch.dtype) -> None:
    """Families differ, and so do the bits: the unit is chosen so that both orders are exact in float32."""
    x, weight = normal(5, 40, 256, dtype=dtype), normal(6, 256, dtype=dtype)
    normed = rms_norm(x, None).float()
    assert torch.equal(rms_norm(x, weight, after_cast=True), (normed * weight.float()).to(dtype))
    if dtype != torch.float32:
        assert not torch.equal(rms_norm(x, weight, after_cast=True), rms_norm(x, weight, after_cast=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_first_and_written_back(isa: str, dtype: torch.dtype) -> None:
    x, residual, weight = normal(1, 9, 77, dtype=dtype), normal(2, 9, 77, dtype=dtype), normal(3, 77, dtype=dtype)
    total = (x.float() + residual.float()).to(dtype)
    fused = x.clone()
    out = rms_norm(fused, weight, residual=strided(residual))
    assert torch.equal(fused, total)
    assert torch.equal(out, rms_norm(total, weight))
    fused = x.clone()
    out = layer_norm(fused, weight, residual[0], residual=strided(residual))
    assert torch.equal(fused, total)
    assert torch.equal(out, layer_norm(total, weight, residual[0]))


@given(
    seed=seeds, rows=st.integers(1, 5), dim=st.sampled_from(SIZES), dtype=st.sampled_from(DTYPES), affine=st.booleans()
)
@per_isa
def test_layer_norm_agrees_with_the_definition(
    isa: str, seed: int, rows: int, dim: int, dtype: torch.dtype, affine: bool
) -> None:
    x = (normal(seed, rows, dim, dtype=torch.float32) + 3).to(dtype)
    weight = normal(seed + 1, dim, dtype=dtype) if affine else None
    bias = normal(seed + 2, dim, dtype=dtype) if affine else None
    eps = 1e-3
    mean = x.double().mean(-1, keepdim=True)
    centered = x.double() - mean
    scale = 1 / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    normed = centered * scale
    chain = (dim / 64 + 8) * U
    shift = (chain + U) * x.double().abs().mean(-1, keepdim=True) + U * x.double().abs()
    # A shift of every element moves the spread by its square only; the others by themselves.
    relative = chain / 2 + 4 * U + shift.amax(-1, keepdim=True) * scale
    bound = shift * scale + relative * normed.abs() + U * normed.abs()
    want = normed
    if weight is not None and bias is not None:
        want = normed * weight.double() + bias.double()
        bound = bound * weight.double().abs() + U * (normed * weight.double()).abs() + U * want.abs()
    assert_within(layer_norm(x, weight, bias, eps=eps), want, 1.1 * bound)


@given(seed=seeds, dim=st.sampled_from((17, 64, 127, 1000)), dtype=st.sampled_from(DTYPES), threads=st.integers(1, 4))
@settings(parent=per_isa, max_examples=15)
def test_bits_depend_only_on_the_row(isa: str, seed: int, dim: int, dtype: torch.dtype, threads: int) -> None:
    x, weight, bias = (normal(seed + i, *shape, dtype=dtype) for i, shape in enumerate(((600, dim), (dim,), (dim,))))
    native.set_num_threads(threads)
    whole_rms, whole_layer = rms_norm(x, weight), layer_norm(x, weight, bias)
    native.set_num_threads(1)
    for row in (0, 1, 299, 599):
        alone = strided(x[row : row + 1])
        assert torch.equal(rms_norm(alone, weight)[0], whole_rms[row])
        assert torch.equal(layer_norm(alone, weight, bias)[0], whole_layer[row])


def test_nan_stays_in_its_row(isa: str) -> None:
    x = torch.ones(3, 50)
    x[1, 49] = torch.nan
    out = rms_norm(x, torch.ones(50))
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
