"""Masks: bits to logits, and constraints that follow drafts forward and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import NothingToDrawError, RequestError
from onward.sampling import Sampler, SamplingParams
from onward.sampling.constraint import Constraint, ConstraintState, admits, mask_logits, mask_of


class Rising(Constraint):
    """Each id is larger than the one before; at most `longest` of them, below `vocab`."""

    def __init__(self, vocab=70, longest=9):
        self.vocab, self.longest, self.ids = vocab, longest, []

    def mask(self):
        return mask_of(range(self.ids[-1] + 1 if self.ids else 0, self.vocab))

    def accept(self, token_id):
        assert admits(self.mask(), token_id)
        self.ids.append(token_id)

    def rollback(self, count):
        assert 0 < count <= len(self.ids)
        del self.ids[-count:]

    def fork(self):
        other = Rising(self.vocab, self.longest)
        other.ids = self.ids.copy()
        return other

    @property
    def is_done(self):
        return len(self.ids) == self.longest


@given(st.sets(st.integers(0, 300)), st.integers(1, 200))
def test_a_mask_admits_exactly_its_ids(ids, vocab):
    class Just(Rising):
        def mask(self):
            return mask_of(ids)

    logits = torch.randn(1, 1, vocab)
    masked, left = mask_logits(logits, [ConstraintState(Just())])
    inside = [token for token in range(vocab) if token in ids]
    outside = [token for token in range(vocab) if token not in ids]
    assert torch.equal(masked[..., inside], logits[..., inside])
    assert bool((masked[..., outside] == float("-inf")).all())
    assert bool(left) == bool(inside)
    assert [admits(mask_of(ids), token) for token in range(vocab)] == [token in ids for token in range(vocab)]


def test_negative_ids_in_a_mask_are_refused():
    with pytest.raises(RequestError, match="got -1 for a mask"):
        mask_of([3, -1])


@given(st.lists(st.tuples(st.sampled_from(["append", "truncate", "assume"]), st.integers(0, 80)), max_size=30))
def test_truncated_ids_leave_no_trace(steps):
    """After any appends and truncations it is the text of the ids that are left."""
    text, ids = ConstraintState(Rising(), {5}), []

    def fresh():
        other = ConstraintState(Rising(), {5})
        for token in ids:
            other.append(token)
        return other

    for kind, number in steps:
        if kind == "append":
            text.append(number)
            ids.append(number)
        elif kind == "truncate":
            length = number % (len(ids) + 1)
            text.truncate(length)
            del ids[length:]
        else:
            with text.assuming([number, number + 1, 5, 7]):
                assert len(text) == len(ids) + 4
        same = fresh()
        assert (len(text), text.is_done) == (len(same), same.is_done)
        assert (text.mask() is None) == (same.mask() is None)
        if text.mask() is not None:
            assert np.array_equal(text.mask(), same.mask())


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_drafted_positions_equal_plain_steps(drafts, key):
    """The ids at K places are those that K plain steps choose, as far as the draft is right."""
    vocab, places = 40, 5
    generator = torch.Generator().manual_seed(key)
    logits = torch.randn(len(drafts), places, vocab, generator=generator)
    positions = torch.arange(places, dtype=torch.int32).expand(len(drafts), places)
    sampler = Sampler([SamplingParams(temperature=1.0, seed=row) for row in range(len(drafts))])
    texts = [ConstraintState(Rising(vocab)) if row % 2 == 0 else None for row in range(len(drafts))]
    chosen = sampler(logits, positions, None, drafts, texts).tolist()
    for row, draft in enumerate(drafts):
        text = ConstraintState(Rising(vocab)) if row % 2 == 0 else None
        one = sampler.take([row])
        for place in range(len(draft) + 1):
            (plain,) = one(logits[row : row + 1, place], positions[row : row + 1, place], None, None, [text]).tolist()
            assert chosen[row][place] == plain
            if place == len(draft) or draft[place] != plain:
                break
            if text is not None:
                text.append(plain)
    assert all(text is None or len(text) == 0 for text in texts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_and_a_mask_that_leave_nothing_are_an_error(temperature):
    banned = SamplingParams(temperature=temperature, seed=1, logit_bias={1: float("-inf"), 2: float("-inf")})

    class Two(Rising):
        def mask(self):
            return mask_of([1, 2])

    with pytest.raises(NothingToDrawError, match="the constraint admits no id, or none that other options"):
        Sampler([banned])(torch.zeros(1, 4), torch.zeros(1), None, None, [ConstraintState(Two())])


def test_probabilities_are_normalized_over_admitted_ids():
    rows = [SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.0)]
    texts = [ConstraintState(Rising(4)), ConstraintState(Rising(4))]
    for text in texts:
        text.append(1)
    logits = torch.tensor([[9.0, 9.0, 1.0, 1.0, 9.0]]).expand(2, 5)
    found = Sampler(rows).probabilities(logits, torch.zeros(2), None, texts)
    assert found.tolist() == [[0, 0, 0.5, 0.5, 0], [0, 0, 1, 0, 0]]
