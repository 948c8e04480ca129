"""The size of one rounding, from which the tolerances of the ops are derived; and an exact comparison."""

import torch

# Half a unit in the last place, relative: significands of 24, 11 and 8 bits.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = list(UNIT)
ODD_SIZES = [1, 3, 17, 31, 33, 127]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> None:
    """|got - exact| <= bound, elementwise; `exact` and `bound` in float64."""
    error = (got.to(torch.float64) - exact).abs()
    assert bool((error <= bound).all()), f"the error is {float((error / bound).max()):.3g} times what rounding explains"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Stricter than equal: zeros have signs, and a NaN is itself."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
