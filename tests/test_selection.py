"""By default fewer cases and examples run, but every pair of values meets."""

from itertools import combinations, product
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies
from tests.conftest import FULL, PROFILE, _take_fewer_examples
from tests.selection import covering, selected


def pairs(case):
    return set(combinations(sorted(case.items()), 2))


@hypothesis.given(strategies.lists(strategies.integers(1, 5), min_size=2, max_size=4), strategies.booleans())
def test_every_pair_that_occurs_is_covered(sizes, every_second):
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    cases = cases[::2] if every_second else cases
    taken = [cases[index] for index in covering(cases)]
    assert set().union(*map(pairs, taken)) == set().union(*map(pairs, cases))
    assert len(taken) <= len(cases)


def test_pairs_of_many_axes_need_few_cases():
    cases = [dict(zip("abcdef", values, strict=True)) for values in product(range(4), repeat=6)]
    assert len(covering(cases)) < 40 < len(cases) == 4096


def test_a_short_axis_is_spread_over_a_long_one():
    cases = [{"family": family, "chunk": chunk} for family in range(12) for chunk in range(4)]
    taken = [cases[index]["chunk"] for index in covering(cases, strength=1)]
    assert sorted(taken) == sorted([0, 1, 2, 3] * 3)


def test_unhashable_values_are_distinguished():
    one, other = [1], [1]
    cases = [{"a": one, "b": 1}, {"a": other, "b": 1}, {"a": one, "b": 1}]
    assert covering(cases) == [0, 1]


@pytest.mark.skipif(FULL or PROFILE != "repeat", reason="all examples run")
def test_fewer_examples_are_drawn():
    drawn = []

    @hypothesis.settings(max_examples=60, phases=[hypothesis.Phase.generate], database=None)
    @hypothesis.given(strategies.integers())
    def test(number):
        drawn.append(number)

    _take_fewer_examples({test})
    test()
    assert len(drawn) == 15


@pytest.mark.parametrize(("stride", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (0, [])])
def test_a_stride_runs_every_nth_case_and_none_at_0(stride, expected):
    cases = [SimpleNamespace(path="t.py", nodeid=f"t.py::test[{at}]", at=at) for at in range(5)]
    chosen, others = selected(cases, lambda case: 0, lambda case: stride)
    assert [case.at for case in chosen] == expected
    assert [case.at for case in others] == [at for at in range(5) if at not in expected]
