"""Every request gets the same tokens, text and logprobs as alone, regardless of the engine's other requests.

With ONWARD_SCHEDULES=1000, as in `make soak`, each test runs 1000 random schedules of up to 64 requests.
"""

import dataclasses
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import CHUNKS, FAMILY_MODELS, MODELS, REQUESTS, Arrival, Schedule, model, random_schedule, run

SCHEDULES = int(os.environ.get("ONWARD_SCHEDULES", "0"))

arrivals = st.builds(
    Arrival,
    index=st.integers(0, REQUESTS - 1),
    at=st.integers(0, 12),
    priority=st.sampled_from([0, 0, -2, 3]),
    client=st.sampled_from([None, None, "a", "b"]),
    cancel=st.none() | st.integers(0, 6),
    by_event=st.booleans(),
    emitted=st.none() | st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
schedules = st.builds(
    Schedule,
    name=st.sampled_from(list(MODELS)),
    arrivals=st.lists(arrivals, min_size=1, max_size=8),
    chunk=st.sampled_from(CHUNKS),
    max_sequences=st.integers(3, 6),
    blocks=st.none() | st.integers(9, 16),
    overcommit=st.sampled_from([1.0, 1.5, 8.0]),
    max_step_ms=st.sampled_from([None, 0.0, 1.0, 100.0]),
)


@settings(max_examples=SCHEDULES or 24)
@given(schedules)
def test_any_schedule(schedule):
    run(schedule)


# 380: texts of one prompt that find another request's blocks of it.
@pytest.mark.parametrize("seed", range(SCHEDULES) if SCHEDULES else [*range(8), 380])
@pytest.mark.stride(2)
def test_random_schedule_of_many_requests(seed):
    run(random_schedule(seed, most=64 if SCHEDULES or seed == 0 else 24))


@pytest.mark.parametrize("name", FAMILY_MODELS)
@pytest.mark.stride(3)
def test_random_schedules_of_every_family(name):
    for seed in range(max(1, SCHEDULES // len(FAMILY_MODELS))):
        run(random_schedule(seed, most=64 if SCHEDULES else 12, name=name))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return str(tmp_path_factory.mktemp("prefixes"))


@pytest.mark.parametrize("name", [*MODELS, *FAMILY_MODELS])
@pytest.mark.stride(3)
def test_random_schedules_with_a_disk_written_by_earlier_engines(name, disk):
    restored = 0
    for seed in [each for each in range(max(2, SCHEDULES // len(MODELS))) for _ in range(2)]:
        schedule = random_schedule(seed, most=64 if SCHEDULES else 16, name=name)
        restored += run(dataclasses.replace(schedule, disk=disk)).restored_tokens
    assert restored or model(name).new_blocks is None
