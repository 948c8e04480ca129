"""Every family computes the same as `transformers`, however its tokens are divided into calls."""

from dataclasses import dataclass

import pytest
import torch
from transformers_reference import CASES, NEW_TOKENS, PROMPT_LENGTHS, TOLERANCE, Case, Expected, build, expect, save

import onward
from held_engine import held
from onward.cache import PagedCacheManager
from onward.ops.heads import BLOCK
from onward.testing import poison


@dataclass(frozen=True)
class Judged:
    """A checkpoint as Onward loads it, and what transformers makes of the same."""

    lm: onward.LanguageModel
    expected: list[Expected]

    @property
    def prompts(self) -> list[list[int]]:
        return [one.prompt for one in self.expected]

    def greedy(self, prompt, **options) -> list[int] | list[list[int]]:
        completions = self.lm.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, **options)
        return [one.token_ids for one in completions] if isinstance(completions, list) else completions.token_ids


@pytest.fixture(scope="module", params=CASES)
def judged(request, tmp_path_factory) -> Judged:
    case: Case = CASES[request.param]
    model = build(case)
    folder = save(model, tmp_path_factory.mktemp("checkpoint"))
    lm = onward.load(folder, max_seq_len=128)
    alone = Judged(lm, []).greedy
    return Judged(lm, [expect(model, case, length, guess=alone) for length in PROMPT_LENGTHS])


@pytest.fixture(params=[512, 1, 3, 7], ids=lambda chunk: f"chunk {chunk}")
def chunked(request, judged, monkeypatch) -> Judged:
    monkeypatch.setattr(judged.lm, "prefill_chunk", request.param)
    return judged


@pytest.mark.strength(1)
def test_prefill_logits_equal_transformers(chunked):
    for expected in chunked.expected:
        assert 0.3 < expected.logits.std() < 3, "the tolerance is meant for logits of order 1"
        torch.testing.assert_close(chunked.lm.logits(expected.prompt), expected.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.strength(1)
def test_greedy_tokens_equal_transformers_alone(chunked):
    for expected in chunked.expected:
        assert chunked.greedy(expected.prompt) == expected.greedy


@pytest.mark.strength(1)
def test_greedy_tokens_equal_transformers_in_a_ragged_batch(chunked):
    assert chunked.greedy(chunked.prompts) == [expected.greedy for expected in chunked.expected]


@pytest.mark.stride(4)
def test_greedy_tokens_equal_transformers_when_drafted(judged):
    texts = [expected.greedy for expected in judged.expected]
    assert judged.greedy(judged.prompts, draft="lookup") == texts


@pytest.mark.stride(4)
def test_greedy_tokens_equal_transformers_from_a_saved_session(judged, tmp_path):
    for expected in judged.expected:
        session = onward.Session(judged.lm)
        options = {"temperature": 0, "ignore_eos": True}
        first = session.generate(expected.prompt, max_new_tokens=30, **options).token_ids
        session.save(tmp_path / "text.safetensors")
        later = onward.Session.load(tmp_path / "text.safetensors", judged.lm)
        rest = later.generate(expected.prompt + first, max_new_tokens=NEW_TOKENS - 30, **options)
        assert rest.cached_tokens >= len(expected.prompt) + 29
        assert first + rest.token_ids == expected.greedy


@pytest.mark.stride(4)
def test_greedy_tokens_equal_transformers_after_preemption(judged):
    """Three texts begin in a block each, and there are four blocks for the two that each needs in the end."""
    one = PagedCacheManager(judged.lm.model.new_blocks(1), max_len=256, cached_blocks=0)
    begun, another = one.cost(BLOCK), one.cost(2 * BLOCK) - one.cost(BLOCK)
    memory = (3 * begun + another) * one.unit_nbytes
    with onward.Engine(judged.lm, cache_memory=memory, overcommit=100.0) as engine:
        options = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        with held(engine):
            running = [engine.submit(expected.prompt, **options) for expected in judged.expected]
        texts = [one.result().token_ids for one in running]
        assert engine.stats().preemptions
    assert texts == [expected.greedy for expected in judged.expected]


@pytest.mark.stride(4)
def test_entries_past_an_offset_are_never_read(judged):
    cache = poison(judged.lm.new_cache(len(judged.prompts)))
    assert judged.greedy(judged.prompts, cache=cache) == [expected.greedy for expected in judged.expected]
