"""`stream` and `decode` with a prompt, with a Model, and with invalid prompts and forwards."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.decoding.prompt import check_context_length
from onward.errors import ContextOverflowError, RequestError
from onward.testing import scripted_model, tiny_model

MODEL = tiny_model(seed=6)
PROMPT = [5, 77, 130, 8, 4, 200, 9]
V = 300


def token_by_token(prompt, new, cache):
    """The greedy ids, with one id given to the forward at a time."""
    ids = []
    for position, token in enumerate(prompt):
        (following,) = onward.decode(
            MODEL.forward, cache=cache, params=MODEL.params, first_token=token, offset=position, max_new_tokens=1
        )
    while len(ids) < new:
        ids.append(following)
        (following,) = onward.decode(
            MODEL.forward,
            cache=cache,
            params=MODEL.params,
            first_token=following,
            offset=len(prompt) + len(ids) - 1,
            max_new_tokens=1,
        )
    return ids


@settings(deadline=None, max_examples=25)
@given(
    prompt=st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=12),
    held=st.integers(0, 11),
    chunk=st.integers(1, 14),
    compile=st.sampled_from(["auto", "eager"]),
)
def test_a_prompt_equals_its_ids_token_by_token(prompt, held, chunk, compile):
    """Whatever the chunk, and whatever part of it the cache holds before."""
    expected = token_by_token(prompt, 6, MODEL.new_cache(1, 32))
    held = min(held, len(prompt) - 1)
    cache = MODEL.new_cache(1, 32)
    if held:
        token_by_token(prompt[:held], 0, cache)
    options = {"cache": cache, "params": MODEL.params, "max_new_tokens": 6, "compile": compile}
    ids = onward.decode(MODEL.forward, prompt=prompt[held:], offset=held, prefill_chunk=chunk, **options)
    assert ids == expected


def test_the_forward_gets_at_most_a_chunk_of_a_prompt():
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    ids = onward.decode(model, prompt=[3, 4, 5, 6, 7], max_new_tokens=3, prefill_chunk=2)
    assert ids == [8, 9, 10]
    assert [call.tokens for call in model.calls] == [[[3, 4]], [[5, 6]], [[7]], [[8]], [[9]]]


@pytest.mark.parametrize(
    "prompt",
    [tuple(PROMPT), torch.tensor(PROMPT), np.array(PROMPT), np.array(PROMPT, dtype=np.uint16), list(np.array(PROMPT))],
    ids=["tuple", "tensor", "array", "uint16", "numpy scalars"],
)
def test_a_prompt_may_be_a_sequence_a_tensor_or_an_array(prompt):
    assert onward.decode(MODEL, prompt=prompt, max_new_tokens=5) == onward.decode(
        MODEL, prompt=PROMPT, max_new_tokens=5
    )
    ids = onward.decode(MODEL, first_token=np.int64(5), max_new_tokens=np.int64(5), eos=np.int32(V))
    assert ids == onward.decode(MODEL, prompt=[5], max_new_tokens=5)


# ── a Model in place of a forward ─────────────────────────────────────────────────────────────────────────


def test_a_model_brings_its_cache_and_params():
    lm = onward.LanguageModel(MODEL)
    assert onward.decode(MODEL, prompt=PROMPT, max_new_tokens=8) == lm.generate(PROMPT, max_new_tokens=8).token_ids
    assert list(onward.stream(MODEL, prompt=PROMPT, max_new_tokens=8)) == onward.decode(
        MODEL.forward, params=MODEL.params, cache=MODEL.new_cache(1, 20), prompt=PROMPT, max_new_tokens=8
    )


def test_a_model_takes_another_cache_and_params():
    other = tiny_model(seed=7)
    cache = MODEL.new_cache(1, 20)
    ids = onward.decode(MODEL, prompt=PROMPT, max_new_tokens=8, params=other.params, cache=cache)
    assert ids == onward.decode(other, prompt=PROMPT, max_new_tokens=8)
    continued = onward.decode(other, prompt=ids[-1:], offset=len(PROMPT) + 7, cache=cache, max_new_tokens=3)
    assert ids + continued == onward.decode(other, prompt=PROMPT, max_new_tokens=11)


def test_the_context_of_a_model_is_a_limit():
    limit = MODEL.max_seq_len
    assert limit is not None
    with pytest.raises(
        ContextOverflowError, match=rf"6 tokens\) .* context holds {limit}: ask for at most {limit - 6} "
    ):
        onward.decode(MODEL, prompt=PROMPT, max_new_tokens=limit)
    with pytest.raises(ContextOverflowError, match=r"holds 8: ask for at most 2 .* or make a longer cache"):
        onward.decode(MODEL, prompt=PROMPT, max_new_tokens=3, cache=MODEL.new_cache(1, 8))
    assert len(onward.decode(MODEL, prompt=PROMPT, max_new_tokens=2, cache=MODEL.new_cache(1, 8))) == 2


# ── ids outside the vocabulary ────────────────────────────────────────────────────────────────────────────


def embedding(tokens, offsets, cache, params):
    return torch.nn.functional.embedding(tokens, params["embedding"]) @ params["head"].T, cache


def indexing(tokens, offsets, cache, params):
    return params["embedding"][tokens.long()] @ params["head"].T, cache


def modulus(tokens, offsets, cache, params):
    """Takes any id, and has nothing to say of those at or above 300."""
    return params["embedding"][tokens.long() % V] @ params["head"].T, cache


@pytest.mark.parametrize("compile", ["auto", "eager"])
@pytest.mark.parametrize("forward", [embedding, indexing, modulus])
@pytest.mark.parametrize(
    "start", [{"first_token": 999}, {"prompt": [3] * 5 + [999]}], ids=lambda start: next(iter(start))
)
def test_an_id_outside_the_vocabulary_is_named(forward, compile, start):
    params = {"embedding": torch.ones(V, 4), "head": torch.ones(V, 4)}
    (name,) = start
    options = {"cache": None, "params": params, "max_new_tokens": 2, "compile": compile, "prefill_chunk": 2}
    with pytest.raises(RequestError, match=f"{name} names id 999, but the vocabulary ends at 299"):
        onward.decode(forward, **start, **options)
    assert onward.decode(forward, first_token=299, **options) == [0, 0]


def test_an_id_outside_a_models_vocabulary_is_named_before_any_step():
    with pytest.raises(RequestError, match=f"prompt names id 999, but the vocabulary ends at {MODEL.vocab_size - 1}"):
        onward.stream(MODEL, prompt=[1, 999], max_new_tokens=2)


@pytest.mark.parametrize(
    "error", [IndexError("of mine"), RuntimeError("of mine")], ids=lambda error: type(error).__name__
)
def test_other_errors_of_the_forward_are_raised(error):
    def forward(tokens, offsets, cache, params):
        raise error

    with pytest.raises(type(error), match="of mine"):
        onward.decode(forward, cache=None, params=None, first_token=1, max_new_tokens=2, compile="eager")


# ── invalid arguments ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"pass either prompt= .* or first_token= \(one id\); got neither"),
        ({"prompt": [1], "first_token": 1}, "got both"),
        ({"prompt": []}, "prompt must contain at least one id"),
        ({"prompt": "Once"}, "prompt must be a list of ids, .* got 'Once'"),
        ({"prompt": 3}, "prompt must be a list of ids, .* got 3"),
        ({"prompt": [1, -1]}, "prompt must have ids that are whole numbers from 0 to 2147483647; got -1"),
        ({"prompt": [1, 2**31]}, "got 2147483648"),
        ({"prompt": [1, 2.0]}, "got 2.0"),
        ({"prompt": [True]}, "got True"),
        ({"prompt": torch.tensor([[1, 2]])}, r"prompt must have one dimension, .* got \[1, 2\]"),
        ({"prompt": np.ones(2)}, "got 1.0"),
        ({"prompt": [1], "prefill_chunk": 0}, "prefill_chunk must be a whole number of 1 or more"),
        ({"prompt": [1], "offset": 3}, "offset 3 needs a cache with 3 computed positions: pass that cache"),
    ],
    ids=str,
)
def test_invalid_prompts_are_refused(options, says):
    with pytest.raises(RequestError, match=says):
        onward.stream(MODEL, max_new_tokens=1, **options)


def test_invalid_forwards_are_refused():
    with pytest.raises(RequestError, match=r"takes a forward .* or an onward.Model; got LanguageModel .* its `model`"):
        onward.decode(onward.LanguageModel(MODEL), first_token=1, max_new_tokens=1)
    for argument, options in (("cache", {"params": None}), ("params", {"cache": None})):
        with pytest.raises(RequestError, match=f"a forward needs {argument}="):
            onward.decode(embedding, first_token=1, max_new_tokens=1, **options)


@pytest.mark.parametrize("compile", ["auto", "eager"])
@pytest.mark.parametrize("prompt", [[1], [1, 2]], ids=["one id", "two ids"])
@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda logits, cache: logits, r"must return \(logits, cache\); it returned a Tensor"),
        (lambda logits, cache: None, r"must return \(logits, cache\); it returned None"),
        (lambda logits, cache: (logits, cache, 3), r"it returned \(Tensor, NoneType, int\)"),
        (lambda logits, cache: (cache, logits), r"it returned \(NoneType, Tensor\)"),
        (lambda logits, cache: {"logits": logits}, "it returned a dict"),
        (lambda logits, cache: (logits[0], cache), r"must return logits \[1, \d, 'V'\]; got \[\d, 9\]"),
        (lambda logits, cache: (logits[:, -1], cache), r"must return logits \[1, \d, 'V'\]; got \[1, 9\]"),
        (lambda logits, cache: (logits.unsqueeze(0), cache), r"got \[1, 1, \d, 9\]"),
    ],
    ids=["bare logits", "None", "three", "the other way round", "a dict", "no batch", "no T", "four dimensions"],
)
def test_invalid_results_are_described(result, says, prompt, compile):
    def forward(tokens, offsets, cache, params):
        return result(params[tokens.long()], cache)

    with pytest.raises(RequestError, match=says):
        onward.decode(forward, cache=None, params=torch.eye(9), prompt=prompt, max_new_tokens=2, compile=compile)


def test_zero_tokens_process_no_prompt():
    seen = []
    forward = partial(lambda *arguments: seen.append(arguments))
    assert onward.decode(forward, cache=None, params=None, prompt=[1, 2, 3], max_new_tokens=0) == []
    assert seen == []


def test_generate_takes_arrays():
    prompts = np.array([PROMPT, PROMPT[::-1]])
    expected = onward.generate(MODEL, torch.tensor(prompts), 6, temperature=0)
    for array in (prompts, prompts.astype(np.int32), prompts.astype(np.uint16)):
        ids = onward.generate(MODEL, array, 6, temperature=0)
        assert isinstance(ids, torch.Tensor)
        assert torch.equal(ids, expected)
    with pytest.raises(RequestError, match=r"must be whole numbers \[B, P\]"):
        onward.generate(MODEL, np.full((1, 2), math.pi), 6)
    with pytest.raises(RequestError, match="must be a tensor of ids"):
        onward.generate(MODEL, np.array([["a"]]), 6)


@pytest.mark.parametrize(
    ("length", "new", "context", "cache", "says"),
    [
        (9, 0, 8, None, "the prompt is 9 tokens long, but the context holds 8: shorten the prompt"),
        (9, 3, 8, 20, "the prompt is 9 tokens long, but the context holds 8: shorten the prompt"),
        (
            8,
            1,
            None,
            8,
            "prompt (8 tokens) + max_new_tokens (1) = 9, but the cache holds 8: shorten the prompt or "
            "make a longer cache",
        ),
        (
            7,
            2,
            8,
            8,
            "prompt (7 tokens) + max_new_tokens (2) = 9, but the context holds 8: ask for at most 1 new tokens or "
            "shorten the prompt",
        ),
    ],
)
def test_overflow_messages_name_the_limit_and_its_owner(length, new, context, cache, says):
    with pytest.raises(ContextOverflowError) as raised:
        check_context_length(length, new, context=context, cache=cache)
    assert str(raised.value) == says
    assert raised.value.option == "prompt"


@pytest.mark.parametrize(
    ("length", "new", "context", "cache"), [(9, 9, None, None), (6, 2, 8, None), (6, 2, None, 8), (8, 0, 8, 9)]
)
def test_exactly_full_contexts_are_accepted(length, new, context, cache):
    check_context_length(length, new, context=context, cache=cache)
