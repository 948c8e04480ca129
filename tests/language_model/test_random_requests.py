"""A request gives the same text however it runs, for hundreds of random requests."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward import Completion, GenerateOptions, LanguageModel
from onward.testing import ByteTokenizer, tiny_model

TOKENIZER = ByteTokenizer()


@cache
def lm(chunk: int = 512) -> LanguageModel:
    defaults = GenerateOptions(max_new_tokens=8)
    return LanguageModel(tiny_model(seed=7), TOKENIZER, defaults=defaults, prefill_chunk=chunk)


def contents(one: Completion) -> tuple:
    return one.text, one.token_ids, one.finish_reason, one.prompt_tokens, one.seed


filters = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(0, 40),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "typical_p": st.sampled_from([0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.8, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "logit_bias": st.just({65: 3.0, 66: float("-inf")}),
        "eos": st.lists(st.integers(0, 257), min_size=1, max_size=60),
        "stop": st.lists(st.text("ABab", min_size=1, max_size=2), min_size=1, max_size=2),
        "max_new_tokens": st.integers(0, 12),
    },
)
drawn = st.fixed_dictionaries({"temperature": st.sampled_from([0.3, 1.0, 2.0]), "seed": st.integers(0, 2**64 - 1)})
options = st.tuples(filters, st.just({"temperature": 0}) | drawn).map(lambda parts: parts[0] | parts[1])
prompt = st.lists(st.sampled_from([*b"abAB ", 200, 257]), min_size=1, max_size=12)
requests = st.lists(st.tuples(prompt, options), min_size=1, max_size=4)


@settings(max_examples=200)
@given(requests, st.sampled_from([1, 3, 512]), st.sampled_from([None, "lookup", "suffix"]), st.data())
def test_texts_are_equal_alone_batched_streamed_speculated_and_sampled(requests, chunk, draft, data):
    alone = [contents(lm().generate(prompt, **options)) for prompt, options in requests]
    prompts, each = [prompt for prompt, _ in requests], [options for _, options in requests]
    together = lm(chunk).generate(prompts, per_prompt=each, draft=draft)
    assert [contents(one) for one in together] == alone
    prompt, options = requests[0]
    pieces = list(lm(chunk).stream(prompt, draft=draft, **options))
    assert "".join(piece.text for piece in pieces) == alone[0][0]
    assert [piece.token_id for piece in pieces] == alone[0][1]
    if all(options["temperature"] for options in each):
        n = data.draw(st.integers(2, 3))
        samples = lm(chunk).generate(prompts, n=n, per_prompt=each, draft=draft)
        assert [contents(one) for one in samples] == alone
        last = samples[0].choices[-1]
        assert contents(lm().generate(prompt, **options | {"seed": last.seed})) == contents(last)


@pytest.mark.parametrize("logprobs", [0, 3])
def test_logprobs_of_a_speculated_text_equal_those_of_a_plain_one(logprobs):
    prompt = "abcabcabcabc"
    plain = lm().generate(prompt, max_new_tokens=20, logprobs=logprobs)
    drafted = lm().generate(prompt, max_new_tokens=20, logprobs=logprobs, draft="lookup")
    assert contents(drafted) == contents(plain)
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        # As in tests/language_model/test_language_model_choices.py: twice what logits may differ by.
        assert one.chosen == pytest.approx(other.chosen, abs=2e-4)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=2e-4)
    assert isinstance(drafted.speculation, onward.Speculation)
