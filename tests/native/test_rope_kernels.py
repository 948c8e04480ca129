"""rotate and rotary_angles, compared with their definitions. U is the unit roundoff of float32."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES, rotary_angles, rotate
from torch import Tensor

from onward import native

U = 2.0**-24
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inverse_frequencies(pairs: int, base: float = 10000.0) -> Tensor:
    return base ** -(torch.arange(pairs, dtype=torch.float32) / max(pairs, 1))


def halves(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second features of the pairs."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The definition, in the type of cos and sin [B, 1, T, pairs]."""
    out = x.to(cos.dtype, copy=True)
    first, second = (part.clone() for part in halves(out, cos.shape[-1], interleaved))
    to_first, to_second = halves(out, cos.shape[-1], interleaved)
    to_first.copy_(first * cos - second * sin)
    to_second.copy_(second * cos + first * sin)
    return out


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from((1, 2, 7, 33)))


@pytest.mark.parametrize("first", [0, 5, 1_000_000, 2**31 - 8])
@pytest.mark.parametrize("pairs", [1, 7, 16, 64])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_angles_are_the_nearest_float(isa: str, first: int, pairs: int, scale: float) -> None:
    radians = (torch.arange(first, first + 3)[:, None] * scale * inverse_frequencies(pairs).double()).float()[None]
    cos, sin = rotary_angles(radians)
    # A series good to 1e-11 and one rounding of a number below 1.
    for got, want in ((cos, radians.double().cos()), (sin[..., pairs:], radians.double().sin())):
        assert ((got[..., :pairs].double() - want).abs() <= U + 1e-11).all()
    assert torch.equal(cos[..., :pairs], cos[..., pairs:])
    assert torch.equal(sin[..., :pairs], -sin[..., pairs:])


@given(
    seed=seeds, shape=shapes, pairs=st.sampled_from((1, 3, 8, 17, 64)), extra=st.sampled_from((0, 5)),
    dtype=st.sampled_from(DTYPES), interleaved=st.booleans(),
)  # fmt: skip
@per_isa
def test_rotate_has_the_bits_of_the_definition(
    isa: str, seed: int, shape: tuple[int, int, int], pairs: int, extra: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """Two products and a sum, each rounded to float32, in the definition as in the kernel."""
    batch, heads, queries = shape
    x = normal(seed, batch, queries, heads, 2 * pairs + extra, dtype=dtype).transpose(1, 2)
    angle = torch.rand(batch, queries, pairs, generator=torch.Generator().manual_seed(seed)) * 100
    want = turned(x, angle.cos()[:, None], angle.sin()[:, None], interleaved).to(dtype)
    assert torch.equal(rotate(x, angle.cos(), angle.sin(), interleaved=interleaved), want)


def angles(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    radians = 100 * normal(seed, *shape, dtype=torch.float32)
    return radians.cos(), radians.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [3, 32])
def test_in_place_and_unaligned(isa: str, interleaved: bool, pairs: int) -> None:
    memory = normal(1, 2 * 4 * 9 * 70 + 1, dtype=torch.bfloat16)
    x = memory[1:].view(2, 4, 9, 70)
    cos, sin = angles(2, 2, 9, pairs)
    want = rotate(x.clone(), cos, sin, interleaved=interleaved)
    rotate(x, cos, sin, interleaved=interleaved, out=x)
    assert torch.equal(x, want)


@given(seed=seeds, threads=st.integers(1, 4), start=st.integers(0, 599), row=st.integers(0, 2))
@settings(parent=per_isa, max_examples=20)
def test_bits_depend_only_on_the_token(isa: str, seed: int, threads: int, start: int, row: int) -> None:
    x, radians = normal(seed, 3, 2, 600, 24, dtype=torch.float32), 100 * normal(seed, 3, 600, 11, dtype=torch.float32)
    native.set_num_threads(threads)
    cos, sin = rotary_angles(radians)
    whole = rotate(x, cos[..., :11].contiguous(), sin[..., 11:].contiguous())
    one, part = slice(row, row + 1), slice(start, start + 1)
    cos, sin = rotary_angles(radians[one, part].contiguous())
    alone = rotate(x[one, :, part], cos[..., :11].contiguous(), sin[..., 11:].contiguous())
    assert torch.equal(alone, whole[one, :, part])


def test_an_angle_of_zero_changes_nothing(isa: str) -> None:
    x = normal(2, 1, 2, 1, 16, dtype=torch.float32)
    assert torch.equal(rotate(x, torch.ones(1, 1, 8), torch.zeros(1, 1, 8)), x)
