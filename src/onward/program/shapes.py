"""One program for every number of tokens and rows.

In the program of a forward that is written for any B and T, every number (size, stride, offset) is a + bB + cT + dBT:
with B or T fixed, it is linear in the other. Programs traced at the ends of the range give the coefficients, and one
in between confirms them. A forward of another form (a mask [T, T], a branch on T) is traced for each shape instead.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
MOST_ROWS = 1031


class Grid:
    """A program for every shape that differs from `base` along the free axes only. `make_grid` makes it."""

    def __init__(
        self, image: ProgramImage, signature: Signature, free: tuple[bool, bool], base: Shape, most: Shape
    ) -> None:
        self.signature = signature  # of `most`
        self._image = image
        self._free = free
        self._base = base
        self._most = most
        # (power of B - base B, power of T - base T, coefficient for each number of the program)
        self._coefficients: list[tuple[int, int, ImageWords]] = []

    def covers(self, shape: Shape) -> bool:
        """Whether the shape lies in the confirmed range.

        B = 1 and T = 1 do not: the stride of a dimension of size 1 means nothing, and rules choose other kernels.
        """
        return all(
            1 < size <= most if free else size == base
            for size, free, base, most in zip(shape, self._free, self._base, self._most, strict=True)
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
        """Compute the coefficients from the numbers at the corners, each at (0 or 1, 0 or 1).

        Returns whether all are whole numbers.
        """
        steps = tuple(most - base for most, base in zip(self._most, self._base, strict=True))
        differences = dict(corners)
        for axis in (0, 1):  # differences along one axis, then their differences along the other
            for at in [at for at in differences if at[axis] == 1]:
                begin = differences[(0, at[1]) if axis == 0 else (at[0], 0)]
                differences[at], rest = np.divmod(differences[at] - begin, steps[axis])
                if rest.any():
                    return False
        self._coefficients = [(*powers, numbers) for powers, numbers in differences.items()]
        return True

    def confirms(self, shape: Shape, image: ProgramImage) -> bool:
        """Whether the grid's numbers for the shape are those of `image`, a program that was traced for it."""
        return _differ_in_numbers_only(image, self._image) and np.array_equal(self._numbers(shape), image.numbers)


def make_grid(
    trace_shape: TraceShape,
    fixed: Shape,
    free: tuple[bool, bool],
    most_tokens: int,
    traced: Mapping[Shape, ProgramImage],
) -> Grid | None:
    """A program for all shapes along the free axes (rows, tokens); None where one program cannot serve them.

    Args:
        trace_shape: traces the forward for a shape.
        fixed: the sizes of the axes that are not free.
        most_tokens: the largest T.
        traced: programs that were traced before; one of them may confirm the grid.
    """
    most = _along(free, Shape(MOST_ROWS, most_tokens), fixed)
    base, between = _along(free, _LOW, fixed), _along(free, _BETWEEN, fixed)
    if free[1] and most_tokens <= _BETWEEN.tokens:
        return None
    images: dict[tuple[int, int], ProgramImage] = {}
    try:
        for at in product(range(1 + free[0]), range(1 + free[1])):
            shape = Shape(*(high if end else low for end, low, high in zip(at, base, most, strict=True)))
            images[at], signature = trace_shape(shape)
        largest = images[at]
        grid = Grid(largest, signature, free, base, most)
        if not all(_differ_in_numbers_only(image, largest) for image in images.values()):
            return None
        if not grid.fit({at: image.numbers for at, image in images.items()}):
            return None
        if any(grid.covers(shape) and grid.confirms(shape, image) for shape, image in traced.items()):
            return grid
        return grid if grid.confirms(between, trace_shape(between)[0]) else None
    except OnwardError:  # the forward does not run for all shapes
        return None


def _along(free: tuple[bool, bool], varied: Shape, fixed: Shape) -> Shape:
    """The sizes of `varied` on the free axes, those of `fixed` on the others."""
    return Shape(*(new if axis else old for axis, new, old in zip(free, varied, fixed, strict=True)))


def _differ_in_numbers_only(image: ProgramImage, largest: ProgramImage) -> bool:
    """Whether two programs have the same calls, differ in their numbers only, and let torch run no operator."""
    return (
        all(len(each.segments) == 1 and each.segments[0].then is None for each in (image, largest))
        and len(image.words) == len(largest.words)
        and np.array_equal(image.places, largest.places)
        and np.array_equal(image.bases, largest.bases)
        and image.slots == largest.slots
        and len(image.storages) == len(largest.storages)
        and all(map(_same_or_beginning, image.storages, largest.storages))
    )


def _same_or_beginning(storage: Storage, largest: Storage) -> bool:
    """Whether a constant equals that of the largest shape, or the beginning of it, as a shorter arange does."""
    if storage.kind is not largest.kind:
        return False
    return storage.kind is not Kind.CONSTANT or _begins(_flat(largest), _flat(storage))


def _flat(storage: Storage) -> Tensor:
    assert storage.tensor is not None
    return storage.tensor.flatten()


def _begins(longer: Tensor, shorter: Tensor) -> bool:
    return longer.dtype == shorter.dtype and torch.equal(longer[: len(shorter)], shorter)
