"""Base classes of sampling transforms: options with neutral defaults, their check, and their effect on logits.

A transform is a frozen dataclass of its options. `SamplingParams` inherits from all of them, in the order in which they
are applied, so one object has every option; a transform's methods are therefore called on its class, with that object.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.errors import RequestError
from onward.sampling.history import History, Ids
from onward.sampling.noise import coins, relative_probability, units


class Probabilities(NamedTuple):
    """Probabilities relative to the row's most likely id; none for a row that is no distribution.

    scores float32 [B, V], logits minus the largest; relative float32 [B, V] = e^scores; units int64 [B, V], the same
    in whole units; total float64 [B], their sum; is_valid bool [B, 1].
    """

    scores: Tensor
    relative: Tensor
    units: Tensor
    total: Tensor
    is_valid: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Probabilities":
        best = logits.amax(-1, keepdim=True)
        is_valid = best.isfinite()
        scores = torch.where(is_valid, logits - best, float("-inf"))
        relative = relative_probability(scores)
        counted = units(relative)
        return cls(scores, relative, counted, counted.sum(-1).to(torch.float64), is_valid)

    def without(self, logits: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        """The logits with -inf for ids that are `dropped` [B, V] in `rows` [B]."""
        return logits.masked_fill(dropped & rows.unsqueeze(1) & self.is_valid, float("-inf"))


def last_needed(ordered: Tensor, counted: Tensor, mass: Tensor) -> Tensor:
    """The last value [B, 1] of `ordered` before which the counts sum to less than `mass` [B]; at least the first."""
    before = counted.cumsum(-1) - counted
    needed = (before.to(torch.float64) < mass.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, needed - 1)


# Ids, and one value for all of them or for each.
Changes = tuple[Ids, NDArray[np.float32] | Sequence[float] | float]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Options and their effect. The defaults of its fields are neutral: with them it is off and costs nothing."""

    def check(self) -> None:
        """Check the options beyond their types and bounds, and normalize them. Not called while all are neutral.

        Raises:
            RequestError: an invalid value, or options that contradict each other.
        """

    def is_on(self) -> bool:
        """Whether the options change anything."""
        raise NotImplementedError

    def named_ids(self) -> Mapping[str, Iterable[int]]:
        """Ids by option, to be checked against the vocabulary; a `RequestError` for texts instead of ids."""
        return {}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class Adjustment(Transform):
    """Changes the logits of some ids, before temperature, also for beams and greedy rows.

    needs_history: whether it reads the history.
    """

    needs_history: ClassVar[bool] = True

    def changes(self, history: History) -> Changes:
        """The ids [N] to change after `history`, each at most once, and the values for `adjust`."""
        raise NotImplementedError

    @staticmethod
    def adjust(logits: Tensor, entries: "LogitEntries") -> Tensor:
        """The logits, float32 [B, V], with those of `entries` changed and all others the same, bit for bit.

        By default each value is added to its logit, and -inf bans.
        """
        return entries.write(logits, entries.read(logits) + entries.values)

    def can_ban(self) -> bool:
        """Whether it may leave no id to sample."""
        return False


class Filter(Transform):
    """Changes the distribution of sampled rows, not of greedy rows and beams."""

    @staticmethod
    def filter(scores: Tensor, options: "Columns", draws: "Draws") -> Tensor:
        """The scores, float32 [B, V], with -inf for excluded ids.

        Every filter is a threshold on a row's values (docs/decisions/0005-thresholds-not-sorting.md). NaN and infinite
        maxima stay, for the caller to find.
        """
        raise NotImplementedError


class LogitEntries(NamedTuple):
    """Distinct places in logits [B, V] with a value each: rows, ids int64 [N], values float32 [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, changes: Iterable[tuple[int, Changes]], device: torch.device) -> "LogitEntries":
        """From pairs of a row and its changes."""
        entries = [(row, ids, values) for row, (ids, values) in changes if len(ids)]
        if not entries:
            empty = torch.empty(0, dtype=torch.int64, device=device)
            return cls(empty, empty, empty.to(torch.float32))
        rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in entries])
        values = np.concatenate([np.broadcast_to(np.asarray(v, dtype=np.float32), len(ids)) for _, ids, v in entries])
        all_ids = np.concatenate([ids for _, ids, _ in entries])
        return cls(*(torch.from_numpy(array).to(device) for array in (rows, all_ids, values)))

    def read(self, logits: Tensor) -> Tensor:
        """The logits at the places: float32 [N]."""
        return logits[self.rows, self.ids]

    def write(self, logits: Tensor, values: Tensor) -> Tensor:
        """A copy of the logits with `values` at the places."""
        return logits.index_put((self.rows, self.ids), values) if len(values) else logits


def ban(logits: Tensor, entries: LogitEntries) -> Tensor:
    """The logits with -inf for the entries; their values are ignored."""
    return entries.write(logits, torch.full_like(entries.values, float("-inf")))


# A filter's options, a value per row: `options["top_p"]` is a tensor [B], int64 for whole numbers, else float32.
Columns = Mapping[str, Tensor]


def columns(rows: Sequence[Transform], kind: type[Transform], device: torch.device | None) -> Columns:
    """The options of `kind`; neutral for rows without them."""
    return {name: _column(rows, name, neutral, device) for name, neutral in neutral_of(kind).items()}


def _column(rows: Sequence[Transform], name: str, neutral: Any, device: torch.device | None) -> Tensor:
    values = [getattr(row, name, neutral) for row in rows]
    if isinstance(neutral, int):
        # Numbers beyond 2^62 are equivalent: more than all ids.
        return torch.tensor([min(value, 2**62) for value in values], dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device)


class Draws(NamedTuple):
    """The randomness of filters: keys int64 [B], the 64 bits of the seeds; positions int [B], None if unknown."""

    keys: Tensor
    positions: Tensor | None

    def coins(self) -> Tensor:
        """A number in (0, 1) for each row, a function of its seed and position: [B]."""
        if self.positions is None:
            raise RequestError("XTC is random per position: give positions")
        return coins(self.keys, self.positions)


Kind = TypeVar("Kind", bound=Transform)


@functools.cache
def _neutral_of(kind: Any) -> Mapping[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}


# The options of a transform, with the values that change nothing. (mypy takes a dataclass's own hash for its class's.)
neutral_of: Callable[[Any], Mapping[str, Any]] = _neutral_of


def is_neutral(kind: type[Transform], options: Transform) -> bool:
    """Whether all options of this kind have their defaults."""
    return all(getattr(options, name) == neutral for name, neutral in neutral_of(kind).items())


def transforms_of(options: type, kind: type[Kind]) -> list[type[Kind]]:
    """The adjustments or the filters that a class of options inherits from, in order."""
    return [one for one in options.__mro__ if kind in one.__bases__]


def check_switch(options: Transform, kind: type[Transform], switch: str) -> None:
    """Raise `RequestError` if another of a transform's options is not neutral while `switch` is 0."""
    changed = [name for name, neutral in neutral_of(kind).items() if getattr(options, name) != neutral]
    if changed and not getattr(options, switch):
        message = f"{', '.join(changed)} would change nothing while {switch} is 0: set that too"
        raise RequestError(message, changed[0])
