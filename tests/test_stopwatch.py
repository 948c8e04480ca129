"""What a row's tokens took: its own steps, shared by the tokens that one step brought."""

import pytest

from onward.completion import Stopwatch


def test_each_row_has_its_own_laps_and_tokens_of_a_step_share_it():
    watch = Stopwatch(3, ahead=0.5)
    watch.lap(1.0, [0, 1])
    watch.lap(3.0, [0, 0, 0, 1])
    watch.lap(2.0, [1])
    first, second, third = (watch.timing(row) for row in range(3))
    assert first.prefill_ms == second.prefill_ms == pytest.approx(1500)
    assert first.per_token_ms == pytest.approx([1000] * 3)
    assert second.per_token_ms == pytest.approx([3000, 2000])
    assert second.total_ms == pytest.approx(6500)
    assert first.tokens_per_second == pytest.approx(1)
    assert (third.prefill_ms, third.per_token_ms, third.total_ms, third.tokens_per_second) == (0, [], 0, 0)
