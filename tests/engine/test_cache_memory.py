"""An engine's `cache_memory` covers keys and values, windows of sliding layers and recurrent states."""

import dataclasses
from functools import partial

import pytest
from checked_engine import CheckedEngine

from block_accounts import check_accounts
from onward import LanguageModel
from onward.cache import KVPool
from onward.decoding.shared_cache import engine_slots
from onward.testing import ByteTokenizer, tiny_model

BLOCK = 64
MEMORY = 12_000_000
PROMPTS = [[(7 * i * i + n) % 251 for i in range(900)] for n in range(12)]


def sliding_model():
    """Five layers of six see 100 positions."""
    return tiny_model(
        "gemma3", num_hidden_layers=12, sliding_window=100, sliding_window_pattern=6, max_position_embeddings=2048
    )


def keeping_all(model):
    plan = model.new_blocks(1).plan.without_windows()
    return dataclasses.replace(model, new_blocks=partial(KVPool, plan))


def most_at_once(model):
    """How many of the texts run at once, and their tokens."""
    lm = LanguageModel(model, ByteTokenizer(), prefix_memory=0)
    most = 0
    with CheckedEngine(lm, max_sequences=len(PROMPTS), cache_memory=MEMORY) as engine:

        def look():
            nonlocal most
            most = max(most, engine.stats().sequences)
            slots = engine.slots
            assert slots.stats().total * slots.unit_nbytes <= MEMORY
            check_accounts(slots)

        engine.between_steps(look)
        running = [engine.submit(prompt, max_new_tokens=60, temperature=0) for prompt in PROMPTS]
        tokens = [generation.result(120).token_ids for generation in running]
    return most, tokens


def test_texts_with_windows_only_reserve_their_windows():
    model = sliding_model()
    whole, window = model.new_blocks(1).block_nbytes, model.new_blocks(1).windows.block_nbytes
    assert window == 5 * whole
    blocks, in_window = -(-960 // BLOCK), -(-99 // BLOCK) + 2
    with_windows, tokens = most_at_once(model)
    without, expected = most_at_once(keeping_all(model))
    assert tokens == expected
    assert without == MEMORY // (blocks * (whole + window)) == 4
    assert with_windows == min(len(PROMPTS), MEMORY // (blocks * whole + in_window * window)) == 10


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_recurrent_states_are_accounted(family):
    model = tiny_model(family, num_hidden_layers=3)
    memory = model.new_blocks(1)
    block, state = memory.block_nbytes, memory.states.nbytes
    texts = 5
    slots = engine_slots(model, 32, texts * (3 * block + -(-state // block) * block))
    assert slots.stats().total // slots.cost(3 * BLOCK) == texts
    taken = [slots.acquire([number], 3 * BLOCK) for number in range(texts)]
    assert None not in taken
    assert slots.acquire([texts], 1) is None
    check_accounts(slots)


def test_without_a_limit_all_sequences_fit_at_full_length():
    for model in (sliding_model(), keeping_all(sliding_model()), tiny_model("qwen3_5")):
        slots = engine_slots(model, 7, None)
        taken = [slots.acquire([number], model.max_seq_len) for number in range(7)]
        assert None not in taken
        check_accounts(slots)
