"""Beam search alone: which beams continue or end, and which rows are copied."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward.decoding import BatchSchedule, BeamStep, DecodeStep, RowCacheManager, SamplerCache, Sequence, decode_loop
from onward.decoding.beam import BeamCandidate, BeamOptions, BeamSearch
from onward.models import Run
from onward.sampling import SamplingParams
from onward.testing import scripted_model

CPU = torch.device("cpu")


def texts(search: BeamSearch) -> list[list[int]]:
    return [beam.sequence.token_ids for beam in search.running]


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 12))
def test_every_text_continues_its_parent(seed, width, steps):
    rng = random.Random(seed)
    search = BeamSearch(BeamOptions(width), [1], steps + 1)
    for _ in range(steps):
        before = texts(search)
        pairs = [(beam, token) for beam in range(len(before)) for token in range(5)]
        pairs = rng.sample(pairs, min(2 * width, len(pairs)))
        parents = search.advance([BeamCandidate(beam, token, -float(rank)) for rank, (beam, token) in enumerate(pairs)])
        assert parents == [beam for beam, _ in pairs[:width]]
        assert texts(search) == [[*before[beam], token] for beam, token in pairs[:width]]


class CountingSlots(RowCacheManager):
    """Counts the rows that were copied for forks."""

    forks = 0

    def fork(self, slot, positions, length):
        self.forks += 1
        return super().fork(slot, positions, length)


@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 9), st.sampled_from(["own", "given"]))
def test_copies_give_every_beam_its_parents_past(seed, width, new, kind):
    """After every step the row of each text holds all of its ids but the last, and few rows were copied."""

    def logits(tokens):
        return 2 * torch.randn(8, generator=torch.Generator().manual_seed(seed + hash(tuple(tokens)) % 2**32))

    model, prompt = scripted_model(logits, vocab_size=8), [3, 1, 4]
    searches = [BeamSearch(BeamOptions(width), prompt, new, {0}, sampling=SamplingParams(eos=(0,))) for _ in range(2)]
    rows = 2 * width
    slots = CountingSlots.allocate(model, rows, 12) if kind == "own" else None
    slots = CountingSlots.wrap(model, model.new_cache(rows, 12), rows) if slots is None else slots
    step = BeamStep(DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU))
    before = [list(texts(search)) for search in searches]
    for _ in decode_loop(step, BatchSchedule(slots, searches), slots):
        expected = 0
        for search, earlier in zip(searches, before, strict=True):
            for beam in search.running:
                text = beam.sequence
                cached = slots.cache.tokens[text.slot.row, : text.computed]
                assert cached.tolist() == [*prompt, *text.token_ids[:-1]]
            parents = {earlier.index(text[:-1]) for text in texts(search) if text}
            expected += len(search.running) - len(parents) if search.tokens else 0
        assert slots.forks == expected, "a parent's first child stays where it is"
        slots.forks, before = 0, [list(texts(search)) for search in searches]
    assert all(search.is_over and search.holders() == [] for search in searches)


def test_only_the_best_ended_texts_remain_candidates():
    search = BeamSearch(BeamOptions(2, length_penalty=0.0), [1], 9, {0})
    search.advance(
        [BeamCandidate(0, 0, -1.0), BeamCandidate(0, 5, -2.0), BeamCandidate(0, 6, -3.0), BeamCandidate(0, 7, -4.0)]
    )
    assert [(score, sequence.token_ids) for score, sequence in search.ended] == [(-1.0, [0])]
    assert texts(search) == [[5], [6]]
    search.advance(
        [BeamCandidate(0, 8, -2.5), BeamCandidate(1, 8, -3.5), BeamCandidate(0, 0, -3.6), BeamCandidate(1, 0, -3.7)]
    )
    assert len(search.ended) == 1, "the third best may continue, but may not end"


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
def test_a_search_stops_by_its_rule(early_stopping, length_penalty, running, over):
    search = BeamSearch(BeamOptions(2, length_penalty, early_stopping), [1], 4, {0, 1})
    search.advance([BeamCandidate(0, 5, -0.1), BeamCandidate(0, 6, -0.2)])
    search.ended = [(score, Sequence([1], 0)) for score in (-1.0, -2.0)]
    search.advance([BeamCandidate(0, 5, running), BeamCandidate(1, 6, running - 1)])
    assert search.is_over == over
