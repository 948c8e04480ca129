"""Reductions, softmax and cumulative sums for any dimensions, types and strides, compared with torch in float64."""

import math

import pytest
import torch
from generic_calls import (
    ELEMENTS,
    FLOATS,
    assert_rounded,
    cumsum,
    laid_out,
    layouts,
    reduce,
    softmax,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.native.generic import Reduce

U = 2.0**-24
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
seeds = st.integers(0, 2**31)
shapes = st.tuples(*[st.sampled_from((1, 2, 3, 65))] * 2, st.sampled_from((1, 7, 64, 70, 600)))
some_dims = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (2, 0), (0, 1, 2), ()])
INTEGERS = (torch.int32, torch.int64, torch.bool)
EXTREMES = {Reduce.MAX: torch.amax, Reduce.MIN: torch.amin}


def sample(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 4.0) -> Tensor:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x > 0 if dtype == torch.bool else x.to(dtype)


def flattened(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """[outer…, inner], the inner dimensions in the given order."""
    outer = [d for d in range(x.dim()) if d not in dims]
    return x.permute(*outer, *dims).reshape([x.shape[d] for d in outer] + [math.prod(x.shape[d] for d in dims)])


def sum_error(x: Tensor) -> Tensor:
    """64 lanes, each a sum of ceil(n / 64) terms, then 6 levels: every addition rounds what it has by U."""
    return (math.ceil(x.shape[-1] / 64) + 6) * U * (1 + 2.0**-8) * x.double().abs().sum(-1)


@given(
    seed=seeds, shape=shapes, dims=some_dims, layout=layouts, dtype=st.sampled_from(FLOATS), threads=st.integers(1, 3)
)
@per_isa
def test_sums_and_extremes_of_floats(
    isa: str, seed: int, shape: tuple[int, ...], dims: tuple[int, ...], layout: str, dtype: torch.dtype, threads: int
) -> None:
    native.set_num_threads(threads)
    x = sample(seed, shape, dtype)
    rows, y = flattened(x, dims), laid_out(x, layout)
    for out in (dtype, torch.float32):
        assert_rounded(reduce(Reduce.SUM, y, dims, out), rows.double().sum(-1), sum_error(rows))
        assert_rounded(reduce(Reduce.MEAN, y, dims, out), rows.double().mean(-1), sum_error(rows) / rows.shape[-1])
    for op, function in EXTREMES.items():
        assert torch.equal(reduce(op, y, dims, dtype), function(rows, -1))
    # Ties are likely among rounded values.
    first = (rows.round() == rows.round().amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(reduce(Reduce.ARGMAX, laid_out(x.round(), layout), dims, torch.int64), first)


@given(seed=seeds, shape=shapes, dims=some_dims, layout=layouts, dtype=st.sampled_from(INTEGERS))
@per_isa
def test_integers_and_booleans(
    isa: str, seed: int, shape: tuple[int, ...], dims: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    x = sample(seed, shape, dtype, 3.0)
    rows, y = flattened(x, dims), laid_out(x, layout)
    assert torch.equal(reduce(Reduce.SUM, y, dims, torch.int64), rows.sum(-1))
    assert torch.equal(reduce(Reduce.ANY, y, dims, torch.bool), rows.any(-1))
    assert torch.equal(reduce(Reduce.ALL, y, dims, torch.bool), rows.all(-1))
    assert_rounded(reduce(Reduce.MEAN, y, dims, torch.float32), rows.double().mean(-1))
    for op, function in EXTREMES.items():
        assert torch.equal(reduce(op, y, dims, dtype), function(rows, -1))
    first = (rows == rows.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(reduce(Reduce.ARGMAX, y, dims, torch.int64), first)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("count", [1, 64, 65, 1300])
def test_any_and_all_check_every_position(isa: str, dtype: torch.dtype, count: int) -> None:
    ones = torch.eye(count).to(dtype)
    assert reduce(Reduce.ANY, ones, [1], torch.bool).all()
    assert not reduce(Reduce.ALL, torch.ones_like(ones) - ones if dtype != torch.bool else ~ones, [1], torch.bool).any()
    assert reduce(Reduce.ALL, torch.ones_like(ones), [1], torch.bool).all()
    assert not reduce(Reduce.ANY, torch.zeros_like(ones), [1], torch.bool).any()


@given(seed=seeds, count=st.sampled_from((1, 5, 63, 64, 100)))
@per_isa
def test_sums_of_doubles(isa: str, seed: int, count: int) -> None:
    x = sample(seed, (5, count), torch.float64, 1.0)
    assert torch.allclose(reduce(Reduce.SUM, x, [1], torch.float64), x.sum(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [0, 5, 63, 64, 599, 1299])
def test_nan_is_propagated(isa: str, at: int) -> None:
    x = sample(1, (2, 1300), torch.float32)
    x[1, at] = math.nan
    for op in (Reduce.MAX, Reduce.MIN, Reduce.SUM, Reduce.MEAN):
        assert reduce(op, x, [1], torch.float32).isnan().tolist() == [False, True]
    assert reduce(Reduce.ARGMAX, x, [1], torch.int64).tolist() == [int(x[0].argmax()), at]


def test_empty_reductions(isa: str) -> None:
    x = torch.zeros(3, 0)
    assert reduce(Reduce.SUM, x, [1], torch.float32).tolist() == [0.0] * 3
    assert reduce(Reduce.MEAN, x, [1], torch.float32).isnan().all()
    assert reduce(Reduce.ALL, x, [1], torch.bool).all()
    assert not reduce(Reduce.ANY, x, [1], torch.bool).any()
    assert reduce(Reduce.MAX, x, [0], torch.float32).shape == (0,)
    for op in (Reduce.MAX, Reduce.MIN, Reduce.ARGMAX):
        with pytest.raises(NativeError, match="bad argument"):
            reduce(op, x, [1], torch.float32)


@given(seed=seeds, count=st.sampled_from((1, 63, 64, 65, 511, 513, 2000)), threads=st.integers(2, 4))
@settings(parent=per_isa, max_examples=10)
def test_a_row_has_the_same_bits_alone_and_in_any_layout(isa: str, seed: int, count: int, threads: int) -> None:
    x = sample(seed, (40, count), torch.float32)
    native.set_num_threads(threads)
    many = [reduce(Reduce.SUM, x, [1], torch.float32), softmax(x, 1), softmax(x, 1, log=True)]
    native.set_num_threads(1)
    spread = laid_out(x, "reversed")
    assert torch.equal(reduce(Reduce.SUM, spread, [1], torch.float32), many[0])
    assert torch.equal(softmax(spread, 1), many[1])
    row = x[17:18].clone()
    assert torch.equal(reduce(Reduce.SUM, row, [1], torch.float32), many[0][17:18])
    assert torch.equal(softmax(row, 1), many[1][17:18])
    assert torch.equal(softmax(row, 1, log=True), many[2][17:18])
    cut = next(d for d in (7, 5, 3, 1) if count % d == 0)  # the same row as a matrix with gaps
    assert torch.equal(reduce(Reduce.SUM, laid_out(row.view(cut, -1), "spread"), [0, 1], torch.float32), many[0][17])


@given(
    seed=seeds, shape=shapes, dim=st.integers(0, 2), layout=layouts, dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from((0.1, 4.0, 60.0)), threads=st.integers(1, 3),
)  # fmt: skip
@per_isa
def test_softmax_and_its_logarithm(
    isa: str, seed: int, shape: tuple[int, ...], dim: int, layout: str, dtype: torch.dtype, scale: float, threads: int
) -> None:
    """x - max is rounded once, by U |x - max|; exp adds 3 U, the sum its own error, the quotient one rounding."""
    native.set_num_threads(threads)
    x = sample(seed, shape, dtype, scale)
    y, exact = laid_out(x, layout), x.double()
    spread = exact.amax(dim, keepdim=True) - exact
    terms = math.ceil(shape[dim] / 64) + 6 + 3 + 1
    relative = (spread + terms + 4) * 2 * U
    want = exact.softmax(dim)
    assert_rounded(softmax(y, dim), want, relative * want + 2.0**-126)
    log_want = exact.log_softmax(dim)
    log_error = (terms + 4) * 2 * U + 2 * U * (spread + log_want.abs())
    assert_rounded(softmax(y, dim, log=True, out=torch.float32), log_want, log_error)


def test_rows_without_finite_values_and_masked_positions(isa: str) -> None:
    x = torch.tensor([[-math.inf] * 70, [0.0] * 35 + [-math.inf] * 35, [math.nan] + [0.0] * 69])
    got = softmax(x, 1)
    assert got[0].isnan().all()
    assert got[2].isnan().all()
    assert torch.allclose(got[1], x[1].softmax(0), rtol=2 * U, atol=0)
    assert (got[1, 35:] == 0).all()
    assert softmax(x, 1, log=True)[1].isinf().tolist() == [False] * 35 + [True] * 35


def test_softmax_of_doubles_in_place(isa: str) -> None:
    x = sample(4, (3, 700), torch.float64)
    assert torch.allclose(softmax(x, 1), x.softmax(1), rtol=1e-14, atol=0)
    assert torch.allclose(softmax(x, 0, log=True), x.log_softmax(0), rtol=1e-13, atol=1e-14)


@given(seed=seeds, shape=shapes, dim=st.integers(0, 2), layout=layouts, dtype=st.sampled_from(tuple(ELEMENTS)))
@per_isa
def test_cumulative_sums(
    isa: str, seed: int, shape: tuple[int, ...], dim: int, layout: str, dtype: torch.dtype
) -> None:
    x = sample(seed, shape, dtype)
    y = laid_out(x, layout)
    if not dtype.is_floating_point:
        assert torch.equal(cumsum(y, dim, torch.int64), x.cumsum(dim))
        return
    want = x.double().cumsum(dim)
    error = shape[dim] * 2.0**-52 * x.double().abs().cumsum(dim)
    if dtype == torch.float64:
        assert ((cumsum(y, dim) - want).abs() <= error).all()
    else:
        assert_rounded(cumsum(y, dim), want, error)
