"""Prompts processed ahead of the loop leave what the loop would have left, one token short."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import LanguageModel
from onward.cache import KVCache
from onward.decoding import DecodeState, DecodeStep, PromptLogprobs, Row, decode_loop, prefilled, spread
from onward.sampling import Sampler, SamplingParams
from onward.testing import poison, scripted_model, tiny_model

CPU = torch.device("cpu")
prompts = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=9), min_size=1, max_size=4)


def follow(tokens: list[int]) -> int:
    """Finds out any token that is lost, moved or another row's."""
    return sum((at + 1) * (token + 7) for at, token in enumerate(tokens)) % 31


def decoded(model, state, count) -> list[list[int]]:
    rows = [Row(5) for _ in range(count)]
    list(decode_loop(DecodeStep(model, Sampler([SamplingParams()] * count)), state, rows))
    return [row.token_ids for row in rows]


@given(prompts, st.integers(1, 9), st.booleans())
def test_the_loop_goes_on_from_a_prefilled_state_as_from_a_fresh_one(prompts, chunk, selects_logits):
    model = scripted_model(follow, selects_logits=selects_logits)
    fresh = DecodeState.start(prompts, model.new_cache(len(prompts), 16), CPU)
    state = prefilled(model, DecodeState.start(prompts, model.new_cache(len(prompts), 16), CPU), chunk)
    assert state.pending == tuple((prompt[-1],) for prompt in prompts)
    assert state.offsets == tuple(len(prompt) - 1 for prompt in prompts)
    assert decoded(model, state, len(prompts)) == decoded(model, fresh, len(prompts))


def test_a_prefill_runs_no_head_and_no_more_than_it_must():
    model = scripted_model([1], selects_logits=True)
    prefilled(model, DecodeState.start([[1, 2, 3, 4, 5, 6], [7]], model.new_cache(2, 8), CPU), 3)
    assert [call.tokens for call in model.calls] == [[[1, 2, 3], [7, 7, 7]], [[4, 5], [7, 7]]]
    assert [call.logits_at for call in model.calls] == [[[], []]] * 2
    model.calls.clear()
    prefilled(model, DecodeState.start([[1], [7]], model.new_cache(2, 8), CPU), 3)
    assert model.calls == []


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_copies_stand_beside_their_original_and_hold_its_past(copies):
    model = tiny_model()
    texts = [[1, 2, 3, 4], [9], [5, 6]]
    cache = poison(model.new_cache(3 * copies, 16))
    state = prefilled(model, DecodeState.start(texts, cache.first_rows(3), CPU), 512)
    before = [layer[row].clone() for layer in cache.keys for row in range(3)]
    state = spread(state, cache, copies)
    assert state.owners == tuple(range(3 * copies))
    assert state.pending == tuple(text[-1:] for text in map(tuple, texts) for _ in range(copies))
    assert isinstance(state.cache, KVCache)
    for at, layer in enumerate(cache.keys):
        for row, text in enumerate(texts):
            for copy in range(row * copies, (row + 1) * copies):
                assert torch.equal(layer[copy, :, : len(text) - 1], before[3 * at + row][:, : len(text) - 1])


@given(prompts, st.integers(1, 9))
def test_prompt_logprobs_are_of_each_id_given_those_before_it(prompts, chunk):
    def logits(tokens):
        return torch.arange(32.0) * (follow(tokens) % 5) / 8

    model = scripted_model(logits)
    told = PromptLogprobs(prompts, top=2)
    prefilled(model, DecodeState.start(prompts, model.new_cache(len(prompts), 16), CPU), chunk, told)
    for prompt, found in zip(prompts, told.logprobs, strict=True):
        assert found[0] is None
        for at in range(1, len(prompt)):
            want = logits(prompt[:at]).log_softmax(-1)
            # Two float32 evaluations of numbers below 16: each rounded to 2^-21 a few times.
            assert found[at].chosen == pytest.approx(want[prompt[at]].item(), abs=4 * 2**-21, rel=0)
            assert [value for _, value in found[at].top] == pytest.approx(want.topk(2).values.tolist(), abs=4 * 2**-21)


def test_ended_rows_need_no_prefill():
    model = tiny_model()
    calls = []
    object.__setattr__(model, "forward", lambda *arguments, **options: calls.append(arguments))
    found = LanguageModel(model, compile="eager").generate([1, 2, 3], n=2, temperature=1.0, max_new_tokens=0)
    assert [one.token_ids for one in found.choices] == [[], []]
    assert calls == []
