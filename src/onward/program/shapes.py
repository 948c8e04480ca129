"""One program for every number of tokens and rows.

Of a forward written for any B and T, every number in its program (sizes, strides, offsets) is a + bB + cT + dBT: with
one of them fixed, a line in the other. Programs traced at the ends of the range give the coefficients, one more in
between confirms them. What is of no such form (a mask [T, T], a branch on T) is traced for each shape instead.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onward.errors import OnwardError
from onward.program.arrays import Kind, Storage
from onward.program.encode import Image, Words
from onward.program.native import Signature


class Shape(NamedTuple):
    """Of tokens [B, T]."""

    batch: int
    tokens: int


Traced = Callable[[Shape], tuple[Image, Signature]]

# Where programs are traced. Odd and coprime to the sizes of models, so that no two sizes are equal by chance.
_LOW = Shape(17, 11)
_BETWEEN = Shape(19, 13)
MOST_ROWS = 67


class Grid:
    """A program for every shape that differs from `base` along the free axes only. (`through` makes them.)"""

    def __init__(self, image: Image, signature: Signature, free: tuple[bool, bool], base: Shape, most: Shape) -> None:
        self.signature = signature  # of `most`
        self._image = image
        self._free = free
        self._base = base
        self._most = most
        self._coefficients: list[tuple[int, int, Words]] = []  # powers of B and T beyond the base, and what they add

    def covers(self, shape: Shape) -> bool:
        """Whether the shape lies in the confirmed range. One row and one token are shapes of their own: of a size of
        1 strides mean nothing, and rules choose other kernels."""
        return all(
            1 < size <= most if free else size == base
            for size, free, base, most in zip(shape, self._free, self._base, self._most, strict=True)
        )

    def image(self, shape: Shape) -> Image:
        return self._image.with_numbers(self._numbers(shape))

    def _numbers(self, shape: Shape) -> Words:
        rows, tokens = shape.batch - self._base.batch, shape.tokens - self._base.tokens
        total = np.zeros_like(self._coefficients[0][2])
        for by_rows, by_tokens, numbers in self._coefficients:
            total += rows**by_rows * tokens**by_tokens * numbers
        return total

    def fit(self, corners: dict[tuple[int, int], Words]) -> bool:
        """Take the coefficients from the numbers at the corners, (0 or 1, 0 or 1) each; False if they are no whole
        numbers."""
        steps = tuple(most - base for most, base in zip(self._most, self._base, strict=True))
        left = dict(corners)
        for axis in (0, 1):  # differences along one axis, then of those along the other
            for at in [at for at in left if at[axis] == 1]:
                begin = left[(0, at[1]) if axis == 0 else (at[0], 0)]
                left[at], rest = np.divmod(left[at] - begin, steps[axis])
                if rest.any():
                    return False
        self._coefficients = [(*powers, numbers) for powers, numbers in left.items()]
        return True

    def confirms(self, shape: Shape, image: Image) -> bool:
        return _alike(image, self._image) and np.array_equal(self._numbers(shape), image.numbers)


def through(
    traced: Traced, fixed: Shape, free: tuple[bool, bool], most_tokens: int, known: Mapping[Shape, Image]
) -> Grid | None:
    """The programs of all shapes along the free axes (rows, tokens); None where they are no family.

    traced: traces the forward for a shape. fixed: the sizes of the axes that are not free. most_tokens: the largest T.
    known: programs that were traced before; one of them may confirm.
    """
    most = _along(free, Shape(MOST_ROWS, most_tokens), fixed)
    base, between = _along(free, _LOW, fixed), _along(free, _BETWEEN, fixed)
    if free[1] and most_tokens <= _BETWEEN.tokens:
        return None
    images: dict[tuple[int, int], Image] = {}
    try:
        for at in product(range(1 + free[0]), range(1 + free[1])):
            shape = Shape(*(high if end else low for end, low, high in zip(at, base, most, strict=True)))
            images[at], signature = traced(shape)
        last = images[at]
        grid = Grid(last, signature, free, base, most)
        if not all(_alike(image, last) for image in images.values()):
            return None
        if not grid.fit({at: image.numbers for at, image in images.items()}):
            return None
        if any(grid.covers(shape) and grid.confirms(shape, image) for shape, image in known.items()):
            return grid
        return grid if grid.confirms(between, traced(between)[0]) else None
    except OnwardError:  # this forward serves its own shapes only
        return None


def _along(free: tuple[bool, bool], varied: Shape, fixed: Shape) -> Shape:
    return Shape(*(new if axis else old for axis, new, old in zip(free, varied, fixed, strict=True)))


def _alike(image: Image, largest: Image) -> bool:
    """Whether two programs differ in numbers only, and torch runs nothing in them."""
    return (
        all(len(each.segments) == 1 and each.segments[0].then is None for each in (image, largest))
        and len(image.words) == len(largest.words)
        and np.array_equal(image.places, largest.places)
        and np.array_equal(image.bases, largest.bases)
        and image.slots == largest.slots
        and len(image.storages) == len(largest.storages)
        and all(map(_extends, image.storages, largest.storages))
    )


def _extends(mine: Storage, largest: Storage) -> bool:
    """Whether a constant is that of the largest shape, or the beginning of it (as of an arange)."""
    if mine.kind is not largest.kind:
        return False
    return mine.kind is not Kind.CONSTANT or _begins(_flat(largest), _flat(mine))


def _flat(storage: Storage) -> Tensor:
    assert storage.tensor is not None
    return storage.tensor.flatten()


def _begins(longer: Tensor, shorter: Tensor) -> bool:
    return longer.dtype == shorter.dtype and torch.equal(longer[: len(shorter)], shorter)
