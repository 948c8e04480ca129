"""Products of plain matrices in any layout, compared with float64, and the same bits for every division of the work."""

import pytest
import torch
from generic_calls import FLOATS, assert_rounded, laid_out, matmul, poison
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onward import native

U = 2.0**-24
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(FLOATS)
sizes = st.sampled_from((1, 2, 3, 5, 15, 16, 17, 33, 70))
inputs = st.sampled_from((1, 2, 15, 31, 32, 33, 64, 100, 257, 600))
matrix_layouts = st.sampled_from(("plain", "reversed", "spread", "every second"))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transposed_weight(w: Tensor) -> Tensor:
    """[K, N] with contiguous k: how torch.nn.Linear's weight arrives."""
    return w.t().contiguous().t()


def sum_error(a: Tensor, b: Tensor) -> Tensor:
    """k fmas of a sum in any order: U for each on what is there, once more in the portable library's two roundings."""
    return 2 * (a.shape[-1] + 5) * U * (a.double().abs() @ b.double().abs())


@given(
    seed=seeds, m=sizes, n=sizes, k=inputs, batch=st.sampled_from(((), (1,), (3,), (2, 3))), dtype=dtypes,
    layouts=st.tuples(matrix_layouts, matrix_layouts, matrix_layouts), threads=st.integers(1, 3),
)  # fmt: skip
@per_isa
def test_products_agree_with_float64(
    isa: str, seed: int, m: int, n: int, k: int, batch: tuple[int, ...], dtype: torch.dtype,
    layouts: tuple[str, str, str], threads: int,
) -> None:  # fmt: skip
    native.set_num_threads(threads)
    a, b = normal(seed, *batch, m, k, dtype=dtype), normal(seed + 1, *batch, k, n, dtype=dtype)
    want, error = a.double() @ b.double(), sum_error(a, b)
    out = laid_out(poison((*batch, m, n), dtype), layouts[2])
    matmul(laid_out(a, layouts[0]), laid_out(b, layouts[1]), out=out)
    assert_rounded(out.contiguous(), want, error)
    if not batch:
        assert_rounded(matmul(laid_out(a, layouts[0]), transposed_weight(b)), want, error)


@given(seed=seeds, m=sizes, n=sizes, dtype=dtypes, bias_shape=st.sampled_from(("n", "m", "mn", "one")))
@per_isa
def test_bias_and_factors(isa: str, seed: int, m: int, n: int, dtype: torch.dtype, bias_shape: str) -> None:
    shape = {"n": (n,), "m": (m, 1), "mn": (m, n), "one": ()}[bias_shape]
    a, b, bias = (
        normal(seed, m, 40, dtype=dtype),
        normal(seed + 1, 40, n, dtype=dtype),
        normal(seed + 2, *shape, dtype=dtype),
    )
    for alpha, beta in ((1.0, 1.0), (0.125, 1.0), (-1.5, 0.5)):
        added = beta * bias.double()
        want = alpha * (a.double() @ b.double()) + added
        error = abs(alpha) * sum_error(a, b) + 4 * U * ((alpha * (a.double() @ b.double())).abs() + added.abs())
        for weight in (b, transposed_weight(b)):
            assert_rounded(matmul(a, weight, bias, alpha=alpha, beta=beta), want, error)


@given(
    seed=seeds, n=st.sampled_from((1, 5, 48, 130)), k=inputs, dtype=dtypes, threads=st.integers(2, 4),
    transposed=st.booleans(), bias=st.booleans(),
)  # fmt: skip
@per_isa
def test_rows_have_the_same_bits_alone_and_in_a_chunk(
    isa: str, seed: int, n: int, k: int, dtype: torch.dtype, threads: int, transposed: bool, bias: bool
) -> None:
    a, b = normal(seed, 150, k, dtype=dtype), normal(seed + 1, k, n, dtype=dtype)
    added = normal(seed + 2, n, dtype=dtype) if bias else None
    b = transposed_weight(b) if transposed else b
    native.set_num_threads(threads)
    whole = matmul(a, b, added)
    native.set_num_threads(1)
    for begin, end in ((0, 1), (7, 9), (20, 36), (30, 47), (0, 100)):
        assert torch.equal(matmul(a[begin:end], b, added), whole[begin:end])
    native.set_num_threads(threads)
    assert torch.equal(matmul(a[140:141], b, added), whole[140:141])
    # Some of the columns, and a batch of the same weight.
    assert torch.equal(matmul(a, b[:, n // 2 :], None if added is None else added[n // 2 :]), whole[:, n // 2 :])
    assert torch.equal(matmul(a.view(3, 50, k), b, added), whole.view(3, 50, n))
    assert torch.equal(matmul(laid_out(a, "reversed"), b, added), whole)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(isa: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    bias = normal(0, n, dtype=dtype)
    got = matmul(torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype), bias)
    assert torch.equal(got, bias.expand(m, n))
    assert matmul(torch.zeros(0, 2, 3), torch.zeros(3, 4)).shape == (0, 2, 4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_wide_and_deep_weights(isa: str, dtype: torch.dtype) -> None:
    """Every block, group and prefetch at its limits."""
    native.set_num_threads(2)
    a, b = normal(1, 20, 2100, dtype=dtype), normal(2, 2100, 1100, dtype=dtype)
    want, error = a.double() @ b.double(), sum_error(a, b)
    for weight in (b, transposed_weight(b)):
        for rows in (1, 4, 20):
            assert_rounded(matmul(a[:rows], weight), want[:rows], error[:rows])
