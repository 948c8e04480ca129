"""The draft head that comes with the demo model: texts stay the same, and its drafts are worth their size."""

import pytest

import onward
from onward.errors import UnsupportedArchitectureError

PROMPTS = (
    "Once upon a time",
    "Rita found a red kite in the meadow.",
    "Tell me a story about a fox.",
    "The miller had three sons",
    "One morning Ada",
)
# Without a head, copying earlier tokens of a text has 1.3 accepted tokens in a round of 4 (benchmarks/LOG.md).
WORTHWHILE = 1.3


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
def test_texts_with_the_head_equal_plain_texts(sampling):
    lm = onward.load("demo", draft="demo-head")
    options = {"max_new_tokens": 80, "logprobs": 1, **sampling}
    plain = lm.generate(PROMPTS, draft=None, **options)
    drafted = lm.generate(PROMPTS, draft=onward.Speculator(lm.draft.drafter, length=4), **options)
    assert [(each.token_ids, each.logprobs) for each in drafted] == [(each.token_ids, each.logprobs) for each in plain]
    rounds = sum(each.speculation.rounds for each in drafted)
    assert sum(each.speculation.accepted for each in drafted) / rounds > WORTHWHILE


def test_the_head_is_not_a_model():
    with pytest.raises(UnsupportedArchitectureError, match="this is a draft head, not a model"):
        onward.load("demo-head")
