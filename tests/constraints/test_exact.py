"""batched == alone, speculative == plain, scheduled == solo, streamed == whole: with constraints of every kind."""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import LISTED

import onward
from held_engine import held
from onward import Speculator
from onward.constraints import JsonSchema
from onward.sampling import mask_of
from onward.testing import ByteTokenizer, scripted_model, tiny_model

MODELS = {
    "demo": lambda: onward.load("demo"),
    "qwen3": lambda: onward.LanguageModel(tiny_model("qwen3", seed=7, vocab_size=270), ByteTokenizer()),
    "mistral": lambda: onward.LanguageModel(tiny_model("mistral", seed=5, sliding_window=40), ByteTokenizer()),
}
# Small JSON, so that random models come to its end.
SCHEMAS = [
    {
        "type": "object",
        "properties": {"k": {"enum": ["x", "yy"]}, "n": {"type": "integer", "maximum": 9, "minimum": -9}},
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    *LISTED[12:15],
]


class NoneTwice(onward.Constraint):
    """No id twice in a row, ten ids at most."""

    def __init__(self, ids=()):
        self.ids = list(ids)

    def mask(self):
        return mask_of(token for token in range(40, 90) if token not in self.ids[-1:])

    def accept(self, token_id):
        assert token_id not in self.ids[-1:]
        self.ids.append(token_id)

    def rollback(self, count):
        assert count <= len(self.ids)
        del self.ids[len(self.ids) - count :]

    def fork(self):
        return NoneTwice(self.ids)

    @property
    def is_done(self):
        return len(self.ids) == 10


class Anything:
    """A drafter that proposes arbitrary ids."""

    def start(self, request):
        self.vocab = request.vocab_size
        return self

    def propose(self, rows):
        return [
            [(owner * 31 + len(row) * 7 + at) % self.vocab for at in range(row.limit)] for owner, row in enumerate(rows)
        ]


CONSTRAINTS = [
    *({"json_schema": schema} for schema in SCHEMAS),
    {"json_schema": JsonSchema(SCHEMAS[0], whitespace=False)},
    {
        "json_schema": JsonSchema(
            {"type": "object", "properties": {"a_long_name": {"const": "a long value"}}}, whitespace=False
        )
    },
    {"regex": "(a|bc)*d?"},
    {"regex": "[^x]{3,20}"},
    {"choice": ["yes, of course", "yes, perhaps", "no"]},
    {"grammar": 'start: "(" start ")" | /[a-z]{1,3}/'},
    {"constraint": NoneTwice()},
    {},
    {},
]


@functools.cache
def lm(name):
    return MODELS[name]()


options = st.fixed_dictionaries(
    {
        "constraint": st.sampled_from(CONSTRAINTS),
        "prompt": st.lists(st.integers(32, 90), min_size=1, max_size=8),
        "max_new_tokens": st.sampled_from([0, 1, 5, 40]),
        "kind": st.sampled_from(["greedy", "sampled", "sampled", "n", "beams"]),
        "seed": st.integers(0, 2**32),
        "penalty": st.sampled_from([{}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.6}, {"top_k": 5}]),
        "logprobs": st.sampled_from([None, 2]),
        "draft": st.sampled_from([None, "lookup", "suffix", "anything", "itself"]),
    }
)


def asked(of):
    """Keyword arguments of a request, without its draft."""
    out = {"max_new_tokens": of["max_new_tokens"], "logprobs": of["logprobs"], **of["constraint"], **of["penalty"]}
    if of["kind"] in ("sampled", "n"):
        out |= {"temperature": 1.0, "seed": of["seed"], "n": 3 if of["kind"] == "n" else 1}
    elif of["kind"] == "greedy":
        out["temperature"] = 0
    else:
        out.pop("top_k", None)
    return out | ({"beams": 3, "n": 2} if of["kind"] == "beams" else {})


def draft_of(name, of):
    if of["kind"] == "beams":
        return None
    drafts = {"anything": Speculator(Anything(), length=3), "itself": Speculator(lm(name), length=4)}
    return drafts.get(of["draft"], of["draft"])


def content(completion):
    return [
        (one.token_ids, one.text, one.finish_reason, one.stopped_by, one.seed, one.logprobs, one.score)
        for one in completion.choices
    ]


def followed(stream, whole):
    """The pieces of a stream; its completion is then in `whole`."""
    whole.append((yield from stream))


@settings(max_examples=80)
@given(st.sampled_from(list(MODELS)), st.lists(options, min_size=1, max_size=4))
def test_batched_drafted_streamed_and_engine_texts_are_equal(name, several):
    model = lm(name)
    alone = [content(model.generate(of["prompt"], **asked(of))) for of in several]
    drafted = [asked(of) | {"draft": draft_of(name, of)} for of in several]
    prompts = [of["prompt"] for of in several]
    assert [content(one) for one in model.generate(prompts, per_prompt=drafted)] == alone
    for of, right in zip(several, alone, strict=True):
        if of["kind"] in ("greedy", "sampled"):
            whole = []
            pieces = list(followed(model.stream(of["prompt"], **asked(of)), whole))
            assert [content(completion) for completion in whole] == [right]
            assert "".join(piece.text for piece in pieces) == right[0][1]
    with onward.Engine(model, max_sequences=5) as engine:
        generations = [engine.submit(prompt, **of) for prompt, of in zip(prompts, drafted, strict=True)]
        assert [content(one.result(60)) for one in generations] == alone


class Unforced(onward.Constraint):
    """Another constraint, of which nothing is drafted."""

    def __init__(self, inner):
        self.inner = inner
        self.mask, self.accept, self.rollback = inner.mask, inner.accept, inner.rollback

    def fork(self):
        return Unforced(self.inner.fork())

    @property
    def is_done(self):
        return self.inner.is_done


@settings(max_examples=80)
@given(st.sampled_from(list(MODELS)), st.lists(options, min_size=1, max_size=3))
def test_forced_tokens_change_no_text(name, several):
    model = lm(name)
    prompts = [of["prompt"] for of in several]
    plain = []
    for of in several:
        options = asked(of)
        maker = model.request(of["prompt"], **options).options.constrained_by
        for kind in of["constraint"]:
            del options[kind]
        if maker is not None and not isinstance(maker, onward.Constraint):
            options["constraint"] = lambda *given, maker=maker: Unforced(maker(*given))
        elif maker is not None:
            options["constraint"] = Unforced(maker.fork())
        plain.append(options)
    forced = model.generate(prompts, per_prompt=[asked(of) for of in several])
    assert list(map(content, forced)) == list(map(content, model.generate(prompts, per_prompt=plain)))


def test_preempted_texts_keep_their_constraints():
    """The newest give way in a cache of few blocks, and are computed again."""
    model = lm("qwen3")
    chance = random.Random(5)
    requests = []
    for number in range(8):
        schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 30, "maxItems": 40}
        prompt = [chance.randrange(32, 90) for _ in range(40)]
        options = {"json_schema": schema, "temperature": 1.0, "seed": number, "max_new_tokens": 190}
        requests.append(model.request(prompt, **options))
    alone = [content(model.generate(request)) for request in requests]
    memory = 9 * model.model.new_blocks(1).block_nbytes
    with onward.Engine(model, max_sequences=8, cache_memory=memory, overcommit=10.0) as engine:
        with held(engine):
            generations = [engine.submit(request) for request in requests]
        assert [content(one.result(120)) for one in generations] == alone
        assert engine.stats().preemptions > 0


def test_sessions_continue_with_constraints():
    session = onward.Session(lm("demo"))
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    first = session.generate("Once upon a time", json_schema=schema, temperature=1.0, seed=1)
    plain = lm("demo").generate("Once upon a time", json_schema=schema, temperature=1.0, seed=1)
    assert content(first) == content(plain)
    second = session.generate("Once upon a time there", regex="[a-z]{5}", temperature=1.0, seed=1)
    assert second.cached_tokens > 0
    assert content(second) == content(
        lm("demo").generate("Once upon a time there", regex="[a-z]{5}", temperature=1.0, seed=1)
    )


@pytest.mark.parametrize("beams", [2, 4])
def test_all_beams_match_the_constraint(beams):
    found = lm("demo").generate("Once", choice=["yes, a", "no, b", "perhaps"], beams=beams, n=beams)
    assert found.text in ("yes, a", "no, b", "perhaps")
    assert all(choice.text in ("yes, a", "no, b", "perhaps") for choice in found.choices)
    assert [choice.score for choice in found.choices] == sorted(
        (choice.score for choice in found.choices), reverse=True
    )


def test_a_search_continues_when_its_likeliest_texts_end():
    """Ten texts of one letter are all likelier than the one that continues; the search finds its continuations."""
    logits = torch.full((128,), -9.0)
    logits[97:107] = 1.0  # a … j end the text
    logits[ord("z")], logits[ord("!")] = 0.5, 9.0
    model = scripted_model(lambda ids: logits if len(ids) < 3 else ord("!"), vocab_size=128)
    lm = onward.LanguageModel(model, ByteTokenizer(vocab_size=128))
    found = lm.generate([1, 1], regex="[a-j]|z!", beams=2, n=2, length_penalty=5.0, early_stopping="never")
    assert found.text == "z!"
