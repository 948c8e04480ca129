"""What a sampling transform is: options with neutral values, their check, and what is done to logits.

A transform is a frozen dataclass of its options. `SamplingParams` inherits from all of them, in the order in which they
work, so one object holds every option; a transform's methods are therefore called on its class, with that object.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
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
    """Of every id beside the row's likeliest; nothing for a row that is no distribution.

    scores float32 [B, V], logits less the largest; relative float32 [B, V] = e^scores; units int64 [B, V], the same
    in whole units; total float64 [B], their sum; sound bool [B, 1].
    """

    scores: Tensor
    relative: Tensor
    units: Tensor
    total: Tensor
    sound: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "Probabilities":
        best = logits.amax(-1, keepdim=True)
        sound = best.isfinite()
        scores = torch.where(sound, logits - best, float("-inf"))
        relative = relative_probability(scores)
        counted = units(relative)
        return cls(scores, relative, counted, counted.sum(-1).to(torch.float64), sound)

    def without(self, logits: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        """-inf where `dropped` [B, V], in `rows` [B]."""
        return logits.masked_fill(dropped & rows.unsqueeze(1) & self.sound, float("-inf"))


def last_needed(ordered: Tensor, counted: Tensor, mass: Tensor) -> Tensor:
    """The last [B, 1] of `ordered` before which less than `mass` [B] was counted; the first at least."""
    before = counted.cumsum(-1) - counted
    needed = (before.to(torch.float64) < mass.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, needed - 1)


# Ids and what each of them is given: one value for all, or one for each.
Changes = tuple[Ids, NDArray[np.float32] | Sequence[float] | float]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Options and what they do. The defaults of its fields are neutral: with them it is off and costs nothing."""

    def check(self) -> None:
        """Bring the options to their one form and check them.

        numpy's numbers and arrays are Python's already.

        Raises:
            RequestError: a value outside its range.
        """
        raise NotImplementedError

    def is_on(self) -> bool:
        """Whether the options change anything."""
        raise NotImplementedError

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class Adjustment(Transform):
    """Names ids and changes their logits, before temperature. Beams and greedy rows obey it too.

    needs_history: whether it looks at what came before.
    """

    needs_history: ClassVar[bool] = True

    def changes(self, history: History) -> Changes:
        """The ids [N] that it names after `history`, each at most once, and the values that `adjust` is given."""
        raise NotImplementedError

    @staticmethod
    def adjust(logits: Tensor, entries: "LogitEntries") -> Tensor:
        """float32 [B, V] -> the same, with the logits of `entries` changed and all others as they are, bit for bit.

        Each value is added to its logit, and -inf bans, unless a transform says otherwise.
        """
        return entries.write(logits, entries.read(logits) + entries.values)

    def can_ban(self) -> bool:
        """Whether it may leave no id to draw."""
        return False

    def named_ids(self) -> Iterable[int]:
        """Ids in its options, which the vocabulary must have.

        Raises:
            RequestError: texts where there should be ids.
        """
        return ()


class Filter(Transform):
    """Changes the distribution of rows that are sampled; greedy rows and beams leave it alone."""

    @staticmethod
    def filter(scores: Tensor, options: "Columns", draws: "Draws") -> Tensor:
        """float32 [B, V] -> the same; what a row must not draw becomes -inf.

        Every filter is a threshold on a row's values (docs/decisions/0005-thresholds-not-sorting.md). A row whose
        largest logit is NaN or infinite keeps its marks where they were, for the caller to find.
        """
        raise NotImplementedError


class LogitEntries(NamedTuple):
    """Places in logits [B, V], each at most once, with a number for each: rows, ids int64 [N], values float32 [N]."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, changes: Iterable[tuple[int, Changes]], device: torch.device) -> "LogitEntries":
        """Of (row, its changes)."""
        kept = [(row, ids, values) for row, (ids, values) in changes if len(ids)]
        if not kept:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return cls(nothing, nothing, nothing.to(torch.float32))
        rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in kept])
        values = np.concatenate([np.broadcast_to(np.asarray(v, dtype=np.float32), len(ids)) for _, ids, v in kept])
        places = np.concatenate([ids for _, ids, _ in kept])
        return cls(*(torch.from_numpy(array).to(device) for array in (rows, places, values)))

    def read(self, logits: Tensor) -> Tensor:
        """The logits at the places: float32 [N]."""
        return logits[self.rows, self.ids]

    def write(self, logits: Tensor, values: Tensor) -> Tensor:
        """A copy of the logits with `values` at the places."""
        return logits.index_put((self.rows, self.ids), values) if len(values) else logits


def ban(logits: Tensor, entries: LogitEntries) -> Tensor:
    """-inf for each; the values count for nothing."""
    return entries.write(logits, torch.full_like(entries.values, float("-inf")))


# A filter's options, a value for each row: `options["top_p"]` is a tensor [B], int64 for whole numbers, else float32.
Columns = Mapping[str, Tensor]


def columns(rows: Sequence[Transform], kind: type[Transform], device: torch.device | None) -> Columns:
    """The options of `kind`; neutral for rows that do not have them."""
    return {field.name: _column(rows, field.name, field.default, device) for field in dataclasses.fields(kind)}


def _column(rows: Sequence[Transform], name: str, neutral: Any, device: torch.device | None) -> Tensor:
    values = [getattr(row, name, neutral) for row in rows]
    if isinstance(neutral, int):
        # Beyond 2^62 all numbers mean the same: more than there are ids.
        return torch.tensor([min(value, 2**62) for value in values], dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device)


class Draws(NamedTuple):
    """What is drawn with: keys int64 [B], the 64 bits of the seeds; positions int [B], None where nobody said."""

    keys: Tensor
    positions: Tensor | None

    def coins(self) -> Tensor:
        """A number in [0, 1) for each row, the same whenever its seed and position are: [B]."""
        if self.positions is None:
            raise RequestError("XTC tosses its coin at a position: give positions")
        return coins(self.keys, self.positions.reshape(-1))


Kind = TypeVar("Kind", bound=Transform)


def transforms_of(options: type, kind: type[Kind]) -> list[type[Kind]]:
    """The adjustments or the filters that a class of options inherits from, in the order in which they work."""
    return [one for one in options.__mro__ if kind in one.__bases__]


def check_switch(options: Transform, kind: type[Transform], switch: str) -> None:
    """Raise `RequestError` where others of a transform's options are not neutral and `switch` is off."""
    changed = [f.name for f in dataclasses.fields(kind) if getattr(options, f.name) != f.default]
    if changed and not getattr(options, switch):
        raise RequestError(f"{', '.join(changed)} would change nothing while {switch} is 0: give that too")
