"""A `Speculator` accepts the same drafters as `draft=`."""

import pytest

from onward import LanguageModel, Speculator
from onward.decoding.speculation import ModelDrafter, PromptLookup, SuffixLookup
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
def test_a_speculator_takes_what_a_request_takes(lm, draft, drafter):
    speculator = Speculator(draft(lm), length=2)
    assert isinstance(speculator.drafter, drafter)
    prompt = [1, 2, 1, 2, 1, 2]
    drafted, plain = (lm.generate(prompt, max_new_tokens=12, draft=one) for one in (speculator, None))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("draft", ["demo-draft", 3, None, PromptLookup, [1, 2]])
def test_what_is_no_drafter_is_refused_at_once(draft):
    with pytest.raises(RequestError, match="draft is 'lookup', 'suffix', a LanguageModel"):
        Speculator(draft)
