"""The values at taps (`onward.tap`) that a sequence reports, collected position by position."""

import sys
from collections.abc import Mapping
from copy import copy
from typing import Literal, Self

import torch
from torch import Tensor

# Of which positions: the last id of the prompt; those whose logits choose the new ids; all.
TapPositions = Literal["last", "new", "all"]
_EVERY = sys.maxsize


class TapCapture:
    """Collects the values of a sequence's positions at some taps. Recomputed positions are not collected again.

    taps: the positions of each tap. start: of the first id. last: of the prompt's last id.
    """

    def __init__(self, taps: Mapping[str, TapPositions], start: int, last: int) -> None:
        self.taps = taps
        self._last = last
        self._next = {name: start if which == "all" else last for name, which in taps.items()}
        self._stop = {name: last + 1 if which == "last" else _EVERY for name, which in taps.items()}
        self._prompt: dict[str, list[Tensor]] = {name: [] for name in taps}  # [N, ...] each, before `last`
        self._new: dict[str, list[Tensor]] = {name: [] for name in taps}  # of single positions, from `last` on
        self._staged: tuple[int, Mapping[str, Tensor]] | None = None

    def names(self, first: int, count: int) -> list[str]:
        """The taps whose values are missing at some of the positions first … first + count - 1."""
        return [name for name, at in self._next.items() if at < min(first + count, self._stop[name])]

    def end(self, length: int) -> int:
        """The position after the last one to report, of a sequence of this length, whose last new id is never
        processed."""
        end = max(self._last + 1, length - 1)
        return max(min(end, stop) for stop in self._stop.values())

    def missing_from(self, length: int) -> int | None:
        """The first position with a missing value, in a sequence of this length; None if there is none."""
        end = self.end(length)
        return min((at for name, at in self._next.items() if at < min(end, self._stop[name])), default=None)

    def stage(self, first: int, values: Mapping[str, Tensor]) -> None:
        """Take the values [N, ...] of the positions from `first` on, some of which may be those of rejected drafts."""
        self._staged = first, values

    def commit(self, computed: int) -> None:
        """Collect the staged values of the positions before `computed`."""
        if self._staged is None:
            return
        (first, values), self._staged = self._staged, None
        for name, rows in values.items():
            begin, end = self._next[name], min(self._stop[name], first + len(rows), computed)
            if begin >= end:
                continue
            assert begin >= first, "positions with missing values are computed"
            new = rows[begin - first : end - first].to("cpu", copy=True)
            split = min(max(self._last - begin, 0), len(new))
            if split:
                self._prompt[name].append(new[:split])
            self._new[name] += new[split:].unbind(0)
            self._next[name] = end

    @property
    def reported(self) -> int:
        """The number of new ids with complete values."""
        return min((len(self._new[name]) for name, which in self.taps.items() if which != "last"), default=_EVERY)

    def of_token(self, index: int) -> dict[str, Tensor]:
        """The values [...] at the position whose logits chose the new id `index`, except for taps with "last"."""
        return {name: self._new[name][index] for name, which in self.taps.items() if which != "last"}

    def results(self, prompt: "TapCapture") -> dict[str, Tensor]:
        """The values by tap: [...] for "last", otherwise [N, ...]. Of a tap whose positions an early end has left
        without any value, none. prompt: the capture that has the values of the prompt."""
        found: dict[str, Tensor] = {}
        for name in self.taps:
            rows = self._new[name]
            if prompt.taps[name] == "last":
                found |= {name: rows[0]} if rows else {}
            elif parts := [*prompt._prompt[name], *([torch.stack(rows)] if rows else ())]:
                found[name] = torch.cat(parts)
        return found

    def after_prompt(self, start: int) -> "TapCapture":
        """A capture for a sequence that shares the prompt."""
        taps: dict[str, TapPositions] = {name: "last" if at == "last" else "new" for name, at in self.taps.items()}
        return TapCapture(taps, start, self._last)

    def fork(self) -> Self:
        """An independent copy."""
        other = copy(self)
        other._next = self._next.copy()
        other._prompt = {name: rows.copy() for name, rows in self._prompt.items()}
        other._new = {name: rows.copy() for name, rows in self._new.items()}
        other._staged = None
        return other
