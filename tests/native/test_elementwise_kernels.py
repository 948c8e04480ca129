"""Gated activations, sums, gathered rows and argmax, compared with their definitions.

U is the unit roundoff of float32. The error of e^x is 3 U (1.2 units in the last place, and two roundings per step in
the portable library), that of a sigmoid 5 U, so that of silu times a factor 8 U. The error of gelu's distribution
function is 20 U, plus x^2 / 2 U in the portable library, which cannot correct the rounding error of x^2 / 2.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES, argmax, combine, gather_rows
from torch import Tensor

from onward import native
from onward.errors import NativeError

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-24}
SIZES = (1, 3, 17, 31, 33, 127, 1000)
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def spread(x: Tensor) -> Tensor:
    """The same rows farther apart, at an odd address."""
    memory = torch.zeros(x.shape[0] * (x.shape[1] + 3) + 1, dtype=x.dtype)[1:].view(x.shape[0], -1)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def assert_relative(got: Tensor, want: Tensor, relative: Tensor | float, absolute: Tensor | float = 0.0) -> None:
    bound = want.abs() * relative + absolute
    bound = bound + ROUNDING[got.dtype] * (want.abs() + bound) + SMALLEST[got.dtype]
    excess = ((got.double() - want).abs() - bound).max().item()
    assert excess <= 0, f"{excess} beyond the bound"


def gelu_error(x: Tensor) -> Tensor | float:
    return 20 * U + (x.double().square() / 2 * U if native.isa() == "portable" else 0.0)


def gelu_tanh_error(x: Tensor) -> Tensor:
    """The argument of the sigmoid has four roundings, and e^y is off by y times its relative error."""
    y = (2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).double().abs()
    return 8 * U + 5 * U * y


shapes = st.tuples(st.integers(1, 4), st.sampled_from(SIZES))


@given(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES), threads=st.integers(1, 3))
@per_isa
def test_gates_and_sums_agree_with_their_definitions(
    isa: str, seed: int, shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    native.set_num_threads(threads)
    a, b = normal(seed, *shape, dtype=dtype), normal(seed + 1, *shape, dtype=dtype)
    x, y = a.double(), b.double()
    a, b = spread(a), spread(b)
    # A sigmoid below the normal floats counts as 0, and what multiplies it is x (or 1) and y.
    lost = torch.finfo(torch.float32).tiny * (x.abs() + 1) * y.abs()
    assert_relative(combine("swiglu", a, b), silu(x) * y, 8 * U, lost)
    assert_relative(combine("sigmoid_gate", a, b), x.sigmoid() * y, 8 * U, lost)
    assert_relative(combine("geglu", a, b, 0), gelu(x) * y, gelu_error(x), lost)
    assert_relative(combine("geglu", a, b, 1), gelu_tanh(x) * y, gelu_tanh_error(x), lost)
    assert_relative(combine("add", a, b), x + y, 0.0)


def test_activations_over_their_whole_range(isa: str) -> None:
    x = torch.linspace(-30, 30, 600_001)[None]
    one = torch.ones_like(x)
    exact = x.double()
    assert_relative(combine("swiglu", x, one), silu(exact), 8 * U)
    normal_range = x.abs() < 13  # below, the distribution is no normal float
    inside, ones = x[normal_range][None], one[normal_range][None]
    assert_relative(combine("geglu", inside, ones, 0), gelu(inside.double()), gelu_error(inside))
    assert_relative(combine("geglu", inside, ones, 1), gelu_tanh(inside.double()), gelu_tanh_error(inside))


@pytest.mark.parametrize("kind", [("swiglu",), ("geglu", 0), ("geglu", 1)])
def test_extremes(isa: str, kind: tuple[str, int]) -> None:
    x = torch.tensor([[0.0, 1e30, -1e30, math.inf, math.nan, 100.0, -100.0]])
    out = combine(kind[0], x, torch.ones_like(x), *kind[1:])[0]
    assert out[:2].tolist() == [0.0, x[0, 1]]
    assert out[2].item() == 0.0
    assert out[3].item() == math.inf
    assert out[4].isnan()
    assert out[5].item() == 100.0
    assert -1e-35 < out[6].item() <= 0.0


@given(seed=seeds, dtype=st.sampled_from(DTYPES), threads=st.integers(1, 4))
@settings(parent=per_isa, max_examples=10)
def test_an_element_has_the_same_bits_at_any_position(isa: str, seed: int, dtype: torch.dtype, threads: int) -> None:
    a, b = normal(seed, 1, 20_000, dtype=dtype), normal(seed + 1, 1, 20_000, dtype=dtype)
    native.set_num_threads(threads)
    for name, *options in (("swiglu",), ("sigmoid_gate",), ("geglu", 0), ("geglu", 1)):
        whole = combine(name, a, b, *options)
        assert torch.equal(combine(name, a[:, 7:40], b[:, 7:40], *options), whole[:, 7:40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [1, 17, 1000])
def test_gathered_rows(isa: str, dtype: torch.dtype, ids_dtype: torch.dtype, columns: int) -> None:
    table = spread(normal(1, 50, columns, dtype=dtype))
    ids = torch.tensor([0, 49, 7, 7, 31] * 30, dtype=ids_dtype)
    assert torch.equal(gather_rows(table, ids), table[ids.long()])


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_an_id_outside_the_table_is_refused(isa: str, bad: int) -> None:
    with pytest.raises(NativeError, match="bad argument"):
        gather_rows(torch.zeros(50, 8), torch.tensor([3, bad]))


@given(
    seed=seeds, columns=st.sampled_from((1, 3, 255, 256, 257, 1000, 40_000)), dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 4), ties=st.booleans(), sorted_row=st.booleans(),
)  # fmt: skip
@per_isa
def test_argmax_is_the_first_maximum(
    isa: str, seed: int, columns: int, dtype: torch.dtype, threads: int, ties: bool, sorted_row: bool
) -> None:
    native.set_num_threads(threads)
    x = normal(seed, 3, columns, dtype=dtype)
    if ties:
        x = x.round().clamp(-2, 2)
    if sorted_row:
        x = x.sort(-1).values
    first = (x == x.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(spread(x)), first)


@given(
    seed=seeds, columns=st.sampled_from((5, 300, 40_000)), at=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    fill=st.sampled_from((0.0, -math.inf, math.inf)),
)  # fmt: skip
@per_isa
def test_argmax_finds_the_first_nan(isa: str, seed: int, columns: int, at: list[float], fill: float) -> None:
    x = torch.full((1, columns), fill)
    places = [int(share * (columns - 1)) for share in at]
    x[0, places] = math.nan
    assert argmax(x).item() == min(places)


def test_argmax_of_rows_without_a_finite_value(isa: str) -> None:
    assert argmax(torch.full((2, 700), -math.inf)).tolist() == [0, 0]
