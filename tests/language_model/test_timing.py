"""The times of a text's tokens: its own steps, shared by the tokens of a step."""

import pytest

from onward.decoding import Sequence
from onward.language_model.completion import Timing
from onward.sampling import Token


def timed(*steps: tuple[float, int]) -> Timing:
    """The timing of a text over steps: (seconds, tokens)."""
    sequence = Sequence([1], 100)
    for seconds, tokens in steps:
        sequence.take_step(1, [Token(2)] * tokens, None)
        sequence.record_step(seconds)
    return Timing.of(sequence.lap_seconds, sequence.waited)


def test_each_text_has_its_own_times_and_tokens_of_a_step_share_one():
    ahead = (0.5, 0)
    first = timed(ahead, (1.0, 1), (3.0, 3), (2.0, 0))
    second = timed(ahead, (1.0, 1), (3.0, 1), (2.0, 1))
    assert first.prefill_ms == second.prefill_ms == pytest.approx(1500)
    assert first.per_token_ms == pytest.approx([1000] * 3)
    assert second.per_token_ms == pytest.approx([3000, 2000])
    assert second.total_ms == pytest.approx(6500)
    assert first.tokens_per_second == pytest.approx(1)
    none = timed()
    assert (none.prefill_ms, none.per_token_ms, none.total_ms, none.tokens_per_second) == (0, [], 0, 0)


def test_a_step_without_tokens_counts_to_the_next_token():
    assert timed((1.0, 1), (2.0, 0), (0.5, 0), (1.5, 2)).per_token_ms == pytest.approx([2000, 2000])
    assert timed((1.0, 0), (2.0, 0)).prefill_ms == pytest.approx(3000), "no token yet"


def test_an_ended_text_takes_no_more_time():
    sequence = Sequence([1], 1)
    for seconds in (1.0, 4.0):
        if sequence.finish_reason is None:
            sequence.take_step(1, [Token(2)], None)
        sequence.record_step(seconds)
    assert Timing.of(sequence.lap_seconds, sequence.waited).total_ms == pytest.approx(1000)
