"""rope and rotate: against their definitions.

U is the unit roundoff of float32. cos and sin are within U of the truth (a neighbouring float at worst, of
numbers below 1), their products and the sum are rounded once each: |error| <= 3 U (|x| + |y|) for a pair.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES, rope, rotate
from torch import Tensor

from onward import native

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-24}
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


@given(
    seed=seeds, shape=shapes, pairs=st.sampled_from((0, 1, 3, 8, 16, 17, 64)), extra=st.sampled_from((0, 1, 5, 64)),
    dtype=st.sampled_from(DTYPES), interleaved=st.booleans(), scale=st.sampled_from((1.0, 0.25, 1 / 3)),
    far=st.sampled_from((0, 1000, 1_000_000)),
)  # fmt: skip
@per_isa
def test_rope_agrees_with_the_definition(
    isa: str, seed: int, shape: tuple[int, int, int], pairs: int, extra: int, dtype: torch.dtype, interleaved: bool,
    scale: float, far: int,
) -> None:  # fmt: skip
    batch, heads, queries = shape
    x = normal(seed, batch, heads, queries, max(2 * pairs + extra, 1), dtype=dtype)
    offsets = torch.randint(far + 1, (batch,), generator=torch.Generator().manual_seed(seed)).int()
    frequencies = inverse_frequencies(pairs)
    position = (offsets[:, None].double() + torch.arange(queries)) * scale
    angle = (position[..., None] * frequencies.double())[:, None]
    want = turned(x, angle.cos(), angle.sin(), interleaved)
    first, second = halves(x.double().abs(), pairs, interleaved)
    pair_bound = 3 * U * (first + second) + 1e-9 * (first + second)  # the angle itself, in double
    bound = torch.zeros_like(want)
    for part in halves(bound, pairs, interleaved):
        part.copy_(pair_bound)
    bound = bound + ROUNDING[dtype] * (want.abs() + bound) + SMALLEST[dtype]
    got = rope(x, offsets, frequencies, scale=scale, interleaved=interleaved)
    assert bool(((got.double() - want).abs() <= bound).all())
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [3, 32])
def test_in_place_and_unaligned(isa: str, interleaved: bool, pairs: int) -> None:
    memory = normal(1, 2 * 4 * 9 * 70 + 1, dtype=torch.bfloat16)
    x = memory[1:].view(2, 4, 9, 70)
    offsets, frequencies = torch.tensor([3, 900], dtype=torch.int32), inverse_frequencies(pairs)
    want = rope(x.clone(), offsets, frequencies, interleaved=interleaved)
    rope(x, offsets, frequencies, interleaved=interleaved, out=x)
    assert torch.equal(x, want)


@given(seed=seeds, threads=st.integers(1, 4), start=st.integers(0, 599), row=st.integers(0, 2))
@settings(parent=per_isa, max_examples=20)
def test_bits_depend_on_the_token_alone(isa: str, seed: int, threads: int, start: int, row: int) -> None:
    x, offsets = normal(seed, 3, 2, 600, 24, dtype=torch.float32), torch.tensor([5, 0, 1000], dtype=torch.int32)
    frequencies = inverse_frequencies(11)
    native.set_num_threads(threads)
    whole = rope(x, offsets, frequencies)
    alone = rope(x[row : row + 1, :, start : start + 1], offsets[row : row + 1] + start, frequencies)
    assert torch.equal(alone, whole[row : row + 1, :, start : start + 1])


def test_the_first_position_is_left_as_it_is(isa: str) -> None:
    x = normal(2, 1, 2, 1, 16, dtype=torch.float32)
    assert torch.equal(rope(x, torch.zeros(1, dtype=torch.int32), inverse_frequencies(8)), x)
