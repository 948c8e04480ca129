"""One program for a range of numbers of rows and tokens.

In the program of a forward that works for any B and T, every number (size, stride, offset) is a + bB + cT + dBT: with B
or T fixed, it is linear in the other. Programs traced at the ends of the range determine the coefficients, and one in
between confirms them. Any other forward (with a mask [T, T], a branch on T) is traced for each shape instead.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from onward.errors import OnwardError
from onward.program.encode import ImageWords, ProgramImage
from onward.program.executable import Signature
from onward.program.graph import Kind, Storage


class Shape(NamedTuple):
    """The shape of tokens [B, T]."""

    batch: int
    tokens: int


TraceShape = Callable[[Shape], tuple[ProgramImage, Signature]]

# Shapes to trace programs at. Odd and coprime to the sizes of models, so that no two sizes are equal by chance.
_LOW = Shape(17, 11)
_BETWEEN = Shape(19, 13)
MAX_ROWS, MAX_TOKENS = 1031, 512


class Grid:
    """A program for every shape that only differs from `base` along the free axes, created by `make_grid`."""

    def __init__(
        self, image: ProgramImage, signature: Signature, free: tuple[bool, bool], base: Shape, largest: Shape
    ) -> None:
        self.signature = signature  # of `largest`
        self._image = image
        self._free = free
        self._base = base
        self._largest = largest
        # (power of B - base B, power of T - base T, coefficient for each number of the program)
        self._coefficients: list[tuple[int, int, ImageWords]] = []

    def covers(self, shape: Shape) -> bool:
        """Whether the shape is in the confirmed range.

        B = 1 and T = 1 are not: strides of dimensions of size 1 are arbitrary, and rules choose other kernels.
        """
        return all(
            1 < size <= largest if free else size == base
            for size, free, base, largest in zip(shape, self._free, self._base, self._largest, strict=True)
        )

    def image(self, shape: Shape) -> ProgramImage:
        return self._image.with_numbers(self._numbers(shape))

    def _numbers(self, shape: Shape) -> ImageWords:
        rows, tokens = shape.batch - self._base.batch, shape.tokens - self._base.tokens
        total = np.zeros_like(self._coefficients[0][2])
        for by_rows, by_tokens, numbers in self._coefficients:
            total += rows**by_rows * tokens**by_tokens * numbers
        return total

    def fit(self, corners: dict[tuple[int, int], ImageWords]) -> bool:
        """Compute the coefficients from the numbers at the corners (0 or 1, 0 or 1) of the range.

        Returns whether all are whole numbers.
        """
        steps = tuple(largest - base for largest, base in zip(self._largest, self._base, strict=True))
        differences = dict(corners)
        for axis in (0, 1):  # differences along one axis, then their differences along the other
            for corner in [corner for corner in differences if corner[axis] == 1]:
                start = differences[(0, corner[1]) if axis == 0 else (corner[0], 0)]
                differences[corner], remainder = np.divmod(differences[corner] - start, steps[axis])
                if remainder.any():
                    return False
        self._coefficients = [(*powers, numbers) for powers, numbers in differences.items()]
        return True

    def confirms(self, shape: Shape, image: ProgramImage) -> bool:
        """Whether the grid's numbers for the shape equal those of `image`, a program traced for it."""
        return _differ_in_numbers_only(image, self._image) and np.array_equal(self._numbers(shape), image.numbers)


def make_grid(
    trace_shape: TraceShape, fixed: Shape, free: tuple[bool, bool], traced: Mapping[Shape, ProgramImage]
) -> Grid | None:
    """A program for all shapes along the free axes (rows, tokens); None if one program can't serve them.

    Args:
        trace_shape: traces the forward for a shape.
        fixed: the sizes of the axes that are not free.
        traced: programs of single shapes; one of them may confirm the grid.
    """
    base, between, largest = (
        Shape(*(new if axis else old for axis, new, old in zip(free, varied, fixed, strict=True)))
        for varied in (_LOW, _BETWEEN, Shape(MAX_ROWS, MAX_TOKENS))
    )
    images: dict[tuple[int, int], ProgramImage] = {}
    try:
        for corner in product(range(1 + free[0]), range(1 + free[1])):
            shape = Shape(*(high if end else low for end, low, high in zip(corner, base, largest, strict=True)))
            images[corner], signature = trace_shape(shape)
        grid = Grid(images[corner], signature, free, base, largest)
        if not all(_differ_in_numbers_only(image, images[corner]) for image in images.values()):
            return None
        if not grid.fit({at: image.numbers for at, image in images.items()}):
            return None
        if any(grid.covers(shape) and grid.confirms(shape, image) for shape, image in traced.items()):
            return grid
        return grid if grid.confirms(between, trace_shape(between)[0]) else None
    except OnwardError:  # the forward does not run for all shapes
        return None


def _differ_in_numbers_only(image: ProgramImage, largest: ProgramImage) -> bool:
    """Whether two programs have the same calls, only differ in their numbers, and run no operator with torch."""
    return (
        all(len(each.segments) == 1 and each.segments[0].then is None for each in (image, largest))
        and len(image.words) == len(largest.words)
        and np.array_equal(image.places, largest.places)
        and np.array_equal(image.bases, largest.bases)
        and image.slots == largest.slots
        and len(image.storages) == len(largest.storages)
        and all(map(_is_prefix, image.storages, largest.storages))
    )


def _is_prefix(storage: Storage, largest: Storage) -> bool:
    """Whether a constant is a prefix of the largest shape's constant, as a shorter arange is."""
    if storage.kind is not Kind.CONSTANT or largest.kind is not Kind.CONSTANT:
        return storage.kind is largest.kind
    assert storage.tensor is not None
    assert largest.tensor is not None
    short, long = storage.tensor.flatten(), largest.tensor.flatten()
    return long.dtype == short.dtype and torch.equal(long[: len(short)], short)
