"""Codebooks, and a search for the scale of a group of weights with the smallest error.

Shapes: G groups of 32 inputs are columns, [32, G], so that sums run over rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onward.ops.formats import IQ4

_REFINEMENTS = 2
# Below this magnitude a group's float16 scale is 0, and the reciprocal of its extreme could overflow.
_SMALLEST = 1e-30


class Codebook(NamedTuple):
    """The values that the weights of a group, divided by its scale, are rounded to.

    nearest: float32 [...] -> the nearest values; it may write to its argument. codes: the values -> int8, as
    `QuantizedWeight.pack` takes them. places: the search's candidates for a group's element of largest magnitude; it is
    clipped beyond the ends. plain: the candidates without a search, used unless the search is better.
    """

    nearest: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor], Tensor]
    places: tuple[float, ...] = ()
    plain: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """The magnitude of the largest weight with a float16 scale, by the first plain rule."""
        return abs(self.plain[0]) * torch.finfo(torch.float16).max

    def rounded(self, groups: Tensor, scale: Tensor) -> Tensor:
        """The values, as floats, of groups [inputs, G] rounded with a scale [G]; nearest to 0 for a scale of 0."""
        return self.nearest(groups * torch.where(scale == 0, 0.0, 1 / scale))


_TABLE = torch.tensor(IQ4, dtype=torch.float32)
_MIN, _MAX = IQ4[0], IQ4[-1]
# Midpoints between values are multiples of 1/2, so x is rounded as ceil(2 x) / 2; a midpoint rounds down.
_NEAREST = _TABLE[torch.bucketize(torch.arange(2 * _MIN, 2 * _MAX + 1) / 2, (_TABLE[1:] + _TABLE[:-1]) / 2)]
_CODES = torch.bucketize(torch.arange(_MIN, _MAX + 1), _TABLE).to(torch.int8)


def _nearest_in_table(quotients: Tensor) -> Tensor:
    halves = quotients.mul_(2).nan_to_num_(0.0).ceil_().clamp_(2 * _MIN, 2 * _MAX).sub_(2 * _MIN)
    return _look_up(_NEAREST, halves)


def _look_up(table: Tensor, places: Tensor) -> Tensor:
    return table.to(places.device).index_select(0, places.to(torch.int64).flatten()).view(places.shape)


# A grid forty times as fine reduces the error by 0.05 to 0.4 % with int4, 0.1 to 0.3 % with iq4_nl
# (docs/quantization.md). Plain: absmax and the rule of llama.cpp's Q4_0; for the table either of its ends.
CODEBOOKS = {
    "int4": Codebook(
        lambda quotients: quotients.round_().clamp_(-8, 7),
        lambda values: values.to(torch.int8),
        places=(-9.5, -9.0, -8.5, -8.0, -7.5, -7.0, 6.0, 6.67, 7.33, 8.0),
        plain=(7.0, -8.0),
    ),
    "iq4_nl": Codebook(
        _nearest_in_table,
        lambda values: _look_up(_CODES, values - _MIN),
        places=(-145.0, -136.0, -127.0, -119.0, -110.0, -102.0, 90.0, 98.0, 106.0, 113.0, 121.0, 129.0),
        plain=(-127.0, 113.0),
    ),
}


def best_scale(groups: Tensor, codebook: Codebook) -> Tensor:
    """float32 [32, G] -> float16 [G]."""
    extreme = extremes(groups)
    best = (extreme / codebook.plain[0]).to(torch.float16)
    _, best_error = _with_scale(groups, best, codebook)

    def keep_if_better(scale: Tensor) -> Tensor:
        nonlocal best, best_error
        stored = scale.to(torch.float16)
        values, error = _with_scale(groups, stored, codebook)
        better = error < best_error  # false if the scale overflowed: then the error is NaN or infinite
        best, best_error = torch.where(better, stored, best), torch.where(better, error, best_error)
        return values

    keep_if_better(extreme / codebook.plain[1])
    values = keep_if_better(_search(groups, extreme, codebook))
    for _ in range(_REFINEMENTS):
        product, size = _moments(values, groups)
        values = keep_if_better(product / size)
    return best + 0  # no -0


def _search(groups: Tensor, extreme: Tensor, codebook: Codebook) -> Tensor:
    """The best least-squares scale [G] over the places of the codebook. With the scale sum(q x) / sum(q²) the error is
    sum(x²) - sum(q x)² / sum(q²): maximise the second term."""
    reciprocal = torch.where(extreme.abs() < _SMALLEST, 0.0, 1 / extreme)
    best_gain, best = torch.zeros_like(extreme), extreme / codebook.plain[0]
    for place in codebook.places:
        product, size = _moments(codebook.nearest(groups * (reciprocal * place)), groups)
        scale = product / size
        gain = product * scale
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better, scale, best)
    return best


def _moments(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """sum(q x) and sum(q²) of each group, the latter 1 if all values are 0."""
    return _sum(values * groups), _sum(values.square()).clamp_min_(1.0)


def _with_scale(groups: Tensor, stored: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """The values for a float16 scale [G], and the squared errors [G]."""
    scale = stored.to(torch.float32)
    values = codebook.rounded(groups, scale)
    return values, _sum((groups - values * scale).square_())


def extremes(groups: Tensor) -> Tensor:
    """The element of the largest magnitude of each group, with its sign: [inputs, G] -> [G]."""
    highest, lowest = groups.amax(0), groups.amin(0)
    return torch.where(highest >= -lowest, highest, lowest)


def _sum(terms: Tensor) -> Tensor:
    """[32, G] -> [G], from the first row to the last, as in the kernel, so that the bits agree."""
    total = terms[0].clone()
    for row in terms[1:]:
        total += row
    return total
