"""Retries cannot multiply a load, and requests that kill replicas are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.cluster.ingress import Quarantine, RetryBudget, RetryOptions
from onward.errors import RequestError


@given(st.lists(st.booleans(), max_size=400), st.integers(0, 20), st.floats(0, 1))
def test_retries_stay_within_their_budget(events: list[bool], burst: int, share: float) -> None:
    """events: True is a request that arrives, False a retry that is requested."""
    budget = RetryBudget(RetryOptions(retry_burst=burst, retry_share=share))
    came = taken = 0
    for is_request in events:
        if is_request:
            budget.deposit()
            came += 1
        else:
            taken += budget.withdraw()
        assert taken <= burst + share * came + 1e-9
        assert 0 <= budget.left <= burst


def test_a_request_is_quarantined_after_killing_two_replicas() -> None:
    quarantine = Quarantine(RetryOptions(quarantine=60.0))
    quarantine.note_death(b"poison", "a", 0.0)
    quarantine.note_death(b"poison", "a", 1.0)
    assert not quarantine.contains(b"poison", 1.0), "one replica died, however often it is reported"
    quarantine.note_death(b"poison", "b", 2.0)
    quarantine.note_death(b"other", "b", 2.0)
    assert quarantine.contains(b"poison", 2.0)
    assert not quarantine.contains(b"other", 2.0)
    assert quarantine.contains(b"poison", 61.9)
    assert not quarantine.contains(b"poison", 62.0)
    assert not quarantine.contains(b"poison", 62.0)
    assert not quarantine.contains(b"unknown", 0.0)


def test_successfully_served_requests_are_not_quarantined() -> None:
    quarantine = Quarantine(RetryOptions())
    for replica in ("a", "b", "c"):
        quarantine.note_death(b"liked", replica, 0.0)
        assert not quarantine.contains(b"liked", 0.0)
        quarantine.forget(b"liked")


def test_a_quarantine_of_zero_seconds_refuses_nothing() -> None:
    quarantine = Quarantine(RetryOptions(quarantine=0.0))
    for replica in ("a", "b", "c"):
        quarantine.note_death(b"poison", replica, 5.0)
        assert not quarantine.contains(b"poison", 5.0)


def test_a_quarantine_remembers_a_limited_number() -> None:
    quarantine = Quarantine(RetryOptions())
    for at in range(20_000):
        quarantine.note_death(at.to_bytes(4), "a", 0.0)
    assert len(quarantine._deaths) == 10_000


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attempts", 0),
        ("attempts", 1.5),
        ("silence", 0),
        ("silence", float("inf")),
        ("retry_share", -0.1),
        ("quarantine", "1"),
    ],
)
def test_values_out_of_range(option: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{option} must be"):
        RetryOptions(**{option: value})  # type: ignore[arg-type]
