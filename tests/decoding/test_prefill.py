"""Prompts processed in advance, shared or in chunks leave the state of a fresh start, except the last id."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.decoding.plain_forward import without_logits_at

from onward import LanguageModel
from onward.decoding import (
    BatchSchedule,
    DecodeStep,
    RowCacheManager,
    SamplerCache,
    ScheduledSequence,
    Sequence,
    decode_loop,
    slots_for,
)
from onward.models import Run
from onward.sampling import SamplingParams
from onward.testing import poison, scripted_model, tiny_model

CPU = torch.device("cpu")
prompts = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=9), min_size=1, max_size=4)


def follow(tokens: list[int]) -> int:
    """Finds out any token that is lost, moved or another row's."""
    return sum((at + 1) * (token + 7) for at, token in enumerate(tokens)) % 31


def sequences_of(prompts, new=5, **options) -> list[Sequence]:
    return [Sequence(prompt, new, sampling=SamplingParams(), **options) for prompt in prompts]


def step_over(model, slots) -> DecodeStep:
    return DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)


def run(model, slots, sequences, chunk=512, **options) -> list[list[int]]:
    list(decode_loop(step_over(model, slots), BatchSchedule(slots, sequences, chunk, **options), slots))
    return [sequence.token_ids for sequence in sequences]


@given(prompts, st.integers(1, 9), st.booleans())
def test_prefilled_prompts_continue_like_fresh_ones(prompts, chunk, plain):
    model = scripted_model(follow)
    model = without_logits_at(model) if plain else model
    fresh, ahead = sequences_of(prompts), sequences_of(prompts)
    slots = slots_for(model, len(prompts), 16)
    step = step_over(model, slots)
    for sequence in ahead:
        sequence.slot, reused = slots.acquire(sequence.prompt, sequence.longest)
        assert reused == 0
    while work := [ScheduledSequence(text, min(text.pending - 1, chunk)) for text in ahead if text.pending > 1]:
        for (text, count), tokens in zip(work, step(work), strict=True):
            assert tokens == []
            text.take_step(count, tokens, slots)
    assert [text.ids(text.computed, text.length) for text in ahead] == [prompt[-1:] for prompt in prompts]
    assert [text.computed for text in ahead] == [len(prompt) - 1 for prompt in prompts]
    expected = run(model, slots_for(model, len(prompts), 16), fresh)
    list(decode_loop(step, lambda: [ScheduledSequence(text, 1) for text in ahead if text.pending], slots))
    assert [text.token_ids for text in ahead] == expected


def test_a_shared_prompt_is_processed_once_without_a_head():
    model = scripted_model([1])
    first, second = sequences_of([[1, 2, 3, 4, 5, 6]] * 2, 1)
    second.leader = first
    run(model, slots_for(model, 2, 8), [first, second], 3)
    assert [call.tokens for call in model.calls] == [[[1, 2, 3]], [[4, 5]], [[6], [6]]]
    assert [call.logits_at for call in model.calls] == [[[]], [[]], None]
    model.calls.clear()
    first, second = sequences_of([[7]] * 2, 1)
    second.leader = first
    run(model, slots_for(model, 2, 8), [first, second], 3)
    assert [call.tokens for call in model.calls] == [[[7], [7]]]


def led(sequences):
    for sequence in sequences[1:]:
        sequence.leader = sequences[0]
    return sequences


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_siblings_share_the_past_of_their_leader(copies):
    model = tiny_model()
    texts = [[1, 2, 3, 4], [9], [5, 6]]
    cache = poison(model.new_cache(3 * copies, 16))
    slots = RowCacheManager.wrap(model, cache, 3 * copies)
    groups = [led(sequences_of([text] * copies)) for text in texts]
    sequences = [sequence for group in groups for sequence in group]
    rows = {}
    for _ in decode_loop(step_over(model, slots), BatchSchedule(slots, sequences), slots):
        rows.update((sequence, sequence.slot.row) for sequence in sequences if sequence.slot is not None)
    assert sorted(rows.values()) == list(range(3 * copies))
    assert len({tuple(sequence.token_ids) for sequence in sequences}) == 3
    for layer in cache.keys:
        for text, group in zip(texts, groups, strict=True):
            first, *others = (layer[rows[sequence], :, : len(text) - 1] for sequence in group)
            assert not first.isnan().any()
            assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("chunk", [2, 512])
def test_siblings_equal_separate_prompts(rows, chunk):
    """Also with fewer slots than texts, so that some texts wait for others to end."""
    model = scripted_model(follow)
    texts = [[1, 2, 3, 4], [9], [5, 6]]
    groups = [led(sequences_of([text] * 3)) for text in texts]
    sequences = [sequence for group in groups for sequence in group]
    alone = [run(model, slots_for(model, 1, 16), [sequence])[0] for sequence in sequences_of(texts)]
    found = run(model, RowCacheManager.allocate(model, rows, 16), sequences, chunk)
    assert found == [ids for ids in alone for _ in range(3)]


@given(prompts, st.integers(1, 9))
def test_prompt_logprobs_are_conditioned_on_the_ids_before(prompts, chunk):
    def logits(tokens):
        return torch.arange(32.0) * (follow(tokens) % 5) / 8

    model = scripted_model(logits)
    sequences = sequences_of(prompts, 0, prompt_top=2)
    run(model, slots_for(model, len(prompts), 16), sequences, chunk)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        reports = sequence.prompt_logprobs
        assert len(reports) == len(prompt)
        assert reports[0] is None
        for at in range(1, len(prompt)):
            want = logits(prompt[:at]).log_softmax(-1)
            # Two float32 evaluations of numbers below 16: each rounded to 2^-21 a few times.
            assert reports[at].chosen == pytest.approx(want[prompt[at]].item(), abs=4 * 2**-21, rel=0)
            assert [value for _, value in reports[at].top] == pytest.approx(
                want.topk(2).values.tolist(), abs=4 * 2**-21
            )


@given(prompts, st.integers(1, 9), st.booleans())
def test_prompt_logprobs_change_no_token_and_no_other_logprob(prompts, chunk, opaque):
    model, rows = scripted_model(follow), len(prompts)
    plain = run(model, slots_for(model, rows, 16), sequences_of(prompts))
    sequences = sequences_of(prompts)
    for sequence in sequences[::2]:
        sequence.prompt_top = 1
    slots = RowCacheManager(model.new_cache(rows, 24), rows, None, None) if opaque else slots_for(model, rows, 16)
    assert run(model, slots, sequences, chunk) == plain
    for index, sequence in enumerate(sequences):
        assert len(sequence.prompt_logprobs) == (1 if index % 2 else len(sequence.prompt))


def test_texts_of_zero_tokens_need_no_prefill():
    model = tiny_model()
    calls = []
    object.__setattr__(model, "forward", lambda *arguments, **options: calls.append(arguments))
    found = LanguageModel(model, compile="eager").generate([1, 2, 3], n=2, temperature=1.0, max_new_tokens=0)
    assert [one.token_ids for one in found.choices] == [[], []]
    assert calls == []
