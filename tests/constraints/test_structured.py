"""Constrained texts: the result of each option, how texts end, and invalid input."""

import dataclasses
import re
import threading

import pytest
from pydantic import BaseModel, Field, model_validator

import onward
from onward.constraints import Choice, JsonSchema, Lark, Regex
from onward.errors import NothingToDrawError, RequestError, TokenizerError
from onward.sampling import mask_of
from onward.testing import ByteTokenizer, scripted_model, tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Animal(BaseModel):
    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)


@pytest.fixture(scope="module")
def lm():
    return onward.load("demo")


@pytest.fixture(scope="module")
def byte_lm():
    return onward.LanguageModel(tiny_model("qwen3", seed=4, vocab_size=300), ByteTokenizer())


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 3}, {"beams": 3}], ids=str)
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[A-Z][a-z]{3,9}\\."}, "[A-Z][a-z]{3,9}\\."),
        ({"choice": ["yes", "no, it\nis", '"é\\', "y"]}, 'yes|no, it\nis|"é\\\\|y'),
        ({"grammar": 'start: " there was " animal+ "."\nanimal: "fox" | "owl"'}, " there was (fox|owl)+\\."),
        ({"constraint": Regex("a{3}")}, "aaa"),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", ["lm", "byte_lm"])
def test_texts_match_their_constraint(which, constraint, pattern, sampled, request):
    completion = request.getfixturevalue(which).generate([66, 67], max_new_tokens=60, **constraint, **sampled)
    assert completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "stop":
        assert re.fullmatch(pattern, completion.text)


@pytest.mark.parametrize("which", ["lm", "byte_lm"])
def test_a_schema_gives_its_value(which, request):
    lm = request.getfixturevalue(which)
    for seed in range(3):
        parsed = lm.generate([66], json_schema=PERSON, temperature=1.0, seed=seed, max_new_tokens=200).parsed
        assert list(parsed) == ["name", "age", "tags"]
        assert 0 <= parsed["age"] <= 120
        animal = lm.generate([66], json_schema=Animal, temperature=1.0, seed=seed, max_new_tokens=200).parsed
        assert isinstance(animal, Animal)


def test_a_schema_without_whitespace_gives_none(lm):
    schema = JsonSchema(PERSON, whitespace=False)
    text = lm.generate("Once", json_schema=schema, temperature=1.0, seed=3).text
    assert '"," ' not in text
    assert '","age":' in text
    assert JsonSchema(PERSON) == JsonSchema(dict(PERSON)) != schema
    assert hash(JsonSchema(PERSON)) == hash(JsonSchema(dict(PERSON)))


def test_truncated_texts_are_not_parsed(lm):
    cut = lm.generate("Once", json_schema=PERSON, max_new_tokens=4)
    assert cut.finish_reason == "length"
    with pytest.raises(RequestError, match="the JSON is incomplete, because the text ended by 'length' after 4 tokens"):
        _ = cut.parsed
    with pytest.raises(RequestError, match="has no json_schema to parse it with"):
        _ = lm.generate("Once", max_new_tokens=1).parsed


def test_a_validation_error_of_a_class_is_reported(lm):
    class Never(BaseModel):
        legs: int = Field(ge=0, le=8)

        @model_validator(mode="after")
        def no(self):
            raise ValueError("no such animal")

    with pytest.raises(RequestError, match=r"the text is not a JsonSchema\(Never\).*no such animal"):
        _ = lm.generate("Once", json_schema=Never).parsed


def test_the_text_ends_when_the_constraint_is_complete(lm):
    eos = lm.tokenizer.eos_id
    whole = lm.generate("Once", regex="abc")
    assert (whole.text, whole.finish_reason, whole.stopped_by) == ("abc", "stop", None)
    # If the text may end or continue, an id ends it.
    open_end = lm.generate("Once", regex="(ab)*", logit_bias={eos: 100.0})
    assert (open_end.token_ids, open_end.finish_reason, open_end.stopped_by) == ([eos], "stop", eos)
    endless = lm.generate("Once", regex="(ab)*", ignore_eos=True, max_new_tokens=9)
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 9)
    nothing = lm.generate("Once", regex="")
    assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", [], "stop")
    # An id that ends the text is no part of it, even where its characters would fit.
    a = lm.tokenizer.encode("a", add_special_tokens=False)[0]
    without = lm.generate("Once", regex="[ab]{3}", eos=[a], max_new_tokens=9)
    assert re.fullmatch("[ab]{3}", without.text)
    assert a not in without.token_ids


def test_unreachable_min_new_tokens(lm):
    assert lm.generate("Once", regex="abc", min_new_tokens=9).text == "abc"  # it ends without an id that says so


def test_ids_that_the_tokenizer_lacks_are_never_chosen(byte_lm):
    """The model has 300 ids and the tokenizer 258."""
    for seed in range(5):
        completion = byte_lm.generate([1], regex="(?s:.{0,30})", temperature=5.0, seed=seed)
        assert max(completion.token_ids, default=0) <= 257


def test_logprobs_are_the_models(lm):
    free = lm.generate("Once", max_new_tokens=1, logprobs=3).logprobs[0]
    forced = lm.generate("Once", choice=["zebra"], max_new_tokens=1, logprobs=3).logprobs[0]
    assert forced.top == free.top
    assert forced.chosen < free.chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, r"Regex\(pattern='\('\) cannot be compiled: .*unclosed group"),
        ({"regex": 3}, "regex must be a string; got 3"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": " "}, "grammar must be a grammar in Lark's syntax"),
        ({"choice": []}, "choice must be one or more non-empty texts"),
        ({"choice": ["a", ""]}, "choice must be a non-empty string"),
        ({"json_schema": {"type": "foo"}}, r"json_schema\.type must be one or several of .*; got 'foo'"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 1}}, "Unsatisfiable schema"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": False}, "json_schema is False, which matches no text"),
        ({"json_schema": 3}, "json_schema must be a JSON Schema as a dict, or a pydantic class; got 3"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema is not JSON"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice are mutually exclusive: give one of them"),
        ({"constraint": 3}, "constraint must be an onward.Constraint"),
        ({"constraint": lambda tokenizer, stop_ids: 3}, "must return an onward.Constraint; it returned 3"),
        ({"regex": "a" * 2_100_000}, "the longest grammar has"),
        ({"guided_json": {}}, "did you mean json_schema"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_requests_are_refused_before_any_work(lm, options, message):
    with pytest.raises(RequestError, match=message):
        lm.stream("Once", **options)
    with onward.Engine(lm) as engine, pytest.raises(RequestError, match=message):
        engine.submit("Once", **options)


def test_grammars_need_a_tokenizer_with_token_bytes():
    model = tiny_model("qwen3")
    with pytest.raises(TokenizerError, match="this model has no tokenizer: give constraint="):
        onward.LanguageModel(model).generate([1], regex="a")

    class Opaque:
        vocab_size, bos_id, eos_id = 258, None, None

        def encode(self, text, *, add_special_tokens=True):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    with pytest.raises(TokenizerError, match="a Opaque does not provide them: give it a method token_bytes"):
        onward.LanguageModel(model, Opaque()).generate([1], regex="a")


def test_a_constraint_replaces_the_default_one(lm):
    lm = dataclasses.replace(lm.defaults, regex="a{2}")
    options = lm.replace(choice=["b"])
    assert (options.regex, options.choice) == (None, ("b",))
    assert options.replace(choice=None).constrained_by is None
    assert options.replace(temperature=1.0).choice == ("b",)


# ── constraints of one's own ────────────────────────────────────────────────────────────────────────────────────────


class Even:
    """Only even ids, and `longest` of them; it inherits nothing."""

    def __init__(self, longest=4, count=0):
        self.longest, self.count = longest, count

    def mask(self):
        return mask_of(range(0, 64, 2))

    def accept(self, token_id):
        assert token_id % 2 == 0
        self.count += 1

    def rollback(self, count):
        self.count -= count

    def fork(self):
        return Even(self.longest, self.count)

    @property
    def is_done(self):
        return self.count == self.longest

    def forced(self):
        return [2, 2]


def test_a_custom_constraint():
    lm = onward.LanguageModel(tiny_model("qwen3", seed=1))
    asked = Even()
    completions = lm.generate([[1], [2, 3]], constraint=asked, temperature=1.0, seed=3, n=2)
    for choice in [choice for completion in completions for choice in completion.choices]:
        assert len(choice.token_ids) == 4
        assert all(token % 2 == 0 and token < 64 for token in choice.token_ids)
        assert choice.finish_reason == "stop"
    assert asked.count == 0, "every text has a copy"
    made = lm.generate([1], constraint=lambda tokenizer, stop_ids: Even(2))
    assert len(made.token_ids) == 2


def test_tensors_take_a_constraint():
    import torch

    out = onward.generate(
        tiny_model("qwen3", seed=1), torch.tensor([[1, 2], [3, 4]]), 6, seed=2, constraint=Even(), pad=7
    )
    assert out.shape == (2, 8)
    assert bool((out[:, 2:6] % 2 == 0).all())
    assert bool((out[:, 6:] == 7).all())
    with pytest.raises(RequestError, match=r"constraint must be an onward\.Constraint; got 3"):
        onward.generate(tiny_model("qwen3"), torch.tensor([[1]]), 1, constraint=3)


def test_a_constraint_that_admits_nothing_fails_its_request_alone():
    class Stuck(Even):
        def mask(self):
            return mask_of([] if self.count == 2 else [4])

        def fork(self):
            return Stuck(self.longest, self.count)

    lm = onward.LanguageModel(scripted_model([4, 6], vocab_size=32))
    with pytest.raises(NothingToDrawError, match="the constraint admits no id"):
        lm.generate([1], constraint=Stuck())
    with pytest.raises(NothingToDrawError, match="the constraint admits no id"):
        lm.generate([1], constraint=Stuck(), beams=2)
    with onward.Engine(lm) as engine:
        failing, going = engine.submit([1], constraint=Stuck()), engine.submit([1], max_new_tokens=8)
        with pytest.raises(NothingToDrawError):
            failing.result(60)
        assert going.result(60).token_ids == lm.generate([1], max_new_tokens=8).token_ids


def test_compiling_lets_other_threads_run(lm):
    """A grammar that takes a while to compile does not keep the interpreter."""
    words = [f"{chr(97 + i % 26)}{i * 7919 % 100_003}" for i in range(4000)]
    beats, over = 0, threading.Event()

    def beat():
        nonlocal beats
        while not over.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    lm.request("Once", grammar=Choice(words[:1]).source())  # the vocabulary is there
    before = beats
    lm.request("Once", choice=words)
    during = beats - before
    over.set()
    thread.join()
    assert during >= 2
    assert Lark("start: /a/").text
