"""A `Speculator` accepts the same drafters as `draft=`."""

from itertools import groupby

import pytest
import torch
from drafted import Guess

from onward import Engine, LanguageModel, Speculator
from onward.decoding.speculation import DraftRow, DraftTarget, ModelDrafter, PromptLookup, SuffixLookup
from onward.errors import RequestError
from onward.testing import tiny_model


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(tiny_model())


@pytest.mark.parametrize(
    ("draft", "drafter"),
    [
        (lambda lm: "lookup", PromptLookup),
        (lambda lm: "suffix", SuffixLookup),
        (lambda lm: lm, ModelDrafter),
        (lambda lm: lm.model, ModelDrafter),
        (lambda lm: PromptLookup(1), PromptLookup),
    ],
)
def test_a_speculator_accepts_every_draft_of_a_request(lm, draft, drafter):
    speculator = Speculator(draft(lm), length=2)
    assert isinstance(speculator.drafter, drafter)
    prompt = [1, 2, 1, 2, 1, 2]
    drafted, plain = (lm.generate(prompt, max_new_tokens=12, draft=one) for one in (speculator, None))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("draft", ["demo-draft", 3, None, PromptLookup, [1, 2]])
def test_invalid_drafters_are_refused_at_once(draft):
    with pytest.raises(RequestError, match="draft is 'lookup', 'suffix', a LanguageModel"):
        Speculator(draft)


def test_a_draft_model_reuses_only_prefixes_of_the_same_salt(lm):
    target = DraftTarget(lm.model.vocab_size, torch.device("cpu"), rows=8, max_len=200, positions=1600, longest=3)
    drafting, prompt = ModelDrafter(lm.model).start(target), list(range(100))

    def cached(salt):
        row = DraftRow(prompt, [], salt=salt)
        drafting.join([row])
        count = row.state.cached
        drafting.leave([row])
        return count

    salts = ("a", "b", None, "")
    assert [cached(salt) for salt in (*salts, *salts)] == [0] * 4 + [len(prompt) - 1] * 4


def test_a_drafter_gets_the_salt_of_a_request(lm):
    salts = []
    guess = Speculator(Guess(lambda row: salts.append(row.salt) or [1]), length=1)
    with Engine(lm) as engine:
        for salt in ("a", None):
            lm.generate([1, 2], max_new_tokens=4, draft=guess, cache_salt=salt, ignore_eos=True)
            engine.submit([1, 2], max_new_tokens=4, draft=guess, cache_salt=salt, ignore_eos=True).result()
    assert [salt for salt, _ in groupby(salts)] == ["a", None]
