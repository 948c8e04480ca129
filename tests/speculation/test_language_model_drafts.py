"""Drafts through the public API: `draft=` for requests, for a model and for `load`."""

import json

import pytest
from drafted import Guess

import onward
from onward import GenerateOptions, LanguageModel, Session
from onward.decoding.speculation import ModelDrafter, PromptLookup, Speculator
from onward.errors import DraftError, RequestError, SourceError, TokenizerError
from onward.testing import ByteTokenizer, scripted_model, tiny_model


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(tiny_model(), ByteTokenizer())


@pytest.fixture(scope="module")
def demo():
    return onward.load("demo", draft="demo-draft")


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5, "max_new_tokens": 40}


@pytest.mark.parametrize(
    "draft",
    [
        "lookup",
        "suffix",
        tiny_model(seed=1),
        LanguageModel(tiny_model(seed=2), ByteTokenizer()),
        ModelDrafter(tiny_model()),
        PromptLookup(1),
        Speculator(ModelDrafter(tiny_model()), length=3),
        Guess(lambda row: [1, 2, 3]),
    ],
    ids=lambda draft: draft if isinstance(draft, str) else type(draft).__name__,
)
def test_completions_are_equal_with_every_drafter(lm, draft):
    prompts = ["One", "The cat, the cat, the cat", "x"]
    for options in (SAMPLED | {"n": 2, "logprobs": 1}, {"max_new_tokens": 30}):
        plain = lm.generate(prompts, **options)
        drafted = lm.generate(prompts, draft=draft, **options)
        for one, other in zip(plain, drafted, strict=True):
            for text, again in zip(one.choices, other.choices, strict=True):
                assert (again.token_ids, again.text, again.logprobs) == (text.token_ids, text.text, text.logprobs)
                assert again.speculation is not None
                assert text.speculation is None
                assert len(again.timing.per_token_ms) == len(again.token_ids) - 1


def test_streams_and_sessions_are_drafted_too(lm):
    speculator = Speculator(ModelDrafter(lm.model), length=4)
    plain = list(lm.stream("Hello", **SAMPLED))
    assert list(lm.stream("Hello", draft=speculator, **SAMPLED)) == plain
    session = Session(lm)
    text = "Hello"
    for _ in range(3):
        completion = session.generate(text, draft=speculator, **SAMPLED)
        assert completion.token_ids == lm.generate(text, **SAMPLED).token_ids
        assert completion.speculation.acceptance == 1
        text += completion.text + "!"
    assert completion.cached_tokens > 40


def test_stop_strings_inside_a_draft(lm):
    plain = lm.generate("Hello", **SAMPLED)
    stop = plain.text[7:9]
    speculator = Speculator(ModelDrafter(lm.model), length=15)
    ended = lm.generate("Hello", draft=speculator, stop=stop, **SAMPLED)
    again = lm.generate("Hello", stop=stop, **SAMPLED)
    assert (ended.text, ended.token_ids, ended.finish_reason) == (again.text, again.token_ids, "stop")
    assert ended.text == plain.text[: plain.text.index(stop)]


def test_the_draft_of_a_model_is_its_default_and_none_disables_it(demo):
    drafted = demo.generate("Once upon a time", **SAMPLED)
    plain = demo.generate("Once upon a time", draft=None, **SAMPLED)
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation is not None
    assert plain.speculation is None
    assert demo.generate("A", beams=2, max_new_tokens=5).speculation is None, "a default is no contradiction"


def test_a_speculator_is_reused_for_the_next_request(lm):
    def speculator(draft):
        return lm.request("A", draft=draft).options.draft

    assert speculator("suffix") is speculator("suffix")
    model = tiny_model(seed=1)
    assert speculator(model) is speculator(model)
    own = Speculator(PromptLookup())
    assert speculator(own) is own


def test_the_demo_draft_guesses_the_demo(demo):
    completion = demo.generate(
        "Once upon a time", draft=Speculator(demo.draft.drafter, length=3), temperature=0.7, seed=1, max_new_tokens=120
    )
    assert completion.speculation.acceptance > 0.5
    assert completion.speculation.tokens_per_round > 2.5


def test_invalid_drafts_are_refused(lm):
    with pytest.raises(RequestError, match=r"draft is 'lookup', .*; got 'demo-draft': .*pass onward\.load"):
        lm.generate("a", draft="demo-draft")
    with pytest.raises(RequestError, match="a Drafter or a Speculator; got int"):
        lm.generate("a", draft=3)
    with pytest.raises(RequestError, match="a beam search cannot use a draft"):
        lm.generate("a", draft="lookup", beams=2)
    with pytest.raises(RequestError, match=r"draft must be an onward\.Speculator; got 'lookup'"):
        onward.GenerateOptions(draft="lookup")
    with pytest.raises(SourceError, match="no folder 'nope'"):
        onward.load("demo", draft="nope")


def test_a_draft_of_another_vocabulary_is_refused_when_it_is_set(demo):
    other = LanguageModel(tiny_model(), ByteTokenizer())
    with pytest.raises(TokenizerError, match="different vocabulary: id "):
        demo.draft = other
    with pytest.raises(TokenizerError, match="different vocabulary: id "):
        demo.generate("a", draft=other)


def test_the_model_works_after_a_drafter_failed(lm):
    def fail(row):
        raise RuntimeError("out of luck")

    plain = lm.generate("Hello", **SAMPLED)
    with pytest.raises(DraftError, match="the drafter Guess failed"):
        lm.generate("Hello", draft=Speculator(Guess(fail), length=2), **SAMPLED)
    assert lm.generate("Hello", **SAMPLED).token_ids == plain.token_ids


def test_drafts_fit_a_callers_cache_of_any_size(lm):
    """Even if little of the cache is left."""
    plain = lm.generate(["Hello", "Hi"], max_new_tokens=12)
    cache = lm.new_cache(2, 17)
    drafted = lm.generate(
        ["Hello", "Hi"], max_new_tokens=12, cache=cache, draft=Speculator(ModelDrafter(lm.model), length=9)
    )
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_rows_that_end_early_leave_the_batch():
    """Their rows of both caches are released; drafts for the other rows continue as before."""
    lm = LanguageModel(tiny_model(), defaults=GenerateOptions(max_new_tokens=30))
    per_prompt = [{"max_new_tokens": count} for count in (3, 30, 11, 1)]
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    plain = lm.generate(prompts, per_prompt=per_prompt)
    drafted = lm.generate(prompts, per_prompt=per_prompt, draft=Speculator(ModelDrafter(lm.model), length=4))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert [one.speculation.acceptance for one in drafted] == [1, 1, 1, 0]


def test_a_model_of_plain_functions_is_drafted():
    lm = LanguageModel(scripted_model(lambda tokens: (tokens[-1] + 1) % 32))
    completion = lm.generate([[1], [5]], max_new_tokens=20, draft=Speculator(PromptLookup(1), length=4))
    assert completion[0].token_ids == list(range(2, 22))


def test_speculation_is_part_of_the_json(tmp_path):
    lm = LanguageModel(tiny_model(), ByteTokenizer())
    completion = lm.generate("ab", draft="lookup", max_new_tokens=4)
    from onward.cli.generate import json_fields

    fields = json_fields(completion, lm.encode("ab"), lm.tokenizer)
    assert json.loads(json.dumps(fields))["choices"][0]["speculation"]["rounds"] >= 0
