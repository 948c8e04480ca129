"""One part of the benchmark at one precision: a figure for each contender and column, turn by turn."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.compare.contenders import OURS
from benchmarks.compare.report import Check, rounded


@dataclass(frozen=True)
class Column:
    """One figure. Its name has up to two words of heading, one above the other, parted by a line break.

    wanted: the smallest required lead over the best peer; None without a target.
    """

    heading: str
    wanted: float | None = None
    more_is_better: bool = True
    digits: int = 1

    @property
    def name(self) -> str:
        return self.heading.replace("\n", " ").strip()


@dataclass
class Sheet:
    """The figures of a part at a precision.

    turns: of each contender and column, one value a turn.
    limits: what the bandwidth allows, by column, one value a turn.
    bandwidth: bytes a second, one reading a turn.
    first_tokens: what each answered first to the same requests.
    ours: Onward's contenders, the first is compared with the peers.
    """

    part: str
    title: str
    precision: str
    columns: Sequence[Column]
    ours: Sequence[str]
    turns: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    limits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bandwidth: list[float] = field(default_factory=list)
    first_tokens: dict[str, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    failed: Mapping[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def values(self, name: str, column: str) -> list[float]:
        """One value per turn; none if it was not measured."""
        return self.turns.get(name, {}).get(column, [])

    def value(self, name: str, column: str) -> float | None:
        """The median over the turns; None if it was not measured."""
        values = self.values(name, column)
        return statistics.median(values) if values else None

    def limit(self, column: str) -> float | None:
        return statistics.median(self.limits[column]) if column in self.limits else None

    @property
    def champion(self) -> str:
        """Onward's contender that is compared with the peers: its engine, or a substitute."""
        return next((name for name in self.ours if name in self.turns), self.ours[0])

    def best_peer(self, column: Column) -> tuple[str, float] | None:
        """The peer with the smallest lead of Onward, and the lead; None if either is missing."""
        mine = self.values(self.champion, column.name)
        leads = {}
        for name in self.turns:
            theirs = [] if name.startswith(OURS) else self.values(name, column.name)
            lead = ratio(mine, theirs) if column.more_is_better else ratio(theirs, mine)
            if lead is not None:
                leads[name] = lead
        return min(leads.items(), key=lambda item: item[1], default=None)

    def check(self, what: str, measured: float | None, wanted: float, at_least: bool = True, unit: str = "x") -> None:
        """Add a target of this part, if its value was measured."""
        if measured is not None:
            self.checks.append(Check(f"{self.precision} {self.part}, {what}", measured, wanted, at_least, unit))

    def all_checks(self) -> list[Check]:
        """Every target that was measured: leads over the peers, and what the part has noted."""
        leads = [
            Check(f"{self.precision} {self.part}, {column.name}", best[1], column.wanted)
            for column in self.columns
            if column.wanted is not None and (best := self.best_peer(column))
        ]
        return leads + self.checks

    def _agreement(self, name: str) -> str:
        """How many first tokens a contender shares with Onward: in bf16 all, or they do not run the same model."""
        pairs = list(zip(self.first_tokens[self.champion], self.first_tokens[name], strict=False))
        return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"

    def as_json(self) -> dict[str, Any]:
        figures = {
            name: {column: {"median": statistics.median(values), "turns": values} for column, values in columns.items()}
            for name, columns in self.turns.items()
        }
        best = {column.name: self.best_peer(column) for column in self.columns}
        return {
            "part": self.part,
            "precision": self.precision,
            "figures": rounded(figures),
            "limits": rounded({column: statistics.median(values) for column, values in self.limits.items()}),
            "read_bandwidth_gb_s": rounded([reading / 1e9 for reading in self.bandwidth]),
            "held_against_peers": self.champion,
            "best_peer": rounded({column: list(peer) for column, peer in best.items() if peer}),
            "same_first_tokens": {name: self._agreement(name) for name in self.turns},
            "checks": [rounded(check.as_json()) for check in self.all_checks()],
            "failed": dict(self.failed),
        }


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Median over the turns of the ratio within a turn; None without turns."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=False)]
    return statistics.median(ratios) if ratios else None
