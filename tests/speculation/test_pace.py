"""The length of drafts, with a simulated clock: gains are taken, losses are bounded."""

import random

import pytest
from drafted import Guess, decode, oracle, sequences_of, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.decoding.speculation import Speculator
from onward.decoding.speculation.pace import AcceptanceRate, DraftLengthController, RowAcceptance, expected_tokens
from onward.decoding.speculation.step import speculation_of
from onward.models import Model
from onward.sampling import SamplingParams
from onward.testing import scripted_model

PLAIN = 0.010


class Machine:
    """A clock, and a model and drafters that take their time by it.

    cost: seconds of a pass over T tokens. noise: the largest part by which one may take longer.
    """

    def __init__(self, cost, draft_cost=lambda count: 0.0, noise=0.0, seed=1):
        self.now = 0.0
        self._cost, self._draft_cost, self._noise = cost, draft_cost, noise
        self._random = random.Random(seed)

    def clock(self):
        return self.now

    def _take(self, seconds):
        self.now += seconds * (1 + self._noise * self._random.random())

    def model(self):
        inner = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)

        def forward(tokens, offsets, cache, params):
            self._take(self._cost(tokens.shape[1]))
            return inner.forward(tokens, offsets, cache, params)

        return Model(forward, (), inner.new_cache, 32)

    def drafter(self, guess):
        def timed(row):
            self._take(self._draft_cost(row.limit))
            return guess(row)

        return Guess(timed)

    def seconds(self, new, speculator=None, rows=1):
        """The time for `new` tokens, and the draft counts of the first row."""
        began = self.now
        sequences = sequences_of([[1, 2]] * rows, [new] * rows, [SamplingParams()] * rows)
        decode(self.model(), sequences, room=new + 4, speculator=speculator)
        for sequence in sequences:
            assert sequence.token_ids == [(3 + at) % 32 for at in range(new)], "whatever was drafted"
        return self.now - began, speculation_of(sequences[0])


def test_times_change_only_the_length_of_drafts():
    """Passes that take anything up to four times as long as they should: `seconds` looks at the ids."""
    drafted = set()
    for seed in range(8):
        machine = Machine(cheap, noise=3.0, seed=seed)
        speculator = Speculator(machine.drafter(counting(lambda at: at % 5)), clock=machine.clock)
        drafted.add(machine.seconds(200, speculator, rows=2)[1].drafted)
    assert len(drafted) > 3, "the clock should have mattered to how much was drafted"


def counting(right):
    """A drafter that knows what comes where `right` (its length of the text) says so, and is wrong elsewhere."""

    def guess(row):
        last = row.ids()[-1]
        return [(last + 1 + k + (0 if right(len(row) + k) else 7)) % 32 for k in range(row.limit)]

    return guess


def cheap(tokens):
    return PLAIN * (1 + 0.03 * (tokens - 1))


def dear(tokens):
    """A processor that is bound by arithmetic: nothing is gained by several tokens at once."""
    return PLAIN * tokens


@pytest.mark.parametrize("rows", [1, 3])
def test_correct_drafts_grow_to_the_maximum(rows):
    machine = Machine(cheap)
    plain, _ = machine.seconds(400, rows=rows)
    speculator = Speculator(machine.drafter(counting(lambda at: True)), clock=machine.clock)
    first, _ = machine.seconds(400, speculator, rows)
    again, speculation = machine.seconds(400, speculator, rows)
    assert first < plain / 4
    assert again < plain / 8, "the next request uses the learned pace"
    assert speculation.tokens_per_round > 12


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("draft_cost", [0.0, 0.2])
@pytest.mark.parametrize("cost", [cheap, dear])
def test_wrong_drafts_cost_three_percent_at_most(cost, draft_cost, noise):
    machine = Machine(cost, lambda count: draft_cost * PLAIN * count, noise)
    for new in (60, 400, 60, 1500):
        plain, _ = machine.seconds(new)
        speculator = Speculator(machine.drafter(counting(lambda at: False)), clock=machine.clock)
        seconds, _ = machine.seconds(new, speculator)
        assert seconds < 1.03 * plain * (1 + noise / 10)  # two sums of a hundred and more noisy times


def test_correct_but_slow_drafts_cost_three_percent_at_most():
    """A draft model as slow as its target, always right."""
    machine = Machine(dear, lambda count: PLAIN * count)
    plain, _ = machine.seconds(600)
    seconds, speculation = machine.seconds(
        600, Speculator(machine.drafter(counting(lambda at: True)), clock=machine.clock)
    )
    assert seconds < 1.03 * plain
    assert 0 < speculation.rounds < 30


class Warming(Machine):
    """A small model's: to look at the clock takes 3 % of a pass, and the first passes take twice as long."""

    passes = 0

    def clock(self):
        self.now += 0.03 * PLAIN
        return self.now

    def _take(self, seconds):
        self.passes += 1
        super()._take(seconds * (2 if self.passes < 8 else 1))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("texts_before", [0, 15])
def test_a_new_drafter_is_tried_soon(texts_before, rows):
    """Choosing not to draft costs more than a plain step earns for drafting: that was booked to the new drafter."""
    machine = Warming(cheap)
    before = Speculator(machine.drafter(counting(lambda at: False)), clock=machine.clock)
    for _ in range(texts_before):
        machine.seconds(60, before, rows=rows)
    machine.passes = 0
    asked = []
    new = Speculator(machine.drafter(lambda row: asked.append(len(row)) or []), clock=machine.clock)
    machine.seconds(128, new, rows=rows)
    assert asked


def test_an_empty_drafter_costs_three_percent_at_most():
    machine = Machine(cheap, lambda count: 0.5 * PLAIN)
    plain, _ = machine.seconds(600)
    seconds, speculation = machine.seconds(600, Speculator(machine.drafter(lambda row: []), clock=machine.clock))
    assert seconds < 1.03 * plain
    assert speculation.drafted == 0


def test_the_pace_adapts_when_a_text_becomes_or_stops_being_predictable():
    machine = Machine(cheap)
    plain, _ = machine.seconds(1200)
    becomes = Speculator(machine.drafter(counting(lambda at: at > 300)), clock=machine.clock)
    seconds, _ = machine.seconds(1200, becomes)
    assert seconds < 0.5 * plain
    ceases = Speculator(machine.drafter(counting(lambda at: at < 300)), clock=machine.clock)
    seconds, _ = machine.seconds(1200, ceases)
    # 300 ids are nearly free; the loss on the others is a part of that gain.
    assert seconds < 0.85 * plain


@pytest.mark.parametrize(
    ("period", "cost", "longest", "shortest"),
    [(3, cheap, 6, 1.5), (12, cheap, 15, 6), (3, lambda t: PLAIN * (0.7 + 0.3 * t), 3, 1)],
)
def test_the_length_follows_acceptance_and_cost(period, cost, longest, shortest):
    """Wrong at every `period`-th position: the mean draft lies where it should."""
    machine = Machine(cost)
    speculator = Speculator(machine.drafter(counting(lambda at: at % period)), clock=machine.clock)
    machine.seconds(300, speculator)
    plain, _ = machine.seconds(600)
    seconds, speculation = machine.seconds(600, speculator)
    assert shortest <= speculation.drafted / speculation.rounds <= longest
    assert seconds < plain


def test_rows_share_the_length_that_is_best_for_all():
    """One row in four is predictable: its gain is weighed against the cost of all."""
    pace = DraftLengthController()
    for _ in range(3):
        pace.note_plain(4, 0.010)
        pace.note_round(4, 1, 8, 0.0105)
        pace.note_round(4, 4, 20, 0.012)
        pace.note_round(4, 15, 64, 0.0256)
    one, all_right = [RowAcceptance(0.98, 99), *[RowAcceptance(0.02, 99)] * 3], [RowAcceptance(0.98, 99)] * 4
    assert 0 < pace.choose(one, 15) < pace.choose(all_right, 15)
    assert pace.choose([RowAcceptance(0.02, 99)] * 4, 15) == 0 or pace._probing


def test_the_length_does_not_exceed_the_room():
    pace = DraftLengthController()
    for _ in range(3):
        pace.note_plain(1, 0.010)
        pace.note_round(1, 8, 9, 0.010)
    assert pace.choose([RowAcceptance(1.0, 15)], 15) > 5
    assert pace.choose([RowAcceptance(1.0, 15)], 5) in range(1, 6)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=60))
@settings(max_examples=50)
def test_an_acceptance_rate_is_between_zero_and_one(outcomes):
    acceptance = AcceptanceRate()
    for drafted, accepted in outcomes:
        acceptance.note(drafted, min(drafted, accepted))
        assert 0 <= acceptance.rate <= 1


def test_the_acceptance_rate_follows_the_accepted_drafts():
    acceptance = AcceptanceRate()
    for _ in range(60):
        acceptance.note(4, 4)
    assert acceptance.rate > 0.97
    for _ in range(60):
        acceptance.note(4, 0)
    assert acceptance.rate < 0.03
    for _ in range(200):
        acceptance.note(4, 1)  # one that was accepted, one that was not, two that say nothing
    assert abs(acceptance.rate - 0.5) < 0.06


def test_the_expected_tokens_of_a_round():
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(1.0, 4) == 5
    assert abs(expected_tokens(0.5, 2) - (1 + 0.5 + 0.25)) < 1e-12


def test_a_fixed_length_does_not_read_the_clock():
    def clock():
        raise AssertionError("asked for the time")

    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    plain = texts(model, [[1]], [9], [SamplingParams()])
    with pytest.raises(AssertionError, match="asked for the time"):
        texts(model, [[1]], [9], [SamplingParams()], speculator=Speculator(oracle(plain), clock=clock))
    assert (
        texts(model, [[1]], [9], [SamplingParams()], speculator=Speculator(oracle(plain), length=3, clock=clock))
        == plain
    )
