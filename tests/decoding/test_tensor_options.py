"""Every sampling option through `onward.generate`; options that need the text raise if it isn't known."""

import pytest
import torch

import onward
from onward import LanguageModel, Sampler, SamplingParams
from onward.errors import RequestError
from onward.inferencer import ModelInferencer
from onward.testing import scripted_model, tiny_model

PROMPTS = torch.tensor([[5, 77, 130, 9], [200, 1, 9, 31]])
OPTIONS = [
    {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"no_repeat_ngram_size": 1, "bad_words": [(token,) for token in range(0, 258, 3)]},
    {"logit_bias": {3: 3.0}, "typical_p": 0.5, "min_new_tokens": 5, "eos": list(range(0, 258, 9))},
    {"xtc_probability": 0.9, "dry_multiplier": 3.0, "dry_allowed_length": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: min(options))
def test_rows_of_tensors_equal_a_language_model(options):
    model = tiny_model(seed=2)
    lm = LanguageModel(model)
    found = onward.generate(model, PROMPTS, 20, temperature=0.3, seed=[4, 5], **options)
    seeds = [{"seed": 4}, {"seed": 5}]
    want = lm.generate(PROMPTS.tolist(), max_new_tokens=20, temperature=0.3, per_prompt=seeds, **options)
    for row, completion in zip(found.tolist(), want, strict=True):
        ids = completion.token_ids
        assert row[4:] == ids + ids[-1:] * (20 - len(ids))
    plain = onward.generate(model, PROMPTS, 20, temperature=0.3, seed=[4, 5], eos=options.get("eos", ()))
    assert found.tolist() != plain.tolist(), "the options are meant to matter"


def test_an_ignored_eos_ends_nothing():
    model = scripted_model([1, 2, 3, 4])
    ids = onward.generate(model, torch.tensor([[0]]), 5, temperature=0, eos=2, ignore_eos=True)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "x"}, "stop strings need a text, but onward.generate has only ids: use eos"),
        ({"bad_words": ["x"]}, "bad_words holds the text 'x'"),
        ({"n": 2}, "unknown option 'n'"),
        ({"typical_p": 0}, "typical_p must be a number in"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9, but max_new_tokens is 2"),
    ],
    ids=str,
)
def test_options_unsupported_for_tensors_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        onward.generate(scripted_model([1]), torch.tensor([[0]]), 2, **options)


def test_options_that_read_the_text_are_refused_if_it_is_unknown():
    model = scripted_model([1])
    looking = Sampler([SamplingParams(repetition_penalty=1.2)])
    with pytest.raises(RequestError, match="read the whole text, but here only the next tokens are known"):
        onward.stream(
            model.forward, cache=model.new_cache(1, 8), params=(), first_token=0, max_new_tokens=3, select=looking
        )
    inferencer = ModelInferencer(model)
    cache = inferencer.new_cache(1, 8)
    for call in (
        lambda: inferencer.prefill(torch.tensor([[0, 1]]), cache, looking),
        lambda: inferencer.decode(torch.tensor([[0]]), cache, 2, looking),
    ):
        with pytest.raises(RequestError, match=r"use onward\.generate or LanguageModel\.generate"):
            call()
    assert model.calls == []


class Finished(onward.Constraint):
    """A constraint after which nothing may follow."""

    is_done = True

    def fork(self):
        return self


def test_a_row_without_tokens_is_padded_or_refused():
    model = tiny_model(seed=2)
    found = onward.generate(model, PROMPTS, 3, constraint=Finished(), pad=7)
    assert found[:, 4:].tolist() == [[7] * 3] * 2
    with pytest.raises(RequestError, match="row 0 ended before its first token, so no id can fill it: give pad"):
        onward.generate(model, PROMPTS, 3, constraint=Finished())
