"""Sliding layers that keep only their window have the tokens of layers that keep the whole text, bit for bit."""

import dataclasses
import json
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import FULL

from block_accounts import check_accounts
from onward import GenerateOptions, LanguageModel, Session, Speculator, native
from onward.cache import KVPool
from onward.decoding.speculation import ModelDrafter
from onward.engine import Engine
from onward.models import pack_params
from onward.prefix_store.exported import load_prefix
from onward.testing import ByteTokenizer, tiny_model

pytestmark = pytest.mark.skipif(not native.available_isas(), reason="torch's products have no one order")

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
CONTEXT = 2048
# The window of gemma3 does not divide blocks, that of mistral is one, all of whose layers slide.
FAMILIES = {
    "gemma3": {"sliding_window": 70, "num_hidden_layers": 3},
    "mistral": {"sliding_window": 64},
    "gemma4": {
        "sliding_window": 100,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    },
}
PROMPTS = [[(7 * i * i + n) % 251 for i in range(n)] for n in (400, 1, 69, 130, 257)]


def model(family="gemma3", seed=7):
    stock = tiny_model(family, seed=seed, max_position_embeddings=CONTEXT, **FAMILIES[family])
    return dataclasses.replace(stock, params=pack_params(stock.params))


def keeping_all(model):
    """The same model whose sliding layers keep the whole text."""
    plan = model.new_blocks(1).plan.without_windows()
    return dataclasses.replace(model, new_blocks=partial(KVPool, plan))


def language_model(of, chunk=512, **options):
    defaults = GenerateOptions(max_new_tokens=90)
    return LanguageModel(of, ByteTokenizer(), defaults=defaults, prefill_chunk=chunk, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A language model with windows, and one without that finds nothing."""
    windowed = model(request.param)
    assert windowed.new_blocks(1).windows is not None
    return language_model(windowed), language_model(keeping_all(windowed), prefix_memory=0)


def ids(completion):
    return completion.token_ids


def blocks_in_use(slots):
    return slots.stats().total - slots.stats().available


def check(lm):
    slots = lm._prefix_cache._shared.slots
    check_accounts(slots)
    return slots


@pytest.mark.parametrize("chunk", [1, 50, 64, 300])
def test_chunks_past_the_window(pair, chunk):
    lm, whole = pair
    for prompt in PROMPTS[1:] if chunk == 1 else PROMPTS:
        assert torch.equal(language_model(lm.model, chunk).logits(prompt), whole.logits(prompt))


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED])
def test_ragged_batches(pair, options):
    lm, whole = pair
    alone = [ids(whole.generate(prompt, **options)) for prompt in PROMPTS]
    assert [ids(one) for one in lm.generate(PROMPTS, **options)] == alone
    check(lm)
    small = language_model(lm.model, 40, prefix_memory=0)
    assert [ids(one) for one in small.generate(PROMPTS, **options)] == alone


def test_memory_is_limited_by_the_window():
    """However long the text: a window of 70 positions touches three blocks of 64 at most."""
    lm, length = language_model(model()), 600 if FULL else 200
    longest = 0

    def look(tokens, text):
        nonlocal longest
        slots = check(lm)
        (slot,) = slots._slots
        if len(tokens) > 1:  # before, it has the blocks of the prompt that was processed at once
            longest = max(longest, len(slot.windows))
        return False

    lm.generate(PROMPTS[0], max_new_tokens=length, stop_when=look, **SAMPLED)
    assert longest == 3
    assert blocks_in_use(check(lm)) == 0
    lm.prefix_memory = 0
    lm.generate(PROMPTS[0], max_new_tokens=length, **SAMPLED)


@pytest.mark.parametrize("length", [1, 15, 60])
def test_drafts_rejected_across_the_edge_of_a_window(pair, length):
    lm, whole = pair
    plain = [ids(whole.generate(prompt, **SAMPLED)) for prompt in PROMPTS]

    class Echo:
        """Drafts that are right up to a place that moves."""

        def start(self, request):
            return self

        def propose(self, rows):
            texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)}
            drafts = []
            for row in rows:
                at, wrong = len(row.output), (5 * len(row.output) + len(row.prompt)) % 40
                draft = texts[tuple(row.prompt)][at : at + row.limit]
                drafts.append([token if i != wrong else (token + 1) % 251 for i, token in enumerate(draft)])
            return drafts

    drafted = lm.generate(PROMPTS, draft=Speculator(Echo(), length=length), **SAMPLED)
    assert [ids(one) for one in drafted] == plain
    assert sum(one.speculation.accepted for one in drafted) > 20
    check(lm)


def test_a_model_with_windows_drafts(pair):
    lm, whole = pair
    plain = [ids(whole.generate(prompt, **SAMPLED)) for prompt in PROMPTS]
    draft = Speculator(ModelDrafter(model(seed=8)), length=15)
    assert [ids(one) for one in lm.generate(PROMPTS, draft=draft, **SAMPLED)] == plain
    same = Speculator(ModelDrafter(lm.model), length=15)
    assert [ids(one) for one in lm.generate(PROMPTS, draft=same, **SAMPLED)] == plain


def test_samples_and_beams_of_one_prompt(pair):
    lm, whole = pair
    for prompt in PROMPTS[2:]:
        samples, expected = (each.generate(prompt, n=3, **SAMPLED).choices for each in (lm, whole))
        assert [ids(one) for one in samples] == [ids(one) for one in expected]
        beams, expected = (each.generate(prompt, beams=3, temperature=0) for each in (lm, whole))
        assert ids(beams) == ids(expected)
        assert blocks_in_use(check(lm)) == 0


def test_a_session_continues_and_is_edited(pair, tmp_path):
    windowed, whole = pair
    lm = language_model(windowed.model)  # with no other texts
    session = Session(lm)
    prompt = PROMPTS[0]
    first = session.generate(prompt, **SAMPLED)
    longer = [*prompt, *ids(first), 5, 6]
    second = session.generate(longer, **SAMPLED)
    assert second.cached_tokens == len(longer) - 3  # the last generated id was not processed, and two are new
    assert ids(second) == ids(whole.generate(longer, **SAMPLED))
    session.save(tmp_path / "session.safetensors")
    saved = load_prefix(tmp_path / "session.safetensors")
    sizes = {shape[2] for _, _, shape in json.loads(saved.metadata["cache"])}
    assert min(sizes) < 100 + 64  # sliding layers are saved from the block on that the next token sees first
    resumed = Session.load(tmp_path / "session.safetensors", lm)
    last = [*longer, *ids(second), 9]
    third = resumed.generate(last, **SAMPLED)
    assert third.cached_tokens == len(last) - 2
    assert ids(third) == ids(whole.generate(last, **SAMPLED))
    # Blocks that left the window stay cached while there is room, so an edit far back finds its window.
    for length in (len(longer) + 30, 200, 90, 3):
        edited = [*[*longer, *ids(second)][:length], 1, 2, 3]
        again = session.generate(edited, **SAMPLED)
        assert again.cached_tokens == length
        assert ids(again) == ids(whole.generate(edited, **SAMPLED))
        check(lm)
    # A saved one has no more than its window.
    again = resumed.generate([*prompt[:50], 7], **SAMPLED)
    assert ids(again) == ids(whole.generate([*prompt[:50], 7], **SAMPLED))


def test_a_chat_reuses_its_past_up_to_the_last_answer(pair):
    lm, whole = pair
    lm = language_model(lm.model)
    text, new = list(PROMPTS[0]), []
    for turn in range(4):
        got = lm.generate(text, **SAMPLED)
        assert ids(got) == ids(whole.generate(text, **SAMPLED))
        if turn:
            assert got.cached_tokens == len(text) - 1 - len(new)
        new = [turn, 3, 4]
        text += [*ids(got), *new]
        check(lm)


def test_texts_evict_the_windows_of_others(pair):
    """Many texts in little memory: the tokens do not depend on cache hits."""
    windowed, whole = pair
    chance = random.Random(3)
    bases = [[chance.randrange(250) for _ in range(500)] for _ in range(3)]
    lm = language_model(windowed.model, prefix_memory=14 * sum(block_bytes(windowed.model)))
    found = 0
    for _ in range(60):
        shared = chance.choice([3, 63, 64, 65, 130, 300, 450])
        prompt = [*chance.choice(bases)[:shared], chance.randrange(250)]
        options = {"max_new_tokens": chance.choice([1, 5, 80]), "temperature": 1, "seed": chance.randrange(9)}
        got = lm.generate(prompt, draft=chance.choice([None, "lookup"]), **options)
        assert ids(got) == ids(whole.generate(prompt, **options))
        found += got.cached_tokens
        check(lm)
    assert found > 200


def block_bytes(model):
    blocks = model.new_blocks(1)
    return blocks.block_nbytes, blocks.windows.block_nbytes


@settings(max_examples=15, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 420),
            st.integers(1, 90),
            st.sampled_from([{}, {}, {"draft": "lookup"}, {"n": 2}, {"beams": 2, "temperature": 0}]),
        ),
        min_size=1,
        max_size=6,
    ),
    chunk=st.sampled_from([20, 100, 512]),
    texts=st.sampled_from([2, 3, 5]),
    overcommit=st.sampled_from([1.0, 3.0, 10.0]),
)
def test_an_engine_with_little_memory(engines, requests, chunk, texts, overcommit):
    """Requests wait, share prompts and are preempted: each gets what it gets alone."""
    lm, whole = engines
    memory = texts * text_bytes(lm.model, 512)
    bases = [[(11 * i * i + base) % 251 for i in range(420)] for base in range(3)]
    with Engine(language_model(lm.model, chunk), max_sequences=6, cache_memory=memory, overcommit=overcommit) as engine:
        served = []
        for base, length, new, options in requests:
            options = {"max_new_tokens": new, **({} if "beams" in options else SAMPLED), **options}
            served.append((bases[base][:length], options, engine.submit(bases[base][:length], **options)))
        for prompt, options, generation in served:
            wanted = whole.generate(prompt, **{**options, "draft": None})
            assert [ids(one) for one in generation.result(60).choices] == [ids(one) for one in wanted.choices]
    slots = engine._worker.slots
    check_accounts(slots)
    assert blocks_in_use(slots) == 0


@pytest.fixture(scope="module")
def engines():
    windowed = model()
    return language_model(windowed), language_model(keeping_all(windowed), prefix_memory=0)


def text_bytes(model, length):
    whole, window = block_bytes(model)
    blocks = -(-length // 64)
    return blocks * whole + min(blocks, 4) * window


def test_programs_are_not_retraced_as_texts_grow(monkeypatch):
    lm = language_model(model())
    lm.generate(PROMPTS[0], max_new_tokens=10, **SAMPLED)
    monkeypatch.setattr("onward.program.compiled.trace", lambda *_, **__: pytest.fail("a program is traced again"))
    lm.generate(PROMPTS[0], max_new_tokens=400, **SAMPLED)
