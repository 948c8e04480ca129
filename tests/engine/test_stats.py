"""The numbers of an engine agree with each other and with the served requests."""

import threading

from checked_engine import CheckedEngine

from held_engine import held
from onward import LanguageModel
from onward.testing import ByteTokenizer, tiny_model

MODEL = tiny_model(seed=7)
LM = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
BLOCK_BYTES = MODEL.new_blocks(1).block_nbytes
SECONDS = 60


def test_counts_add_up_at_every_moment():
    seen = []
    with CheckedEngine(LM, max_sequences=4, cache_memory=9 * BLOCK_BYTES, overcommit=3.0) as engine:
        engine.between_steps(lambda: seen.append(engine.stats()))
        requests = [
            ("ab" * k, {"max_new_tokens": 70, "temperature": 1.0, "seed": k, "n": 1 + k % 3}) for k in range(1, 20)
        ]
        generations = [engine.submit(prompt, **options) for prompt, options in requests]
        tokens = sum(len(one.token_ids) for generation in generations for one in generation.result(SECONDS).choices)
    last = engine.stats()
    for stats in seen:
        assert stats.blocks == 9
        assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks
        assert min(stats.blocks_used, stats.blocks_cached, stats.blocks_free) >= 0
        assert stats.blocks_used > 0
        assert 1 <= stats.running <= stats.sequences <= 4
        assert 0 <= stats.hit_rate <= 1
        assert stats.waiting + stats.running <= len(requests)
        assert (stats.waiting_tokens > 0) == (stats.waiting > 0)
    assert [stats.steps for stats in seen] == list(range(len(seen)))
    assert [stats.tokens for stats in seen] == sorted(stats.tokens for stats in seen)
    assert last.steps == len(seen)
    assert last.tokens == tokens
    assert last.tokens_per_second > 0
    assert last.prompt_tokens_per_second > 0
    assert min(last.seconds.schedule, last.seconds.step, last.seconds.give_out) > 0


def test_hits_count_ids_of_prompts():
    prompt = "a prompt of a hundred characters " * 3 + "!"
    with CheckedEngine(LM) as engine:
        assert engine.stats().hit_rate == 0
        assert engine.submit(prompt, max_new_tokens=2).result(SECONDS).cached_tokens == 0
        assert engine.stats().hit_rate == 0
        again = engine.submit(prompt, max_new_tokens=2).result(SECONDS)
        assert again.cached_tokens == len(prompt) - 1 == 99
        other = engine.submit(prompt[:70] + "another", max_new_tokens=2).result(SECONDS)
        assert other.cached_tokens == 70
        assert engine.stats().hit_rate == (99 + 70) / (100 + 100 + 77)


def test_preemptions_are_counted_but_change_no_output():
    options = [{"max_new_tokens": 150, "temperature": 1.0, "seed": seed, "logprobs": 1} for seed in range(6)]
    alone = [LM.generate("abc", **each) for each in options]
    with CheckedEngine(LM, max_sequences=6, cache_memory=7 * BLOCK_BYTES, overcommit=100.0) as engine:
        with held(engine):
            generations = [engine.submit("abc", **each) for each in options]
        for generation, expected in zip(generations, alone, strict=True):
            completion = generation.result(SECONDS)
            assert completion.token_ids == expected.token_ids
            assert completion.logprobs == expected.logprobs
            assert [piece.token_id for piece in generation] == expected.token_ids
        assert engine.stats().preemptions > 0
    with CheckedEngine(LM, max_sequences=6, cache_memory=7 * BLOCK_BYTES) as engine:
        for generation in [engine.submit("abc", **each) for each in options]:
            generation.result(SECONDS)
        assert engine.stats().preemptions == 0


def test_preempted_samples_share_their_prompt_again():
    several = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3, "n": 3}
    prompt = "a prompt of more than one block, so that its texts hold one together " * 2
    alone = LM.generate(prompt, **several)
    growing = {"max_new_tokens": 190, "temperature": 1.0, "seed": 4}
    with CheckedEngine(LM, max_sequences=4, cache_memory=9 * BLOCK_BYTES, overcommit=100.0) as engine:
        started = threading.Event()
        first = engine.submit("abc", stop_when=lambda ids, text: started.set() if len(ids) == 5 else None, **growing)
        assert started.wait(SECONDS)
        generation = engine.submit(prompt, **several)
        choices = generation.result(SECONDS).choices
        assert [one.token_ids for one in choices] == [one.token_ids for one in alone.choices]
        assert first.result(SECONDS).token_ids == LM.generate("abc", **growing).token_ids


def test_a_growing_text_takes_no_blocks_reserved_for_others():
    """The texts of one prompt begin when it is computed; their blocks are reserved from the start."""
    several = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3, "n": 3}
    growing = {"max_new_tokens": 190, "temperature": 1.0, "seed": 4}
    alone = [LM.generate("a long prompt " * 9, **several), LM.generate("abc", **growing)]
    chunked = LanguageModel(MODEL, ByteTokenizer(), prefill_chunk=2, prefix_memory=0)
    with CheckedEngine(chunked, max_sequences=5, cache_memory=10 * BLOCK_BYTES, overcommit=100.0) as engine:
        started = threading.Event()
        first = [engine.submit("abc", stop_when=lambda ids, text: started.set(), **growing) for _ in range(2)]
        assert started.wait(SECONDS)
        generation = engine.submit("a long prompt " * 9, **several)
        choices = generation.result(SECONDS).choices
        assert [one.token_ids for one in choices] == [one.token_ids for one in alone[0].choices]
        assert [one.result(SECONDS).token_ids for one in first] == [alone[1].token_ids] * 2
