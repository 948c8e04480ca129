"""rope: position = (offset + index) * scale, in both layouts, compared with float64."""

import pytest
import torch
from rounding import DTYPES, UNIT, assert_within, random

from onward import ops

U32 = UNIT[torch.float32]


def definition(x, offsets, dims, inverse, scale, interleaved):
    """Said feature by feature in float64."""
    out = x.to(torch.float64).clone()
    for b, offset in enumerate(offsets):
        for t in range(x.shape[2]):
            for i in range(dims // 2):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2)
                angle = torch.tensor((offset + t) * scale, dtype=torch.float64) * inverse[i].to(torch.float64)
                a, c = x[b, :, t, first].to(torch.float64), x[b, :, t, second].to(torch.float64)
                out[b, :, t, first] = a * angle.cos() - c * angle.sin()
                out[b, :, t, second] = c * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "dims"), [(2, 2), (8, 6), (34, 34), (40, 18)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_rotates_pairs_by_their_position(dtype, dim, dims, interleaved):
    x = random(2, 3, 3, dim, dtype=dtype)
    inverse = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    offsets = [0, 100_000]
    got = ops.rope(x, torch.tensor(offsets, dtype=torch.int32), dims=dims, scale=0.5, interleaved=interleaved)
    exact = definition(x, offsets, dims, inverse.to(torch.float32), 0.5, interleaved)
    # cos and sin to a float32 rounding and a half each, two products and a sum of them, and the last rounding.
    bound = (8 * U32 + 1.1 * UNIT[dtype]) * 2 * x.to(torch.float64).abs().max()
    assert_within(got, exact, bound)


def test_explicit_inverse_frequencies_replace_the_schedule():
    x = random(1, 2, 5, 8)
    inverse = torch.tensor([1.0, 0.5, 0.25, 0.1])
    got = ops.rope(x, 7, dims=8, inv_freqs=inverse)
    assert_within(got, definition(x, [7], 8, inverse, 1.0, False), 20 * U32 * x.abs().max().item() * 2)


def test_an_int_offset_applies_to_every_row():
    x = random(3, 2, 4, 8)
    rows = torch.full((3,), 9, dtype=torch.int32)
    assert torch.equal(ops.rope(x, 9, dims=8), ops.rope(x, rows, dims=8))


def test_chunked_equals_whole():
    x = random(2, 3, 9, 16, dtype=torch.bfloat16)
    chunks = [ops.rope(x[:, :, at : at + 4], at + 5, dims=16) for at in range(0, 9, 4)]
    assert torch.equal(torch.cat(chunks, dim=2), ops.rope(x, 5, dims=16))
