"""Conversions between element types, which agree with torch's."""

import pytest
import torch
from kernel_calls import CODES, DTYPES, call, poisoned

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0, 1e-7, 6e-8, 3e-8, 2.9e-8]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_conversions_round_like_torch(isa: str, source: torch.dtype, target: torch.dtype) -> None:
    # All 16-bit patterns that are no bf16 subnormals (AVX-512 writes those as 0), and special floats.
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    patterns = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float(), torch.tensor(SPECIAL)])
    patterns = torch.cat([patterns, patterns * 1.00390625, patterns * 1.0009765625])
    x = patterns[(patterns.abs() >= 2.0**-126) | (patterns == 0) | patterns.isnan()].to(source)
    x = x[(x.float().abs() >= 2.0**-126) | (x == 0) | x.isnan()][None]
    out = poisoned(x.shape, target)
    call(
        "onward_convert", 1, x.shape[1], x.data_ptr(), CODES[source], x.stride(0), out.data_ptr(), CODES[target],
        out.stride(0),
    )  # fmt: skip
    want = x.to(target)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(0), want.nan_to_num(0))
