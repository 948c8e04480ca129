"""The angles of rotary position embedding by themselves."""

import pytest
import torch
from kernel_calls import call, poisoned

U = 2.0**-24


@pytest.mark.parametrize("offsets", [[0], [5, 1_000_000, 2**31 - 8]])
@pytest.mark.parametrize("pairs", [1, 7, 16, 64])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_angles_are_the_nearest_float(isa: str, offsets: list[int], pairs: int, scale: float) -> None:
    frequencies = 10000.0 ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    at = torch.tensor(offsets, dtype=torch.int32)
    batch, queries = len(offsets), 3
    cos, sin = (poisoned((batch, queries, 2 * pairs), torch.float32) for _ in range(2))
    call(
        "onward_angles", batch, queries, at.data_ptr(), frequencies.data_ptr(), pairs, scale, cos.data_ptr(),
        sin.data_ptr(),
    )  # fmt: skip
    radians = (at[:, None] + torch.arange(queries)).double()[..., None] * scale * frequencies.double()
    # The same product in double; then a series good to 1e-11 and one rounding of a number below 1.
    for got, want in ((cos, radians.cos()), (sin[..., pairs:], radians.sin())):
        assert ((got[..., :pairs].double() - want).abs() <= U + 1e-11).all()
    assert torch.equal(cos[..., :pairs], cos[..., pairs:])
    assert torch.equal(sin[..., :pairs], -sin[..., pairs:])
