"""What a text's tokens took: its own steps, shared by the tokens that one step brought."""

import pytest

from onward.language_model.completion import Stopwatch


def watched(*steps: tuple[float, int]) -> Stopwatch:
    """The watch of a text over steps: (seconds, tokens)."""
    watch = Stopwatch()
    for seconds, tokens in steps:
        watch.step(seconds, tokens)
    return watch


def test_each_text_has_its_own_laps_and_tokens_of_a_step_share_it():
    ahead = (0.5, 0)
    first = watched(ahead, (1.0, 1), (3.0, 3), (2.0, 0)).timing()
    second = watched(ahead, (1.0, 1), (3.0, 1), (2.0, 1)).timing()
    assert first.prefill_ms == second.prefill_ms == pytest.approx(1500)
    assert first.per_token_ms == pytest.approx([1000] * 3)
    assert second.per_token_ms == pytest.approx([3000, 2000])
    assert second.total_ms == pytest.approx(6500)
    assert first.tokens_per_second == pytest.approx(1)
    none = watched().timing()
    assert (none.prefill_ms, none.per_token_ms, none.total_ms, none.tokens_per_second) == (0, [], 0, 0)


def test_a_step_that_brings_a_text_nothing_counts_to_its_next_token():
    waited = watched((1.0, 1), (2.0, 0), (0.5, 0), (1.5, 2))
    assert waited.tokens == 3
    assert waited.timing().per_token_ms == pytest.approx([2000, 2000])
