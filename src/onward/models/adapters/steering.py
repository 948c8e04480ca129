"""Steering: vectors are added to, or replace, the values at taps, for the rows of a batch that ask for it.

Shapes: S slots, L positions of the context, M vectors of a slot, B rows, T tokens, D values of a position.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onward.cache.plan import lazy_zeros
from onward.errors import OptionError
from onward.models.model import Model
from onward.ops.tap import check_tap_shape, updating
from onward.util.text import described

# The most positions of a steered text. A table of them takes memory as it is written.
MAX_POSITIONS = 1 << 20
# Which positions are steered: all; the prompt's; those whose logits choose the new ids; or these.
SteerAt = Literal["all", "prompt", "new"] | slice | Sequence[int]


@dataclass(frozen=True, eq=False)
class Steer:
    """A change of the values at one tap.

    vector: [D], for each position; or [N, D], one for each of the N positions of `at`. Finite.
    scale: its factor. replace: put it in place of the values, instead of adding it to them.
    at: the positions: "all"; "prompt", the prompt's; "new", those whose logits choose the new tokens, from the prompt's
        last id on, as for `taps`; a slice, such as slice(5, 9) or slice(5, None); or a list. The first id is at 0.
    """

    vector: Tensor
    scale: float = 1.0
    replace: bool = False
    at: SteerAt = "all"

    @property
    def count(self) -> int:
        """The number of vectors."""
        return 1 if self.vector.dim() == 1 else len(self.vector)

    def placed(self, name: str, prompt: int, longest: int, option: str) -> "Steer":
        """The same with a range or a list as `at`; arguments as for `Steering.placed`."""
        if isinstance(self.at, str):
            positions: Sequence[int] = {
                "all": range(sys.maxsize),
                "prompt": range(prompt),
                "new": range(prompt - 1, sys.maxsize),
            }[self.at]
        elif isinstance(self.at, slice):
            positions = range(*self.at.indices(sys.maxsize))
        else:
            positions = self.at
        has_each = self.vector.dim() > 1
        if has_each and self.count != len(positions):
            what = "an open end" if len(positions) > longest else f"{len(positions)} positions"
            raise OptionError(option, f"has {self.count} vectors for {name!r}, but at={self.at!r} has {what}")
        is_listed = has_each or not isinstance(positions, range)
        if is_listed and len(positions) and (last := max(positions)) >= longest:
            raise OptionError(option, f"changes {name!r} at position {last}, but there are only {longest} positions")
        return replace(self, at=positions)


@dataclass(frozen=True, eq=False, repr=False)
class Steering:
    """What changes a request's values at taps. Two are equal if their contents are.

    steers: by tap; their vectors are float32, on the CPU, and scaled. option: of the request, for errors.
    """

    steers: Mapping[str, Steer]
    option: str = "steer"

    @cached_property
    def digest(self) -> str:
        """Of the contents."""
        content = hashlib.blake2b(digest_size=16)
        for name, steer in sorted(self.steers.items()):
            content.update(repr((name, steer.replace, steer.at, steer.vector.shape)).encode())
            content.update(steer.vector.numpy().tobytes())
        return f"steer {content.hexdigest()}"

    def __repr__(self) -> str:
        return described(self, *self.steers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steering) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def placed(self, prompt: int, longest: int) -> "Steering":
        """The same with the positions of each steer as numbers. prompt: the number of ids of the prompt. longest: the
        number of positions that may be changed. Raises `OptionError` for positions that it cannot have."""
        if longest > MAX_POSITIONS:
            raise OptionError(self.option, f"works up to {MAX_POSITIONS:,} positions; got {longest:,}: ask for fewer")
        steers = {name: steer.placed(name, prompt, longest, self.option) for name, steer in self.steers.items()}
        return replace(self, steers=steers)

    def check(self, model: Model) -> None:
        """Raise `OptionError` unless the model has these taps, with vectors of floats of these widths."""
        for name, steer in self.steers.items():
            if name not in model.taps:
                known = ", ".join(model.taps) or "none (see onward.tap)"
                raise OptionError(
                    self.option, f"names {name!r}, which the model's forward does not have; it has {known}"
                )
            shape, dtype = model.taps[name]
            if not dtype.is_floating_point:
                raise OptionError(self.option, f"cannot change {name!r}, whose values are {dtype}")
            if len(shape) != 1:
                problem = f"cannot change {name!r}, whose values at a position have the shape {list(shape)}"
                raise OptionError(self.option, f"{problem}: only vectors can be changed")
            if tuple(steer.vector.shape[-1:]) != shape:
                problem = f"needs vectors of width {list(shape)} for {name!r}; got {list(steer.vector.shape)}"
                raise OptionError(self.option, problem)


class SteerTable(NamedTuple):
    """The vectors of all slots at one tap.

    rows: int32 [S, L], the index of each position's vector among those of its slot, from 1 on; 0 leaves the position as
    it is. vectors: [S, M + 1, D]. adds, replaces: bool [S, M + 1, 1].
    """

    rows: Tensor
    vectors: Tensor
    adds: Tensor
    replaces: Tensor

    @classmethod
    def empty(cls, slots: int, count: int, model: Model, name: str) -> "SteerTable":
        """count: M."""
        (width,), dtype = model.taps[name]
        length = MAX_POSITIONS if model.max_seq_len is None else min(model.max_seq_len, MAX_POSITIONS)
        shapes = [((slots, length), torch.int32), ((slots, count + 1, width), dtype)]
        shapes += [((slots, count + 1, 1), torch.bool)] * 2
        return cls(*(lazy_zeros(shape, each, model.device, huge_pages=False) for shape, each in shapes))

    def put(self, index: int, steer: Steer | None) -> None:
        """Write a slot; None leaves its rows as they are."""
        self.rows[index] = 0
        if steer is None:
            return
        count, at = steer.count, steer.at
        self.vectors[index, 1 : count + 1] = steer.vector
        self.adds[index, 1 : count + 1] = not steer.replace
        self.replaces[index, 1 : count + 1] = steer.replace
        numbers = torch.arange(1, count + 1, dtype=torch.int32)
        if isinstance(at, range):
            self.rows[index, at.start : at.stop : at.step] = numbers
        else:
            assert not isinstance(at, str | slice), "it is placed"
            self.rows[index, list(at)] = numbers

    def copy(self, source: "SteerTable", indices: Collection[int]) -> None:
        """Copy slots of a smaller table."""
        for mine, theirs in zip(self, source, strict=True):
            for index in indices:
                mine[index, : theirs.shape[1]] = theirs[index]


class RowSteers(NamedTuple):
    """The changes of B rows of T positions at one tap. vectors: [B, T, D]. adds, replaces: bool [B, T, 1]."""

    vectors: Tensor
    adds: Tensor
    replaces: Tensor

    @classmethod
    def empty(cls, rows: tuple[int, ...], like: Tensor) -> "RowSteers":
        """Uninitialized, for [B, T] rows of values as `like` [..., D]."""
        flags = (torch.empty(*rows, 1, dtype=torch.bool) for _ in range(2))
        return cls(like.new_empty(*rows, like.shape[-1]), *flags)

    def part(self, rows: slice, tokens: slice) -> "RowSteers":
        return RowSteers(*(each[rows, tokens] for each in self))

    @property
    def changes(self) -> bool:
        """Whether any position is changed."""
        return bool(self.adds.any() or self.replaces.any())

    def applied(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> the same with the changes."""
        # Not x + 0 for the other rows, which would turn -0.0 into 0.0.
        return torch.where(self.replaces, self.vectors, torch.where(self.adds, x + self.vectors, x))


@dataclass(frozen=True, eq=False)
class TableUpdate:
    """The update of a tap that a table makes. slots: int32 [B]. positions: int32 [B, T]."""

    table: SteerTable
    slots: Tensor
    positions: Tensor

    @property
    def rows(self) -> RowSteers:
        slots = self.slots.unsqueeze(1)
        vectors = self.table.rows[slots, self.positions]
        return RowSteers(*(each[slots, vectors] for each in self.table[1:]))

    def __call__(self, x: Tensor) -> Tensor:
        check_tap_shape(x, self.positions.shape)
        return self.rows.applied(x)


@contextmanager
def steering(tables: Mapping[str, SteerTable], slots: Tensor, tokens: Tensor, offsets: Tensor) -> Iterator[None]:
    """Steer the forwards of these tokens and offsets within the block. slots: int32 [B], of each row."""
    if not tables:
        yield
        return
    positions = offsets.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    positions = positions.clamp(max=MAX_POSITIONS - 1)  # texts without a steer may be longer
    with updating({name: TableUpdate(table, slots, positions) for name, table in tables.items()}):
        yield
