"""A search of beams by itself: who goes on, who ends, and what is copied."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.decoding import Row
from onward.decoding.beam import BeamOptions, Candidate, Search


def texts(search: Search) -> list[list[int] | None]:
    return [None if beam is None else beam.row.token_ids for beam in search.running]


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 12))
def test_copies_bring_every_beam_its_parents_past(seed, width, steps):
    """Slots hold what was processed so far, as rows of a cache do: copied where the search says, then appended to."""
    rng = random.Random(seed)
    search = Search(Row(steps + 1), BeamOptions(width))
    held: list[list[int]] = [[] for _ in range(width)]
    for _ in range(steps):
        running = [slot for slot, beam in enumerate(search.running) if beam is not None]
        pairs = rng.sample([(slot, token) for slot in running for token in range(5)], min(2 * width, 5 * len(running)))
        moves = search.advance([Candidate(slot, token, -float(rank)) for rank, (slot, token) in enumerate(pairs)])
        read, written = {source for source, _ in moves}, [to for _, to in moves]
        assert not read & set(written), "no order of the copies matters"
        assert len(set(written)) == len(written)
        for source, to in moves:
            held[to] = held[source].copy()
        for slot, beam in enumerate(search.running):
            if beam is not None:
                held[slot].append(beam.row.token_ids[-1])
                assert held[slot] == beam.row.token_ids
        parents = {slot for slot, _ in pairs[:width]}
        assert len(moves) == min(width, len(pairs)) - len(parents), "a parent's first child stays where it is"


def test_of_an_ended_text_only_the_best_count_and_worse_ones_stand_by():
    search = Search(Row(9, {0}), BeamOptions(2, length_penalty=0.0))
    search.advance([Candidate(0, 0, -1.0), Candidate(0, 5, -2.0), Candidate(0, 6, -3.0), Candidate(0, 7, -4.0)])
    assert [(score, row.token_ids) for score, row in search.ended] == [(-1.0, [0])]
    assert texts(search) == [[5], [6]]
    search.advance([Candidate(0, 8, -2.5), Candidate(1, 8, -3.5), Candidate(0, 0, -3.6), Candidate(1, 0, -3.7)])
    assert len(search.ended) == 1, "the third best may go on, and may not end"


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "running", "over"),
    [
        (True, 1.0, -0.1, True),  # as many texts as beams: enough
        (False, 1.0, -3.9, False),  # at 2 tokens -1.95 beats the worse of -1 / 1 and -2 / 1
        (False, 1.0, -4.0, True),
        ("never", 1.0, -4.0, False),  # at 4 tokens -1.0 would
        ("never", 1.0, -8.0, True),
        ("never", -1.0, -1.0, True),  # long texts lose: -1 * 2 at the present length
        ("never", 0.0, -1.9, False),
        ("never", 0.0, -2.0, True),
    ],
)
def test_a_search_is_over_when_its_rule_says_so(early_stopping, length_penalty, running, over):
    search = Search(Row(4, {0, 1}), BeamOptions(2, length_penalty, early_stopping))
    search.advance([Candidate(0, 5, -0.1), Candidate(0, 6, -0.2)])
    search.ended = [(-1.0, Row(0)), (-2.0, Row(0))]
    search.advance([Candidate(0, 5, running), Candidate(1, 6, running - 1)])
    assert search.is_over == over
