"""Combined numbers of several replicas: counts never fall, whichever replicas answer, die or are replaced."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cluster import state
from onward.cluster.state import Kind, Totals

KEYS = ("count", "sum", "mean")


def kind_of(key: str) -> Kind:
    return Kind[key.upper()]


# Events of one of five replicas before the next reading.
EVENT = st.tuples(st.integers(0, 4), st.sampled_from(["work", "die", "slow", "back"]), st.integers(1, 100))


@given(st.lists(EVENT, max_size=60), st.integers(0, 2))
def test_counts_never_decrease_and_no_seen_count_is_lost(events: list[tuple[int, str, int]], kept_gone: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_MAX_GONE", kept_gone)
        names = [f"replica {at}" for at in range(5)]
        counts: Counter[str] = Counter()
        seen: Counter[str] = Counter()  # the last count of each that a reading saw
        slow: set[str] = set()
        together: Totals[str] = Totals(kind_of)
        before = 0.0
        for turn, (at, event, amount) in enumerate(events):
            name = names[at]
            if event == "work":
                counts[name] += amount
            elif event == "die":  # another replica takes its place
                names[at] = f"replica {5 + turn}"
            elif event == "slow":
                slow.add(name)
            else:
                slow.discard(name)
            readings = {name: {"count": counts[name], "sum": 1, "mean": at} for at, name in enumerate(names)}
            readings = {name: numbers for name, numbers in readings.items() if name not in slow}
            seen |= Counter({name: counts[name] for name in readings})
            merged = together.merged(readings, names)
            assert merged.get("count", 0) == seen.total() >= before
            before = merged.get("count", 0)
            assert merged.get("sum", 0) == len(readings)
            if readings:
                assert merged["mean"] == pytest.approx(sum(r["mean"] for r in readings.values()) / len(readings))


def test_integers_stay_integers() -> None:
    together: Totals[Any] = Totals(kind_of)
    merged = together.merged({"a": {"count": 1, "sum": 2}, "b": {"count": 3, "sum": 4}})
    assert {key: (type(number), number) for key, number in merged.items()} == {"count": (int, 4), "sum": (int, 6)}
