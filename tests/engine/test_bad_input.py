"""Invalid requests: refused in the submitting thread, with one clear error, before anything is queued."""

import dataclasses

import pytest
import torch
from checked_engine import CheckedEngine

import onward
from onward import LanguageModel
from onward.engine import Engine
from onward.errors import ContextOverflowError, EngineError, RequestError, TokenizerError
from onward.testing import ByteTokenizer, scripted_model, tiny_model

MODEL = tiny_model(seed=7)
LM = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
BLOCK_BYTES = MODEL.new_blocks(1).block_nbytes
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine():
    return CheckedEngine(LM, max_sequences=3, cache_memory=3 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        (["abc"], {"cache": MODEL.new_cache(1, 64)}, RequestError, "has its own cache: leave out cache"),
        (["abc"], {"cache": None}, RequestError, "has its own cache: leave out cache"),
        ([], {"messages": MESSAGES}, TokenizerError, "no chat template"),
        ([], {}, RequestError, "give a prompt, or messages= for a chat; got neither"),
        ([None], {}, RequestError, "got neither"),
        (["abc"], {"messages": MESSAGES}, RequestError, "got both"),
        ([["abc", "def"]], {}, RequestError, "submit takes one prompt; got a list of 2"),
        ([[[1, 2], [3]]], {}, RequestError, "submit takes one prompt; got a list of 2"),
        ([[]], {}, RequestError, "the prompt is an empty list of ids"),
        ([7], {}, RequestError, "a prompt is a str, ids"),
        ([[1, 258]], {}, RequestError, "whole numbers from 0 to 257; got 258"),
        (["a" * 300], {}, ContextOverflowError, "the prompt is 300 tokens long, but the context holds 256"),
        (["a" * 200], {"max_new_tokens": 57}, ContextOverflowError, "ask for at most 56 new tokens"),
        (["a" * 100], {"max_new_tokens": 100}, ContextOverflowError, "more than the engine's whole cache"),
        (["a" * 80], {"max_new_tokens": 30, "beams": 2}, ContextOverflowError, "2 x 110 positions"),
        (["abc"], {"n": 4, "temperature": 1.0}, RequestError, "runs 4 texts at once, but the engine runs at most 3"),
        (["abc"], {"beams": 4}, RequestError, "runs 4 texts at once, but the engine runs at most 3"),
        (["abc"], {"max_new_tokens": -1}, RequestError, "max_new_tokens"),
        (["abc"], {"time_limit": -1.0}, RequestError, "time_limit must be a number of seconds above 0"),
        (["abc"], {"time_limit": 0}, RequestError, "time_limit must be a number of seconds above 0"),
        (["abc"], {"temprature": 1.0}, RequestError, "temprature"),
        (["abc"], {"stop_when": 3}, RequestError, "stop_when must be a function"),
        (["abc"], {"cancel": True}, RequestError, "cancel must be a threading.Event"),
        (["abc"], {"draft": "guess"}, RequestError, "guess"),
        (["abc"], {"logprobs": 259}, RequestError, "logprobs is 259"),
        (["abc"], {"priority": "high"}, RequestError, "priority must be a whole number"),
        (["abc"], {"priority": 10**400}, RequestError, "priority must be 2147483648 or less"),
        (["abc"], {"priority": True}, RequestError, "priority must be a whole number"),
        (["abc"], {"client": 7}, RequestError, "client must be a text or None; got 7"),
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(engine, prompt, options, error, message):
    before = engine.stats()
    with pytest.raises(error) as raised:
        engine.submit(*prompt, **options)
    assert message in str(raised.value)
    assert engine.stats() == before


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must be a whole number of 1 or more; got 0"),
        ({"max_sequences": 2.0}, "max_sequences must be a whole number of 1 or more; got 2.0"),
        ({"max_waiting": -1}, "max_waiting must be a whole number of 1 or more; got -1"),
        ({"max_waiting_tokens": -5}, "max_waiting_tokens must be a whole number"),
        ({"max_step_ms": -1}, "max_step_ms must be a number of 0 or more; got -1"),
        ({"max_step_ms": float("nan")}, "max_step_ms must be a number of 0 or more; got nan"),
        ({"overcommit": 0.5}, "overcommit must be a number of 1 or more; got 0.5"),
        ({"overcommit": float("inf")}, "overcommit must be a number of 1 or more; got inf"),
        ({"ageing": -0.1}, "ageing must be a number of 0 or more"),
        ({"cache_memory": -1}, "cache_memory must be a whole number of 1 or more; got -1"),
        ({"cache_memory": BLOCK_BYTES - 1}, "must be at least one block"),
    ],
)
def test_an_invalid_limit_is_refused(limits, message):
    with pytest.raises(RequestError) as raised:
        Engine(LM, **limits)
    assert message in str(raised.value)


def test_an_engine_needs_a_language_model():
    with pytest.raises(RequestError, match="an engine serves a LanguageModel; got ScriptedModel"):
        Engine(scripted_model([1]))


def test_a_closed_engine_accepts_nothing():
    engine = CheckedEngine(LM)
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed: make another one"):
        engine.submit("abc")
    assert repr(engine).startswith("<CheckedEngine: 0 running")


def test_replacing_the_model_of_an_engine_is_refused():
    lm = LanguageModel(MODEL, ByteTokenizer())
    with CheckedEngine(lm) as engine:
        lm.model = tiny_model(seed=8)
        with pytest.raises(EngineError, match="another model than when this engine was made"):
            engine.submit("abc")


def test_changed_weights_apply_to_the_next_request():
    model = tiny_model(seed=7)
    lm = LanguageModel(model, ByteTokenizer(), prefix_memory=0)
    prompt = "a prompt of more than a block of positions, so that one that begins alike finds it in the cache"
    with CheckedEngine(lm) as engine:
        before = engine.submit(prompt, max_new_tokens=10).result(60).token_ids
        assert engine.submit(prompt, max_new_tokens=10).result(60).cached_tokens == len(prompt) - 1
        with torch.no_grad():
            for tensor in torch.utils._pytree.tree_leaves(model.params):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 1:
                    tensor.mul_(-1.5)
        served = engine.submit(prompt, max_new_tokens=10).result(60)
        assert served.cached_tokens == 0
        assert served.token_ids == lm.generate(prompt, max_new_tokens=10).token_ids != before


# ── models whose cache is not in blocks ─────────────────────────────────────────────────────────────────────────────


class Opaque:
    """A cache that torch sees no tensor of."""

    def __init__(self, inner):
        self.inner = inner


def opaque_model():
    inner = tiny_model(seed=7)

    def forward(tokens, offsets, cache, params, *, logits_at=None):
        logits, new_cache = inner.forward(tokens, offsets, cache.inner, params, logits_at=logits_at)
        return logits, Opaque(new_cache)

    return onward.Model(
        forward=forward,
        params=inner.params,
        new_cache=lambda batch, max_len: Opaque(inner.new_cache(batch, max_len)),
        vocab_size=258,
        max_seq_len=256,
        compiles=False,
    )


def test_a_cache_with_opaque_rows_serves_one_text_at_a_time():
    lm = LanguageModel(opaque_model(), ByteTokenizer())
    with pytest.raises(RequestError, match="can't be identified: pass max_sequences=1"):
        Engine(lm)
    prompts = ["abc", "a longer prompt than that", "x"]
    with CheckedEngine(lm, max_sequences=1) as engine:
        generations = [engine.submit(prompt, max_new_tokens=10) for prompt in prompts]
        served = [generation.result(60).token_ids for generation in generations]
    assert served == [LM.generate(prompt, max_new_tokens=10).token_ids for prompt in prompts]


def test_a_dense_cache_of_a_short_context():
    dense = dataclasses.replace(MODEL, new_blocks=None)
    lm = LanguageModel(dataclasses.replace(dense, max_seq_len=20), ByteTokenizer())
    with CheckedEngine(lm, max_sequences=3) as engine:
        served = [engine.submit("abc", max_new_tokens=17) for _ in range(5)]
        assert {tuple(one.result(60).token_ids) for one in served} == {
            tuple(LM.generate("abc", max_new_tokens=17).token_ids)
        }
        assert engine.stats().blocks == 3
    position = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(dense.new_cache(1, 64))) // 64
    with pytest.raises(RequestError, match="too little for 4 texts of 64 positions"):
        Engine(LanguageModel(dense), max_sequences=4, cache_memory=4 * 63 * position)
    with CheckedEngine(LanguageModel(dense), max_sequences=4, cache_memory=4 * 64 * position) as engine:
        with pytest.raises(ContextOverflowError, match="more than the engine's whole cache"):
            engine.submit([1] * 40, max_new_tokens=100)
        assert engine.submit([1] * 40, max_new_tokens=24).result(60).finish_reason == "length"
