"""A history's incremental counts agree with a recount after any sequence of changes."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onward.sampling import History

tokens = st.lists(st.integers(0, 5), max_size=12)


def as_counter(pair: tuple[np.ndarray, np.ndarray]) -> Counter:
    ids, counts = pair
    assert len(set(ids.tolist())) == len(ids)
    return Counter(dict(zip(ids.tolist(), counts.tolist(), strict=True)))


def check(history: History, prompt: list[int], output: list[int]) -> None:
    assert history.ids.tolist() == prompt + output
    assert (len(history), history.output_length, history.prompt_length) == (
        len(prompt) + len(output), len(output), len(prompt)
    )  # fmt: skip
    assert as_counter(history.seen) == Counter(prompt + output)
    assert as_counter(history.drawn) == Counter(output)


@given(prompt=tokens, changes=st.lists(st.one_of(tokens, st.floats(0, 1)), max_size=8), draft=tokens)
def test_a_history_equals_a_recount(prompt, changes, draft):
    history, output = History(prompt), []
    for change in changes:
        if isinstance(change, float):
            output = output[: int(change * len(output))]
            history.truncate(len(output))
        else:
            output = output + change
            history.extend(change)
        check(history, prompt, output)
        with history.assuming(draft):
            check(history, prompt, output + draft)
        check(history, prompt, output)


def test_a_history_grows_beyond_its_initial_size():
    history = History(range(1000), range(500, 1500))
    check(history, list(range(1000)), list(range(500, 1500)))
    history.truncate(3)
    check(history, list(range(1000)), [500, 501, 502])
