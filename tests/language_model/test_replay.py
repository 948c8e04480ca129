"""Replays and receipts: a generated text is verified wherever it was generated, and no other text is."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_requests import lm, options, prompt, requests

import onward
from onward import Constraint, GenerateOptions, LanguageModel, Receipt, Sampler
from onward.chat import ChatTemplate
from onward.engine import Engine
from onward.errors import NothingToDrawError, RequestError
from onward.sampling import History, mask_of


def checked(model, completion, **changes):
    """The verification of a receipt, which has been a document."""
    receipt = dataclasses.replace(model.receipt(completion), **changes)
    return model.verify(Receipt.from_json(json.dumps(receipt.to_json(), allow_nan=False)))


@settings(max_examples=100)
@given(requests, st.sampled_from([1, 3, 512]), st.sampled_from([None, "lookup", "suffix"]), st.integers(1, 3))
def test_texts_of_batches_drafts_samples_and_prefix_hits_are_verified(requests, chunk, draft, n):
    prompts, each = [prompt for prompt, _ in requests], [options for _, options in requests]
    each = [{"logprobs": 0, "n": n if options["temperature"] else 1, **options} for options in each]
    for completion in lm(chunk).generate(prompts, per_prompt=each, draft=draft):
        for text in completion.choices:
            result = checked(lm(), text)
            assert result.is_verified, (result, text.request)
            replay = lm().replay(text)
            assert replay.drawn == replay.token_ids == text.token_ids
            assert replay.logprobs == text.logprobs
            assert replay.finish_reason == text.finish_reason


@settings(max_examples=200)
@given(prompt, options, st.booleans(), st.data())
def test_no_other_text_is_verified(prompt, options, with_logprobs, data):
    text = lm().generate(prompt, **options, logprobs=0 if with_logprobs else None)
    ids, at = text.token_ids, data.draw(st.integers(0, max(0, len(text.token_ids) - 1)))
    receipt = lm().receipt(text)
    kind = data.draw(st.sampled_from(["id", "shorter", "longer", "prompt", "end", "logprob"]))
    logprobs = receipt.logprobs
    if kind == "id" and ids:
        other = data.draw(st.integers(0, 400).filter(lambda token: token != ids[at]))  # also past the vocabulary
        receipt = dataclasses.replace(receipt, token_ids=[*ids[:at], other, *ids[at + 1 :]])
        expected = [("token", at)]
    elif kind == "shorter" and ids:
        receipt = dataclasses.replace(receipt, token_ids=ids[:at], logprobs=logprobs and logprobs[:at])
        expected = [("end", at)]
    elif kind == "longer":
        more = data.draw(st.lists(st.integers(0, 257), min_size=1, max_size=3))
        longer = None if logprobs is None else [*logprobs, *[-1.0] * len(more)]
        receipt = dataclasses.replace(receipt, token_ids=[*ids, *more], logprobs=longer)
        expected = [("end", len(ids))]
    elif kind == "prompt":
        receipt = dataclasses.replace(receipt, prompt_ids=[*prompt, 65])
        expected = [("prompt", None)]
    elif kind == "logprob" and logprobs:
        changed = logprobs[at] - 1 if logprobs[at] > -1e30 else -1.0
        receipt = dataclasses.replace(receipt, logprobs=[*logprobs[:at], changed, *logprobs[at + 1 :]])
        expected = [("logprob", at)]
    else:
        reason = "length" if receipt.finish_reason == "stop" else "stop"
        receipt, expected = dataclasses.replace(receipt, finish_reason=reason), [("end", len(ids))]
    result = lm().verify(Receipt.from_json(receipt.to_json()))
    assert not result.is_same_text
    assert not result.is_verified
    assert (result.difference, result.position) in expected, result
    assert "altered or forged" in str(result) or result.difference == "prompt"


@settings(max_examples=50)
@given(prompt, options, st.lists(st.integers(0, 257), min_size=1, max_size=12), st.sampled_from([1, 2, 5, 512]))
def test_a_replay_of_any_ids_draws_like_a_sampler_at_each_position(prompt, options, ids, chunk):
    options = {**options, "seed": options.get("seed", 0), "max_new_tokens": 12}
    replay = lm(chunk).replay(prompt, ids, logprobs=2, **options)
    params = lm().request(prompt, **options).options
    sampler = Sampler([params])
    logits, scores = lm().logits([*prompt, *ids]), lm().score([*prompt, *ids], logprobs=2).logprobs
    for k, drawn in enumerate(replay.drawn):
        history = History(prompt, ids[:k])
        at = len(prompt) + k
        row, positions = logits[at - 1].unsqueeze(0), torch.tensor([at])
        if drawn is None:
            with pytest.raises(NothingToDrawError):
                sampler(row, positions, [history])
        else:
            assert sampler(row, positions, [history]).tolist() == [drawn]
        assert replay.logprobs[k] == scores[at]
    if len(replay.drawn) < len(ids):
        assert replay.finish_reason == "stop"
    else:
        assert (replay.finish_reason == "length") >= (len(ids) == 12 and replay.finish_reason != "stop")


@pytest.fixture(scope="module")
def demo():
    return onward.load("demo")


STRUCTURES = [
    {"regex": "[a-z ]{5,60}"},
    {"choice": ["yes, I do", "no"]},
    {"json_schema": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
    {"grammar": 'start: "a" /[bc]{3,9}/'},
    {"temperature": 0.0, "regex": "(ab|cd){3}"},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dry_multiplier": 0.8, "bad_words": ["the", "a"], "min_new_tokens": 5, "stop": ["."]},
]  # fmt: skip


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_constrained_and_filtered_texts_are_verified(demo, options):
    for seed in range(3):
        sampling = {} if options.get("temperature") == 0.0 else {"temperature": 1.1, "seed": seed}
        text = demo.generate("Once upon a time", max_new_tokens=24, logprobs=0, **sampling, **options)
        assert checked(demo, text).is_verified
        first = text.token_ids[0]
        assert checked(demo, text, token_ids=[first + 1, *text.token_ids[1:]]).difference == "token"


def test_chats_with_a_reasoning_budget_and_tools_are_verified(demo):
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}{# </think> <tool_call> <function= #}"
    )
    model = LanguageModel(demo.model, demo.tokenizer, ChatTemplate(source, {}), message_format="hermes")
    messages = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    cases = [
        {"reasoning_budget": 4},
        {"reasoning_budget": 0, "reasoning_budget_message": None},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "reasoning_budget": 5, "reasoning_budget_message": " So."},
    ]
    for case in cases:
        text = model.chat(messages, max_new_tokens=40, temperature=1.0, seed=3, logprobs=0, **case)
        assert checked(model, text).is_verified, case
        assert model.replay(text).difference is None
        if "reasoning_budget" in case:
            more = {**model.receipt(text).options, "reasoning_budget": case["reasoning_budget"] + 1}
            assert checked(model, text, options=more).difference == "token"


def test_texts_of_an_engine_are_verified_by_a_model(demo):
    prompts = ["Once upon a time", "The fox", "Once upon a time, there was"]
    with Engine(demo, max_sequences=3) as engine:
        running = [
            engine.submit(prompt, max_new_tokens=20, temperature=1.0, seed=seed, n=2, logprobs=1, draft="lookup")
            for seed, prompt in enumerate(prompts)
        ]
        for generation in running:
            completion = generation.result(60)
            for text in completion.choices:
                assert demo.receipt(text).fingerprint == engine.fingerprint
                assert checked(demo, text).is_verified
        cut = engine.submit(prompts[0], max_new_tokens=400, temperature=1.0, seed=1, time_limit=0.05).result(60)
    assert cut.finish_reason == "time"
    assert checked(demo, cut).is_verified
    assert checked(demo, cut, finish_reason="length").difference == "end"


def test_texts_ended_by_a_function_are_verified(demo):
    text = demo.generate("Once", max_new_tokens=20, temperature=1.0, seed=1, stop_when=lambda ids, text: len(ids) == 7)
    assert demo.receipt(text).finish_reason == "stop_when"
    assert checked(demo, text).is_verified
    assert checked(demo, text, finish_reason="stop").difference == "end"


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_quantized_model_is_detected_by_fingerprint_or_first_logprob(demo, format):
    quantized = onward.quantize(demo, format)
    caught = 0
    for seed in range(8):
        text = quantized.generate("Once upon a time", max_new_tokens=16, temperature=1.0, seed=seed, logprobs=0)
        honest = demo.verify(quantized.receipt(text))
        assert honest.other_parts == "the model (its config, weights or quantization)"
        assert not honest.is_verified
        forged = checked(demo, text, fingerprint=demo.receipt(text).fingerprint)
        assert (forged.difference, forged.position) in [("logprob", 0), ("token", 0)]
        without = checked(demo, text, fingerprint=demo.receipt(text).fingerprint, logprobs=None)
        caught += not without.is_same_text
        assert checked(quantized, text).is_verified  # the receipt is the quantized model's, too
    assert caught or format == "int8", "without logprobs only tokens that differ tell"


def test_the_same_text_of_another_build_is_not_verified(demo):
    text = demo.generate("Once", max_new_tokens=5, temperature=0.0)
    *others, _, adapter = demo.receipt(text).fingerprint.split("-")
    result = checked(demo, text, fingerprint="-".join([*others, "00000000", adapter]))
    assert result.is_same_text
    assert not result.is_verified
    assert result.other_parts == "the version of torch"
    assert "another build" in str(result)


def test_a_receipt_without_its_prompt_needs_it(demo):
    text = demo.generate("Once upon a time", max_new_tokens=5, temperature=0.0)
    receipt = demo.receipt(text, prompt=False)
    assert receipt.prompt_ids is None
    assert demo.verify(receipt, "Once upon a time").is_verified
    assert demo.verify(receipt, demo.encode("Once upon a time")).is_verified
    assert demo.verify(receipt, "Once upon a time!").difference == "prompt"
    with pytest.raises(RequestError, match="has no prompt: give it"):
        demo.verify(receipt)


def test_a_receipt_is_small(demo):
    text = demo.generate("Once upon a time", max_new_tokens=20, temperature=0.5, seed=1)
    document = demo.receipt(text, prompt=False).to_json()
    assert document["options"] == {"max_new_tokens": 20, "temperature": 0.5, "top_p": 0.9, "eos": [2, 0]}
    assert len(json.dumps(document)) < 500


class _Even(Constraint):
    def mask(self):
        return mask_of(range(0, 258, 2))

    def accept(self, token_id):
        pass

    def rollback(self, count):
        pass

    def fork(self):
        return self


def test_a_replay_stops_at_an_id_forbidden_by_a_constraint():
    replay = lm().replay([65], [2, 4, 5, 6], constraint=_Even(), temperature=0.0, logprobs=0)
    assert len(replay.drawn) == 3
    assert all(token % 2 == 0 for token in replay.drawn)
    assert replay.difference == next(k for k in range(3) if replay.drawn[k] != [2, 4, 5][k])
    assert len(replay.logprobs) == 2


def test_an_empty_replay_runs_nothing():
    replay = lm().replay([65], [], temperature=0.0)
    assert (replay.drawn, replay.difference, replay.finish_reason) == ([], None, "length")
    assert checked(lm(), lm().generate([65], max_new_tokens=0)).is_verified


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: lm().replay([65], [1], temperature=1.0), "replayed with its seed"),
        (lambda: lm().replay([65], [1], beams=2), "leave out beams"),
        (lambda: lm().replay([65], [1], seed=1, n=2), "leave out n"),
        (lambda: lm().replay([65]), "needs the ids after the prompt"),
        (lambda: lm().replay([65], "ab"), "token_ids must be a list of ids; got 'ab'"),
        (lambda: lm().replay([65], [258]), "token_ids must be whole numbers from 0 to 257; got 258"),
        (lambda: lm().replay([65], [True]), "token_ids must be whole numbers"),
        (lambda: lm().replay([[65], [66]], [1]), "replay takes one prompt"),
        (lambda: lm().replay(lm().generate([65], seed=1), [1]), "leave out token_ids"),
        (lambda: lm().replay([65], [1], temprature=0.5), "temprature"),
        (lambda: lm().receipt(lm().generate([65], beams=2)), "a beam search"),
        (lambda: lm().receipt(lm().generate([65], constraint=_Even())), "not your own constraint"),
        (lambda: lm().receipt(dataclasses.replace(lm().generate([65]), request=None)), "has no request"),
    ],
)
def test_invalid_calls(call, error):
    with pytest.raises(RequestError, match=error):
        call()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"onward_receipt": 2}, "format 2, but this Onward reads 1"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"seed": ...}, "lacks 'seed'"),
        ({"seed": -1}, "the receipt is not valid: seed must be"),
        ({"seed": "x"}, "seed of the receipt must be a whole number or null"),
        ({"token_ids": [1, -2]}, "token_ids of the receipt must be a list of ids"),
        ({"token_ids": "abc"}, "token_ids of the receipt must be a list of ids"),
        ({"prompt_ids": []}, "prompt_ids of the receipt must be a list of ids, at least one"),
        ({"logprobs": [0.0]}, "token_ids and logprobs must have equal lengths"),
        ({"finish_reason": "tired"}, "finish_reason of the receipt must be one of stop, length"),
        ({"fingerprint": "abc"}, "a fingerprint is a text such as"),
        ({"options": {"temperature": -1}}, "the receipt is not valid: temperature must be"),
        ({"options": {"logit_bias": {"a": 1}}}, "the receipt is not valid: logit_bias"),
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": {"draft": "lookup"}}, "a receipt has no option 'draft'"),
        ({"answer": {"format": "none"}}, "answer of the receipt must be"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_receipts(change, error):
    document = lm().receipt(lm().generate([65], temperature=1.0, seed=1)).to_json() | change
    document = {name: value for name, value in document.items() if value is not ...}
    with pytest.raises(RequestError, match=error):
        Receipt.from_json(json.dumps(document))


def test_options_survive_json():
    options = GenerateOptions(
        max_new_tokens=3, temperature=0.1 + 0.2, eos=(1, 2), stop=("a", "b"), bad_words=((1, 2), (3,)),
        logit_bias={5: float("-inf"), 7: 0.25}, dry_multiplier=0.5, dry_sequence_breakers=(4,), seed=2**64 - 1,
    )  # fmt: skip
    text = lm().generate(onward.Request((65,), options))
    receipt = Receipt.from_json(json.dumps(lm().receipt(text).to_json(), allow_nan=False))
    assert receipt.request([65]).options == options
