"""One program for every number of tokens.

Of a forward written for any T, every number in its program (sizes, strides, offsets) grows with T along a straight
line, or not at all. Two traces give the line, a third one, far away, confirms it for the whole range. What is not
on a line (a mask [T, T], a branch on T) is traced for each T instead.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onward.program.arrays import Kind, Storage
from onward.program.encode import Image, Words
from onward.program.native import Signature

# Odd and coprime to the sizes of models, so that no two sizes are equal by chance.
FIRST, SECOND = 11, 13


def line_through(images: tuple[Image, Image, Image], at: tuple[int, int, int], signature: Signature) -> "Line | None":
    """The family of programs of which three are given, for `at` tokens each; None where they are no family.

    signature: of the last.
    """
    first, second, last = images
    if any(image.segments[0].then is not None or len(image.segments) > 1 for image in images):
        return None
    alike = all(
        len(image.words) == len(last.words)
        and np.array_equal(image.places, last.places)
        and np.array_equal(image.bases, last.bases)
        and image.slots == last.slots
        and len(image.storages) == len(last.storages)
        for image in images
    )
    if not alike or not _constants_extend((first, second), last):
        return None
    begin, middle, end = (image.numbers for image in images)
    slope, rest = np.divmod(middle - begin, at[1] - at[0])
    if rest.any() or not np.array_equal(begin + slope * (at[2] - at[0]), end):
        return None
    return Line(last, signature, begin, slope, at[0])


class Line:
    """A program for every number of tokens."""

    def __init__(self, image: Image, signature: Signature, numbers: Words, slope: Words, at: int) -> None:
        self.signature = signature
        self._image = image
        self._numbers = numbers
        self._slope = slope
        self._at = at

    def image(self, tokens: int) -> Image:
        return self._image.with_numbers(self._numbers + self._slope * (tokens - self._at))


def _constants_extend(shorter: Sequence[Image], longest: Image) -> bool:
    """Whether the constants are those of the longest, or the beginnings of them (as of an arange)."""
    for image in shorter:
        for mine, theirs in zip(image.storages, longest.storages, strict=True):
            if mine.kind is not theirs.kind:
                return False
            if mine.kind is Kind.CONSTANT and not _begins(_flat(theirs), _flat(mine)):
                return False
    return True


def _flat(storage: Storage) -> Tensor:
    assert storage.tensor is not None
    return storage.tensor.flatten()


def _begins(longer: Tensor, shorter: Tensor) -> bool:
    return longer.dtype == shorter.dtype and torch.equal(longer[: len(shorter)], shorter)
