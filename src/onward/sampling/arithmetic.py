"""The functions of sampling, in operations that every machine rounds alike.

A draw must not depend on whose `exp` and `log` are installed: vectorised, libm's and a GPU's differ in the last
bits, and so do sums taken in another order. Here both functions are sums, products and quotients of IEEE 754, each
rounded by itself, and sums of probabilities are sums of integers. native/src/sampling/arithmetic.h does the same
operation by operation, so that the kernels keep the same ids and draw the same tokens, bit for bit.
"""

import torch
from torch import Tensor

# Relative probabilities are counted in units of 2^-40: a sum over 2^22 ids fits an int64, and rounding to units
# moves the mass of 152,000 ids by 7e-8 of the likeliest one's at most.
UNITS = 2.0**40

# Below a score of -40 nothing is a unit.
_LOWEST = -40.0
_INVERSE_LN2 = float.fromhex("0x1.715476p+0")
# ln 2 in two parts, the first short enough that n times it is exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")
# e^f on |f| <= ln 2 / 2, fitted to 3e-9.
_EXP = tuple(
    float.fromhex(c)
    for c in ("0x1.6a244cp-10", "0x1.1239d4p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1")
)
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")


def relative_probability(scores: Tensor) -> Tensor:
    """e^scores for float32 scores of at most 0, within 2 units in the last place; scores below -40 count as -40."""
    scores = scores.clamp(min=_LOWEST)
    n = (scores * _INVERSE_LN2).round()
    f = scores - n * _LN2_HIGH - n * _LN2_LOW
    total = torch.full_like(f, _EXP[0])
    for coefficient in _EXP[1:]:
        # Two roundings, in steps of their own: a fused multiply and add would have one.
        total = total * f
        total = total + coefficient
    powers = torch.tensor([2.0**-i for i in range(59)], dtype=torch.float32, device=scores.device)
    return total * powers[n.neg().nan_to_num(0.0).to(torch.int64)]


def units(probabilities: Tensor) -> Tensor:
    """float in 0 … 1 -> int64: whole units of 2^-40, ties to even."""
    return (probabilities.to(torch.float64) * UNITS).round().to(torch.int64)


def logarithm(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal float64, with a relative error below 4e-16."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = torch.where(small, mantissa + mantissa, mantissa)
    exponent = exponent - small.to(exponent.dtype)
    # log m = 2 artanh r with r = (m - 1) / (m + 1), by its series.
    f = mantissa - 1.0
    r = f / (f + 2.0)
    square = r * r
    total = torch.full_like(r, 1 / 19)
    for k in range(17, 1, -2):
        total = total * square
        total = total + 1.0 / k
    twice = r + r
    return (twice + twice * (total * square)) + exponent.to(torch.float64) * _LN2
