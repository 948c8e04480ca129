"""Ids forced by a constraint are drafted: fewer passes of the model, and the same text."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward import Speculator
from onward.constraints import JsonSchema
from onward.decoding.speculation.pace import paying_length
from onward.sampling import mask_of
from onward.testing import ByteTokenizer, scripted_model, tiny_model

LETTERS = {"type": "object", "properties": {"first_name": {"enum": ["Ada"]}, "born": {"type": "integer"}}}
LETTERS |= {"required": ["first_name", "born"], "additionalProperties": False}


class Spelled(onward.Constraint):
    """The ids of `whole`; `says` what it takes to be forced of those that are left."""

    def __init__(self, whole, says, at=0):
        self.whole, self.says, self.at = whole, says, at

    def mask(self):
        return mask_of([self.whole[self.at]])

    def accept(self, token_id):
        assert token_id == self.whole[self.at]
        self.at += 1

    def rollback(self, count):
        self.at -= count

    def fork(self):
        return Spelled(self.whole, self.says, self.at)

    @property
    def is_done(self):
        return self.at == len(self.whole)

    def forced(self):
        return self.says(self.whole[self.at :])


def passes(model, lm, *args, **options):
    """A completion, and over how many ids each call of the model went."""
    before = len(model.calls)
    completion = lm.generate(*args, **options)
    return completion, [len(call.tokens[0]) for call in model.calls[before:]]


WHOLE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (lambda left: left, [2, 10]),  # the prompt gives the first id, and one pass the nine others
        (lambda left: left[:4], [2, 5, 5]),
        (lambda left: [], [2, *[1] * 9]),
        (lambda left: [7, *left], [2, 11, 10, 9, 8, 7, 6, 5, 4, 3]),  # always wrong
        (lambda left: [99, *left], [2, *[1] * 9]),  # no id of the model
        (lambda left: [*left, 8, 8, 8], [2, 13]),  # past the end
    ],
)
def test_forced_tokens_take_one_pass(says, expected):
    model = scripted_model(WHOLE, vocab_size=12)
    completion, widths = passes(model, onward.LanguageModel(model), [11, 11], constraint=Spelled(WHOLE, says))
    assert completion.token_ids == WHOLE
    assert completion.finish_reason == "stop"
    assert widths == expected


def test_forced_ids_are_counted():
    model = scripted_model(WHOLE, vocab_size=12)
    lm = onward.LanguageModel(model)
    found = lm.generate([11, 11], constraint=Spelled(WHOLE, lambda left: left)).speculation
    assert (found.drafted, found.accepted, found.rounds) == (9, 8, 1)  # the last one counts as the target's own
    assert lm.generate([11], max_new_tokens=3).speculation is None


def test_the_keys_of_an_object_are_drafted():
    lm = onward.LanguageModel(tiny_model("qwen3", seed=2), ByteTokenizer())
    schema = JsonSchema(LETTERS, whitespace=False)
    found = lm.generate([1], json_schema=schema, temperature=1.0, seed=3, max_new_tokens=200)
    # {"first_name":"Ada","born":…}: all but the number is forced
    assert found.text.startswith('{"first_name":"Ada","born":')
    assert found.speculation.accepted >= 25
    assert found.speculation.acceptance == 1.0


def test_a_drafter_is_asked_if_nothing_is_forced():
    asked = []

    class Spy:
        def start(self, target):
            return self

        def propose(self, rows):
            assert all(row.constraint is not None for row in rows)
            asked.append([len(row.output) for row in rows])
            return [WHOLE[len(row.output) : len(row.output) + row.limit] for row in rows]

    def some(left):
        return left[:3] if len(left) == 9 else []

    model = scripted_model(WHOLE, vocab_size=12)
    lm = onward.LanguageModel(model)
    spied = Speculator(Spy(), length=2)
    completion, widths = passes(model, lm, [11, 11], constraint=Spelled(WHOLE, some), draft=spied)
    assert completion.token_ids == WHOLE
    assert widths == [2, 4, 3, 3]  # the prompt; 3 forced; 2 drafted, and 2 again
    assert asked == [[5], [8]]
    assert spied._acceptance.rate > 0.7  # by its own ids alone
    assert spied._acceptance._tried < 8


def test_a_draft_is_cut_at_the_first_refused_id():
    class Half:
        def start(self, request):
            return self

        def propose(self, rows):
            right = [WHOLE[len(row.output) :] for row in rows]
            return [[*ids[:2], 0, *ids[3:]][: row.limit] for ids, row in zip(right, rows, strict=True)]

    model = scripted_model(WHOLE, vocab_size=12)
    lm = onward.LanguageModel(model)
    spied = Speculator(Half(), length=6)
    unforced = Spelled(WHOLE, lambda left: [])
    completion, widths = passes(model, lm, [11, 11], constraint=unforced, draft=spied)
    assert completion.token_ids == WHOLE
    assert widths == [2, 3, 3, 3]  # the prompt, then two right ids each time
    assert completion.speculation.acceptance == 1.0


def test_unconstrained_rows_share_the_pass():
    model = scripted_model(lambda ids: (ids[-1] + 1) % 12, vocab_size=12)
    lm = onward.LanguageModel(model)
    before = len(model.calls)
    options = [{"constraint": Spelled(WHOLE, lambda left: left[:2])}, {"max_new_tokens": 10}]
    first, second = lm.generate([[11], [11]], per_prompt=options)
    assert first.token_ids == WHOLE
    assert second.token_ids == lm.generate([11], max_new_tokens=10).token_ids
    assert all(len(call.tokens) <= 2 for call in model.calls[before:])
    assert len(model.calls) - before <= 21
    assert second.speculation is None


@given(st.lists(st.integers(0, 15), min_size=1, max_size=32))
def test_the_paying_length(forced):
    length = paying_length(forced)
    assert 0 <= length <= max(forced)
    if len(forced) == 1 or min(forced) == max(forced):
        assert length == max(forced)  # nothing is padded, so all of it pays
    if sum(map(bool, forced)) * 16 < len(forced):
        assert length == 0


def test_the_draft_model_follows_the_constraint():
    """Its drafts obey the constraint, so they are refused where the text ends, in the last round, and nowhere else."""
    lm = onward.load("demo")
    schema = JsonSchema({"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2, "maxItems": 3})
    length = 4
    draft = Speculator(lm, length=length)  # the model itself, so every admitted id is right
    for seed in range(3):
        found = lm.generate("Once", json_schema=schema, temperature=1.0, seed=seed, draft=draft)
        assert found.token_ids == lm.generate("Once", json_schema=schema, temperature=1.0, seed=seed).token_ids
        assert found.speculation.drafted > 2 * length
        assert found.speculation.drafted - found.speculation.accepted <= length


def test_dense_caches_and_caches_of_unknown_length():
    model = dataclasses.replace(tiny_model("qwen3", seed=9), new_blocks=None)
    lm = onward.LanguageModel(model, ByteTokenizer())
    paged = onward.LanguageModel(tiny_model("qwen3", seed=9), ByteTokenizer())
    asked = {"choice": ["a long text that is forced from its first letter on"], "max_new_tokens": 60}
    assert lm.generate([1], **asked).token_ids == paged.generate([1], **asked).token_ids
    assert lm.generate([1], cache=lm.new_cache(1, 61), **asked).text == asked["choice"][0]
    assert torch.is_grad_enabled()
