"""The checks of requests: suggestions for names, values of other libraries, end conditions."""

import dataclasses
from typing import get_type_hints

import numpy as np
import pytest
import torch

import onward
from onward import GenerateOptions, GenerateOptionsDict, LanguageModel, Request, SamplingParams
from onward.chat import ChatTemplate
from onward.errors import ContextOverflowError, RequestError
from onward.language_model.runner import RequestState
from onward.sampling import SamplingOptionsDict
from onward.testing import ByteTokenizer, scripted_model, tiny_model

TOKENIZER = ByteTokenizer(bos_id=None)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(tiny_model(seed=7), TOKENIZER, defaults=GenerateOptions(max_new_tokens=12))


@pytest.mark.parametrize(
    ("names", "options"), [(SamplingOptionsDict, SamplingParams), (GenerateOptionsDict, GenerateOptions)]
)
def test_the_typed_keywords_are_the_fields(names, options):
    assert set(get_type_hints(names)) == {field.name for field in dataclasses.fields(options)}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_tokens", "max_new_tokens"),
        ("num_beams", "beams"),
        ("do_sample", r"temperature \(0 takes the likeliest"),
        ("stop_sequences", "stop"),
        ("repeat_penalty", "repetition_penalty"),
        ("num_return_sequences", "n"),
    ],
)
def test_an_unknown_option_suggests_a_similar_one(lm, name, meant):
    for verb in (lm.generate, lm.stream, lm.request, onward.Session(lm).generate):
        with pytest.raises(RequestError, match=f"unknown option '{name}': did you mean {meant}"):
            verb("x", **{name: 1})


def test_suggestions_are_limited_to_the_methods_options():
    with pytest.raises(RequestError, match="unknown option 'num_beams'; the options are temperature"):
        onward.generate(tiny_model(), torch.tensor([[1]]), 1, num_beams=2)


OTHER_NUMBERS = {
    "max_new_tokens": np.int64(5),
    "temperature": np.float32(0.5),
    "top_k": torch.tensor(3),
    "seed": np.uint64(2**64 - 1),
    "eos": np.array([1, 2]),
    "logit_bias": {np.int32(7): np.float64(1.5)},
    "bad_words": [np.array([3, 4])],
    "logprobs": np.int8(2),
}


def test_numbers_of_other_libraries_become_pythons():
    plain = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 2**64 - 1, "eos": (1, 2), "logprobs": 2}
    plain |= {"logit_bias": {7: 1.5}, "bad_words": [[3, 4]]}
    options = GenerateOptions(**OTHER_NUMBERS)
    assert options == GenerateOptions(**plain)
    assert all(type(getattr(options, name)) in (int, float, tuple) for name in OTHER_NUMBERS)
    with pytest.raises(RequestError, match=r"temperature must be a number .* got nan"):
        GenerateOptions(temperature=np.float64("nan"))


@pytest.mark.parametrize("of", [list, tuple, np.array, torch.tensor, lambda ids: [np.int32(i) for i in ids]])
def test_ids_of_any_kind_are_one_prompt(lm, of):
    ids = [72, 101, 108]
    expected = lm.generate(ids).token_ids
    assert lm.generate(of(ids)).token_ids == expected
    assert lm.generate([of(ids), "x"])[0].token_ids == expected
    assert lm.score(of(ids)) == lm.score(ids)
    assert torch.equal(lm.logits(of(ids)), lm.logits(ids))
    assert lm.decode(of(ids)) == "Hel"


@pytest.mark.parametrize("ids", [np.array([[1, 2]]), torch.zeros(1, 2, dtype=torch.int64), torch.tensor(3)])
def test_a_prompt_has_one_dimension(lm, ids):
    with pytest.raises(RequestError, match="a prompt of ids has one dimension; got an array of shape"):
        lm.generate(ids)


def test_float_ids_are_refused(lm):
    with pytest.raises(RequestError, match="whole numbers from 0"):
        lm.generate(np.array([1.0, 2.0]))


def test_max_new_tokens_none_fills_the_context():
    lm = LanguageModel(tiny_model(max_position_embeddings=40), TOKENIZER)
    completion = lm.generate("Hello", max_new_tokens=None, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (35, "length")
    shorter = lm.generate("Hello", max_new_tokens=None, ignore_eos=True, cache=lm.new_cache(1, 16))
    assert len(shorter.token_ids) == 11
    assert [len(one.token_ids) for one in lm.generate(["a", "abc"], max_new_tokens=None, ignore_eos=True)] == [39, 37]
    assert lm.generate("x" * 40, max_new_tokens=None).token_ids == []
    with pytest.raises(ContextOverflowError, match="the prompt is 41 tokens long"):
        lm.generate("x" * 41, max_new_tokens=None)


def test_max_new_tokens_none_needs_a_context():
    lm = LanguageModel(dataclasses.replace(tiny_model(), max_seq_len=None))
    with pytest.raises(RequestError, match="this model has no max_seq_len: give a number"):
        lm.generate([1], max_new_tokens=None)


def test_a_request_equals_the_call_with_the_same_options(lm):
    options = {"temperature": 0.8, "seed": 3, "stop": "x", "bad_words": ["no"]}
    request = lm.request("Hello", **options)
    assert isinstance(request, Request)
    called = lm.generate("Hello", **options)
    assert lm.generate(request).token_ids == called.token_ids
    assert [one.token_ids for one in lm.generate([request, "Hello"], **options)] == [called.token_ids] * 2
    assert "".join(piece.text for piece in lm.stream(request)) == called.text
    assert onward.Session(lm).generate(request).token_ids == called.token_ids
    assert lm.generate(request, seed=4).token_ids == lm.generate("Hello", **options | {"seed": 4}).token_ids
    # The options of a request take precedence over the model's defaults.
    plain = Request(tuple(b"Hello"), GenerateOptions(max_new_tokens=3))
    lm_that_samples = LanguageModel(lm.model, TOKENIZER, defaults=GenerateOptions(temperature=1.5))
    assert lm_that_samples.generate(plain).token_ids == lm.generate("Hello", max_new_tokens=3).token_ids


def test_requests_of_one_call_may_differ_in_every_option(lm):
    pair = [lm.request("a", logprobs=2), lm.request("b", beams=2, n=2)]
    first, second = lm.generate(pair)
    assert first.logprobs == lm.generate(pair[0]).logprobs
    assert second.logprobs is None
    assert [one.token_ids for one in second.choices] == [one.token_ids for one in lm.generate(pair[1]).choices]


def test_each_request_has_its_own_draft(lm):
    drafting = LanguageModel(lm.model, TOKENIZER, draft="suffix", defaults=lm.defaults)
    drafted, plain = lm.request("abcabcabc", draft="lookup"), lm.request("abcabcabc")
    for of in (lm, drafting):
        with_draft, without = of.generate([drafted, plain])
        assert with_draft.speculation is not None
        assert without.speculation is None
        assert with_draft.token_ids == without.token_ids
    assert drafting.generate("abcabcabc").speculation is not None
    assert lm.generate(drafted, draft=None).speculation is None
    assert drafting.generate(drafting.request("abc", beams=2)).speculation is None
    assert drafting.generate(["abc"], per_prompt=[{"beams": 2}])[0].speculation is None


def test_stopped_by_reports_the_stop_condition():
    def completion(**options):
        model = scripted_model([*b"one two three", 256], vocab_size=258)
        return LanguageModel(model, TOKENIZER).generate([5], **options)

    def says_two(ids, text):
        return "two" in text

    assert completion(eos=256).stopped_by == 256
    assert completion(stop=["zero", "two", "o t"]).stopped_by == "two"
    assert completion(stop_when=says_two).stopped_by is says_two
    assert completion(max_new_tokens=3).stopped_by is None
    assert completion(eos=256, stop="zero").finish_reason == "stop"


def test_template_variables_are_options_of_a_chat():
    source = (
        "{{ messages[0].content }}{% if enable_thinking %}?{% endif %}"
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    )
    lm = LanguageModel(tiny_model(seed=7), TOKENIZER, ChatTemplate(source, {}), GenerateOptions(max_new_tokens=4))
    messages = [{"role": "user", "content": "Hi"}]

    def prompted(prompt: str) -> list[int]:
        return lm.generate(prompt).token_ids

    tools = [{"type": "function", "function": {"name": "search"}}]
    assert lm.chat(messages, tools=tools, enable_thinking=True).token_ids == prompted("Hi?[search]")
    assert lm.chat(messages, enable_thinking=False, template={"tools": tools}).token_ids == prompted("Hi[search]")
    assert onward.Session(lm).chat(messages, enable_thinking=True).token_ids == prompted("Hi?")
    for stream in (lm.stream_chat, onward.Session(lm).stream_chat):
        assert [piece.token_id for piece in stream(messages, tools=tools)] == prompted("Hi[search]")
    with pytest.raises(RequestError, match="unknown option 'enable_thinkin': did you mean enable_thinking"):
        lm.chat(messages, enable_thinkin=False)
    with pytest.raises(RequestError, match="template does not read reasoning_effort; it reads enable_thinking, tools"):
        lm.chat(messages, reasoning_effort="low")


def test_with_model_shares_no_learned_state(lm):
    drafting = LanguageModel(lm.model, TOKENIZER, defaults=lm.defaults, draft="lookup", prefill_chunk=3)
    other = drafting.with_model(tiny_model(seed=8))
    assert (other.tokenizer, other.defaults, other.prefill_chunk) == (TOKENIZER, lm.defaults, 3)
    assert other.draft is not None
    assert other.draft is not drafting.draft
    assert (
        other.generate("Hello").token_ids
        == LanguageModel(other.model, TOKENIZER).generate("Hello", max_new_tokens=12).token_ids
    )
    assert drafting.model is lm.model


# ── options are validated once ────────────────────────────────────────────────────────────────────────────────────


SEVERAL = {"n": 3, "temperature": 0.7}
SUBMITTED = {
    "generate": lambda lm, engine: lm.generate("ab"),
    "several texts": lambda lm, engine: lm.generate("ab", **SEVERAL),
    "beams": lambda lm, engine: lm.generate("ab", beams=2),
    "stream": lambda lm, engine: list(lm.stream("ab")),
    "chat": lambda lm, engine: lm.chat([{"role": "user", "content": "ab"}]),
    "session": lambda lm, engine: onward.Session(lm).generate("ab"),
    "to the end of the context": lambda lm, engine: lm.generate("ab", max_new_tokens=None),
    "bad words": lambda lm, engine: lm.generate("ab", bad_words=["x"]),
    "request": lambda lm, engine: lm.generate(lm.request("ab", **SEVERAL)),
    "submit": lambda lm, engine: engine.submit("ab", **SEVERAL).result(),
    "submitted chat": lambda lm, engine: engine.submit(messages=[{"role": "user", "content": "ab"}]).result(),
    "submitted request": lambda lm, engine: engine.submit(lm.request("ab").with_seed(3)).result(),
    "resumed": lambda lm, engine: engine.resume("ab", emitted=[1, 2]).result(),
}


@pytest.mark.parametrize("way", SUBMITTED.values(), ids=SUBMITTED)
def test_the_options_of_a_request_are_validated_once(way, monkeypatch):
    model = tiny_model(seed=7, max_position_embeddings=40)
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    lm = LanguageModel(model, TOKENIZER, template, GenerateOptions(max_new_tokens=4))
    validated = []
    check = GenerateOptions.__post_init__

    def counted(self):
        validated.append(self)
        check(self)

    with onward.Engine(lm) as engine:
        monkeypatch.setattr(GenerateOptions, "__post_init__", counted)
        way(lm, engine)
    assert len(validated) == 1


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1"])
def test_the_seed_of_a_copy_is_validated(lm, seed):
    with pytest.raises(RequestError, match="seed must be a whole number"):
        lm.request("ab").with_seed(seed)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 9, "temperature": 1.0}, "runs 9 texts at once, but the engine runs at most 8"),
        ({"max_new_tokens": 200, "n": 8, "temperature": 1.0}, "more than the engine's whole cache"),
        ({"max_new_tokens": 300}, "the context holds"),
    ],
)
def test_an_invalid_request_is_refused_before_it_has_any_state(options, problem, monkeypatch):
    model = tiny_model(seed=7, max_position_embeddings=256)

    def made(*_):
        raise AssertionError("a state was made")

    lm = LanguageModel(model, TOKENIZER)
    with onward.Engine(lm, max_sequences=8, cache_memory=4 * model.new_blocks(1).block_nbytes) as engine:
        monkeypatch.setattr(RequestState, "__init__", made)
        with pytest.raises(RequestError, match=problem):
            engine.submit("x" * 20, **options)
        with pytest.raises(AssertionError, match="a state was made"):
            engine.submit("x" * 20)
