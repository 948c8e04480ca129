"""The estimate of step times: learned from every step, forgetting, robust to outliers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Machine

from onward.engine.throughput import StepTimeModel, Throughput

AS_ASSUMED = Machine(step=0.016, decoding_row=0.001, chunk=0.004, token=0.001)


def run(pace, machine, rows, *chunks, slower=1.0):
    pace.record_step(rows, chunks, slower * machine.seconds(rows, chunks))


def predicted(pace, rows, *chunks):
    return pace.decode(rows) + sum(pace.chunk(*chunk) for chunk in chunks)


def test_nothing_is_predicted_before_the_first_measurement():
    assert StepTimeModel().decode(3) == StepTimeModel().chunk(0, 64) == StepTimeModel().decode(0) == 0.0


@given(
    rows=st.integers(0, 40),
    chunks=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 512)), max_size=3),
    other=st.integers(1, 40),
)
def test_one_step_of_any_kind_predicts_the_others(rows, chunks, other):
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, rows, *chunks)
    if rows or chunks:
        assert pace.decode(other) == pytest.approx(AS_ASSUMED.decode(other))
        assert pace.chunk(3000, other) == pytest.approx(AS_ASSUMED.prefill(3000, other))


def test_costs_are_learned_though_chunks_only_run_with_rows():
    pace, machine = StepTimeModel(), Machine(step=0.03, decoding_row=0.002, chunk=0.01, token=0.0015)
    chance = random.Random(3)
    steps = [(8, (0, chance.choice([32, 48, 64, 128]))) for _ in range(400)]
    for rows, chunk in steps:
        run(pace, machine, rows, *([] if pace.is_stale(rows) else [chunk]))
    assert pace.decode(8) == pytest.approx(machine.decode(8))
    for rows, chunk in steps[:20]:
        assert predicted(pace, rows, chunk) == pytest.approx(machine.seconds(rows, [chunk]), rel=0.05)


@given(
    rows=st.integers(1, 32),
    chunks=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([4, 8, 32])), min_size=1, max_size=50),
    dearer=st.floats(0.2, 5.0),
)
def test_chunks_do_not_change_the_measured_cost_of_rows(rows, chunks, dearer):
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, 1)
    run(pace, AS_ASSUMED, rows)
    machine = Machine(step=0.016, decoding_row=0.001, chunk=dearer * 0.004, token=dearer * 0.001)
    for chunk in chunks:
        run(pace, machine, rows, chunk)
        assert pace.decode(rows) == pytest.approx(AS_ASSUMED.decode(rows))
    for _ in range(50):
        run(pace, machine, rows, (0, 8))
    assert predicted(pace, rows, (0, 8)) == pytest.approx(machine.seconds(rows, [(0, 8)]), rel=0.02)


def test_overestimated_rows_are_corrected_and_measured_again():
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, 1)
    run(pace, AS_ASSUMED, 8, slower=2.5)
    run(pace, AS_ASSUMED, 8, (0, 8))
    assert pace.is_stale(8)
    run(pace, AS_ASSUMED, 8)
    assert predicted(pace, 8, (0, 64)) == pytest.approx(AS_ASSUMED.seconds(8, [(0, 64)]), rel=0.5)


def test_the_first_step_of_rows_alone_replaces_their_estimate():
    """Regardless of its origin: steps with chunks, or other rows if a row costs more than assumed."""
    pace, machine = StepTimeModel(), Machine(step=0.006, decoding_row=0.0024, chunk=0.004, token=0.0025)
    for _ in range(20):
        run(pace, machine, 8)
    for _ in range(20):
        run(pace, machine, 3, (0, 12))
    assert pace.decode(3) > 1.2 * machine.decode(3)
    run(pace, machine, 3)
    assert pace.decode(3) == pytest.approx(machine.decode(3))


def test_rows_are_measured_again_if_their_first_step_may_have_compiled():
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, 1)
    before = pace.decode(8)
    run(pace, AS_ASSUMED, 8, slower=2.5)
    assert pace.decode(8) == before
    assert pace.is_stale(8)
    run(pace, AS_ASSUMED, 8, slower=1.5)
    assert pace.decode(8) == pytest.approx(1.5 * AS_ASSUMED.decode(8))
    assert not pace.is_stale(8)


def test_rows_are_due_for_their_own_step_first_and_after_sixteen_others():
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, 1)
    for _ in range(3):
        assert pace.is_stale(8)
        run(pace, AS_ASSUMED, 8)
        for _ in range(16):
            assert not pace.is_stale(8)
            assert pace.is_stale(7)
            run(pace, AS_ASSUMED, 8, (0, 16))


def test_chunks_cost_more_at_later_positions():
    pace, machine = StepTimeModel(), Machine(token_and_position=0.001 / 2000)
    for _ in range(3):
        for position in range(0, 8192, 128):
            run(pace, machine, 0, (position, 128))
    for position in (0, 600, 1500, 3000, 6000):
        # The cost at most doubles from the first to the last position of a range.
        assert 0.5 <= pace.chunk(position, 128) / machine.prefill(position, 128) <= 2
    assert pace.chunk(6000, 128) > 2 * pace.chunk(0, 128)


@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0, 10.0])
def test_old_measurements_are_forgotten(slower):
    pace = StepTimeModel()
    for _ in range(100):
        run(pace, AS_ASSUMED, 4, (0, 64))
    for _ in range(40):
        run(pace, AS_ASSUMED, 4, (0, 64), slower=slower)
    # Upwards a step counts as twice the mean at most, which then grows by a fifth: tenfold takes 13 steps. An error
    # that remains loses a fifth a step, and 0.8^27 is 0.0024.
    assert predicted(pace, 4, (0, 64)) == pytest.approx(slower * AS_ASSUMED.seconds(4, [(0, 64)]), rel=0.03)


def test_compilation_is_not_counted_as_a_cost():
    pace = StepTimeModel()
    run(pace, AS_ASSUMED, 0, (0, 64), slower=500)
    run(pace, AS_ASSUMED, 0, (0, 64))
    assert predicted(pace, 0, (0, 64)) == pytest.approx(AS_ASSUMED.seconds(0, [(0, 64)])), (
        "the second replaces the first"
    )
    for rows in range(1, 20):
        run(pace, AS_ASSUMED, rows, slower=100)
        assert pace.decode(rows) == pytest.approx(AS_ASSUMED.decode(rows)), "far above the prediction"


def test_an_outlier_moves_the_estimate_by_a_fifth_at_most():
    pace = StepTimeModel()
    for _ in range(10):
        run(pace, AS_ASSUMED, 4)
    run(pace, AS_ASSUMED, 4, slower=1e6)
    assert AS_ASSUMED.decode(4) < pace.decode(4) <= 1.2 * AS_ASSUMED.decode(4) * (1 + 1e-9)


def test_a_stopped_clock_changes_nothing():
    pace = StepTimeModel()
    pace.record_step(4, [(0, 64)], 0.0)
    assert pace.decode(4) == 0.0
    run(pace, AS_ASSUMED, 4)
    pace.record_step(4, [], 0.0)
    assert pace.decode(4) == pytest.approx(AS_ASSUMED.decode(4))


def test_throughput_covers_about_the_last_half_minute():
    throughput = Throughput()
    assert (throughput.prompt, throughput.output, throughput.admitted) == (0, 0, 0)
    for _ in range(1000):
        throughput.record_step(0.1, prompt=50, output=8, admitted=1)
    assert throughput.prompt == pytest.approx(500)
    assert throughput.output == pytest.approx(80)
    assert throughput.admitted == pytest.approx(10)
    for _ in range(3000):  # five minutes, of which 30 seconds weigh 1/e: e^-10 of what was before remains
        throughput.record_step(0.1, prompt=0, output=4, admitted=0)
    assert throughput.output == pytest.approx(40, rel=1e-3)
    assert throughput.prompt == pytest.approx(0, abs=0.1)
