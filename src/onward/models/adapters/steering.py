"""Steering: a vector is added to, or replaces, the values at a tap, for the rows of a batch that ask for it."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import OptionError
from onward.models.model import Model
from onward.ops.tap import updating
from onward.util.text import described


@dataclass(frozen=True, eq=False)
class Steer:
    """A vector for one tap.

    vector: [D], finite. scale: its factor. replace: put it in place of the values, instead of adding it to them.
    """

    vector: Tensor
    scale: float = 1.0
    replace: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Steering:
    """What changes a request's values at taps. Two are equal if their contents are.

    steers: by tap; their vectors are float32, on the CPU, and scaled.
    """

    steers: Mapping[str, Steer]

    @cached_property
    def digest(self) -> str:
        """Of the contents."""
        content = hashlib.blake2b(digest_size=16)
        for name, steer in sorted(self.steers.items()):
            content.update(repr((name, steer.replace, steer.vector.shape)).encode())
            content.update(steer.vector.numpy().tobytes())
        return f"steer {content.hexdigest()}"

    def __repr__(self) -> str:
        return described(self, *self.steers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steering) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def check(self, model: Model) -> None:
        """Raise `OptionError` unless the model has these taps, with floats of these widths."""
        for name, steer in self.steers.items():
            if name not in model.taps:
                known = ", ".join(model.taps) or "none (see onward.tap)"
                raise OptionError("steer", f"names {name!r}, which the model's forward does not have; it has {known}")
            shape, dtype = model.taps[name]
            if not dtype.is_floating_point:
                raise OptionError("steer", f"cannot change {name!r}, whose values are {dtype}")
            if tuple(steer.vector.shape) != shape:
                got = list(steer.vector.shape)
                raise OptionError("steer", f"needs a vector of {list(shape)} for {name!r}; got {got}")


class SteerTable(NamedTuple):
    """The vectors of all slots at one tap. vectors: [S, D]. adds, replaces: bool [S, 1]; both False leave a row as it
    is."""

    vectors: Tensor
    adds: Tensor
    replaces: Tensor

    @classmethod
    def empty(cls, slots: int, model: Model, name: str) -> "SteerTable":
        (width,), dtype = model.taps[name]
        flags = torch.zeros(2, slots, 1, dtype=torch.bool, device=model.device)
        return cls(torch.zeros(slots, width, dtype=dtype, device=model.device), flags[0].clone(), flags[1].clone())

    def put(self, index: int, steer: Steer | None) -> None:
        """Write a slot; None leaves its rows as they are."""
        self.adds[index] = steer is not None and not steer.replace
        self.replaces[index] = steer is not None and steer.replace
        if steer is not None:
            self.vectors[index] = steer.vector

    def copy(self, source: "SteerTable", indices: Collection[int]) -> None:
        """Copy slots of a smaller table."""
        for mine, theirs in zip(self, source, strict=True):
            for index in indices:
                mine[index] = theirs[index]

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [R, T, D] -> the same with the vectors of its rows. slots: int32 [B], B of R or more."""
        slots = slots[: x.shape[0]].long()
        vectors = self.vectors[slots].unsqueeze(1)
        adds, replaces = (flags[slots].unsqueeze(1) for flags in (self.adds, self.replaces))
        # Not x + 0 for the other rows, which would turn -0.0 into 0.0.
        return torch.where(replaces, vectors, torch.where(adds, x + vectors, x))


@contextmanager
def steering(tables: Mapping[str, SteerTable], slots: Tensor) -> Iterator[None]:
    """Steer the forwards within the block. slots: int32 [B], of each row."""

    def update(name: str, x: Tensor) -> Tensor:
        return tables[name](x, slots) if name in tables else x

    with updating(update):
        yield
