"""The one loop: chunked == whole, batched == alone, an ended sequence stays ended."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.decoding.plain_forward import without_logits_at

from onward.decoding import BatchSchedule, DecodeStep, RowCacheManager, SamplerCache, Sequence, decode_loop, slots_for
from onward.models import Run
from onward.sampling import SamplingParams, Token
from onward.testing import scripted_model, tiny_model

CPU = torch.device("cpu")
GREEDY = SamplingParams()


def greedy(prompts, new, eos=()) -> list[Sequence]:
    return [Sequence(prompt, new, frozenset(eos), sampling=GREEDY) for prompt in prompts]


def run(model, sequences, *, chunk=512, slots=None, room=64):
    """Decode sequences to their end; the new tokens of each, for every step."""
    slots = slots_for(model, len(sequences), room) if slots is None else slots
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    loop = decode_loop(step, BatchSchedule(slots, sequences, chunk), slots)
    return [[sequence.deliver() for sequence in sequences] for _ in loop]


def tokens_of(model, prompts, new, sampling=None, **options) -> list[list[int]]:
    sampling = [GREEDY] * len(prompts) if sampling is None else sampling
    sequences = [Sequence(prompt, new, sampling=params) for prompt, params in zip(prompts, sampling, strict=True)]
    run(model, sequences, **options)
    return [sequence.token_ids for sequence in sequences]


# ── prefill ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("plain", [False, True])
def test_a_prompt_is_processed_in_chunks_in_order(plain):
    model = scripted_model([1])
    model = without_logits_at(model) if plain else model
    run(model, greedy([list(range(10))], 1), chunk=4)
    assert [(call.tokens, call.offsets) for call in model.calls] == [
        ([[0, 1, 2, 3]], [0]),
        ([[4, 5, 6, 7]], [4]),
        ([[8, 9]], [8]),
    ]


def test_logits_are_requested_only_at_the_end_of_a_prompt():
    model = scripted_model([1])
    run(model, greedy([list(range(10)), list(range(6))], 1), chunk=4)
    assert [(call.tokens, call.offsets, call.logits_at) for call in model.calls] == [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], [0, 0], [[], []]),
        ([[4, 5, 6, 7]], [4], [[]]),
        ([[4, 5]], [4], [[1]]),  # the short prompt's last id, 5 = 4 + 1
        ([[8, 9]], [8], [[1]]),  # 9 = 8 + 1
    ]


def test_rows_that_cannot_be_split_are_padded_and_padding_is_never_read():
    """A forward gets all rows of such a cache; the entries of the others are unused."""
    model = scripted_model(follow_all)
    prompts = [list(range(10)), list(range(6))]
    sequences = greedy(prompts, 3)
    run(model, sequences, chunk=4, slots=opaque_slots(model, 2))
    first, second, third = model.calls[:3]
    assert first.logits_at == [[], []]
    assert (len(second.tokens), second.logits_at[1]) == (2, [1])  # the short prompt's last id, 5 = 4 + 1
    assert (len(third.tokens), third.logits_at[0]) == (2, [1])  # 9 = 8 + 1
    assert [sequence.token_ids for sequence in sequences] == [by_hand(prompt, 3) for prompt in prompts]


def opaque_slots(model, rows, room=64) -> RowCacheManager:
    """Slots over a cache that does not show which dimension its rows are in."""
    return RowCacheManager(model.new_cache(rows, room), rows, None, None)


def follow_all(tokens):
    """A script that mixes all of a row's tokens and their order finds out any that is lost, moved or another row's."""
    return sum((at + 1) * (token + 7) for at, token in enumerate(tokens)) % 31


def by_hand(prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(follow_all(tokens))
    return tokens[len(prompt) :]


prompts = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=12), min_size=1, max_size=4)


@given(prompts, st.integers(1, 13), st.booleans(), st.sampled_from(["own", "given", "opaque"]))
def test_a_row_depends_only_on_its_own_tokens(prompts, chunk, plain, kind):
    model, rows = scripted_model(follow_all), len(prompts)
    model = without_logits_at(model) if plain else model
    slots = {
        "own": lambda: slots_for(model, rows, 17),
        "given": lambda: RowCacheManager.wrap(model, model.new_cache(rows, 24), rows),
        "opaque": lambda: opaque_slots(model, rows, 24),  # a padded chunk may need up to 24 of them
    }[kind]()
    assert tokens_of(model, prompts, 5, chunk=chunk, slots=slots) == [by_hand(prompt, 5) for prompt in prompts]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 2, 8], [31, 30]]
SAMPLED = [
    SamplingParams(temperature=t, seed=s, top_p=p) for t, s, p in [(1, 1, 1), (0.5, 2, 1), (1, 3, 0.9), (0, 4, 1)]
]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 11])
def test_chunked_equals_whole_and_batched_equals_alone_on_a_real_model(family, chunk):
    model = tiny_model(family, sliding_window=4)
    whole = tokens_of(model, PROMPTS, 30, sampling=SAMPLED)
    assert tokens_of(model, PROMPTS, 30, sampling=SAMPLED, chunk=chunk) == whole
    for prompt, params, want in zip(PROMPTS, SAMPLED, whole, strict=True):
        assert tokens_of(model, [prompt], 30, sampling=[params], chunk=chunk) == [want]


# ── the end of a sequence ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize(("length", "chunk", "prefills"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 4, 3)])
def test_no_forward_is_run_for_an_unused_token(new, length, chunk, prefills):
    model = scripted_model([1])
    run(model, greedy([[0] * length], new), chunk=chunk)
    assert len(model.calls) == prefills + new - 1


def test_sequences_of_zero_tokens_run_nothing():
    model = scripted_model([1])
    sequences = greedy([[0]], 0)
    assert run(model, sequences) == []
    assert sequences[0].finish_reason == "length"
    assert model.calls == []


def counting_down(sequences, **options):
    """Each counts down from its prompt; 0 is the eos id. Returns the model and the new tokens of each step."""
    model = scripted_model(lambda tokens: max(tokens[-1] - 1, 0))
    return model, run(model, sequences, **options)


def test_sequences_end_one_by_one_and_are_then_final():
    sequences = greedy([[3], [9, 6], [1]], 50, {0})
    first, second, third = sequences
    model, emissions = counting_down(sequences)
    assert [sequence.token_ids for sequence in sequences] == [[2, 1, 0], [5, 4, 3, 2, 1, 0], [0]]
    assert [sequence.finish_reason for sequence in sequences] == ["stop"] * 3
    assert [[sequence for sequence, new in zip(sequences, emission, strict=True) if new] for emission in emissions] == [
        [first, second, third],
        [first, second],
        [first, second],
        [second],
        [second],
        [second],
    ]
    # The prompt of two ids is a forward of its own.
    assert len(model.calls) == 1 + 6, "the loop ends with the longest text"
    assert [len(call.tokens) for call in model.calls[2:]] == [2, 2, 1, 1, 1], "those that have ended cost nothing"


def test_the_offset_of_an_ended_sequence_is_constant():
    sequences = greedy([[3], [9, 6], [1]], 50, {0})
    model = scripted_model(lambda tokens: max(tokens[-1] - 1, 0))
    slots = slots_for(model, 3, 64)
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    computed = [
        [sequence.computed for sequence in sequences] for _ in decode_loop(step, BatchSchedule(slots, sequences), slots)
    ]
    assert computed == [
        [1, 2, 1],
        [2, 3, 1],
        [3, 4, 1],
        [3, 5, 1],
        [3, 6, 1],
        [3, 7, 1],
    ]


@pytest.mark.parametrize("kind", ["given", "opaque"])
def test_rows_of_ended_sequences_in_the_callers_cache_are_not_overwritten(kind):
    """Rows keep their places in it. The first and the last go on, over the one between them that has ended."""
    model = scripted_model(lambda tokens: max(tokens[-1] - 1, 0))
    cache = model.new_cache(3, 64)
    slots = RowCacheManager.wrap(model, cache, 3) if kind == "given" else RowCacheManager(cache, 3, None, None)
    run(model, greedy([[9], [3], [8]], 50, {0}), slots=slots)
    assert cache.tokens[1, :3].tolist() == [3, 2, 1]
    assert cache.tokens[0, :9].tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert cache.tokens[2, :8].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


def test_each_sequence_of_a_batch_has_its_own_limits():
    limits = [([9], 0, set()), ([9], 4, set()), ([9], 1, set()), ([8], 2, {7})]
    sequences = [Sequence(prompt, new, frozenset(eos), sampling=GREEDY) for prompt, new, eos in limits]
    model, _ = counting_down(sequences)
    assert [sequence.token_ids for sequence in sequences] == [[], [8, 7, 6, 5], [8], [7]]
    assert [sequence.finish_reason for sequence in sequences] == ["length", "length", "length", "stop"]
    assert len(model.calls) == 4


def test_eos_at_the_last_token_finishes_with_stop():
    sequences = greedy([[2]], 2, {0})
    counting_down(sequences)
    assert (sequences[0].token_ids, sequences[0].finish_reason) == ([1, 0], "stop")


def test_a_sequence_that_ends_within_a_step_drops_the_rest():
    """A step may emit several tokens a sequence, as a verified draft does. The cache drops the rest, too."""
    limits = [(10, {6}), (3, set()), (0, set())]
    first, second, third = sequences = [Sequence([1], new, frozenset(eos)) for new, eos in limits]
    tokens = {first: [Token(5), Token(6), Token(7)], second: [Token(8), Token(9)], third: []}

    def step(work):
        return [tokens[sequence] for sequence, _ in work]

    slots = RowCacheManager(None, 3, None, None)
    loop = decode_loop(step, BatchSchedule(slots, sequences), slots)
    emissions = [[(sequence, new) for sequence in sequences for new in sequence.deliver()] for _ in loop]
    assert [sequence.token_ids for sequence in sequences] == [[5, 6], [8, 9, 8], []]
    assert [
        [(sequence, token, drafted) for sequence, (_, token, _, drafted) in emission] for emission in emissions
    ] == [
        [(first, 5, True), (first, 6, True), (second, 8, True), (second, 9, False)],
        [(second, 8, True)],
    ]
    assert [sequence.computed for sequence in sequences] == [2, 3, 0], "all but the last id of a text"


def test_step_times_exclude_the_consumer():
    model = scripted_model([1])
    slots = slots_for(model, 1, 64)
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    began = time.perf_counter()
    for seconds in decode_loop(step, BatchSchedule(slots, greedy([[0]], 3)), slots):
        assert 0 < seconds < time.perf_counter() - began
        time.sleep(0.02)
        began = time.perf_counter()


@pytest.mark.parametrize("opaque", [False, True])
def test_bans_that_leave_an_ended_sequence_no_id_are_ignored(opaque):
    """Its last id was the last that it might say. Its row stays in the batch where the cache cannot be narrowed."""
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 4, vocab_size=4)
    banned = SamplingParams(no_repeat_ngram_size=1)
    sequences = [Sequence([0, 1], 2, sampling=banned), Sequence([2], 6, sampling=GREEDY)]
    run(model, sequences, slots=opaque_slots(model, 2) if opaque else None)
    assert [sequence.token_ids for sequence in sequences] == [[2, 3], [3, 0, 1, 2, 3, 0]]


# ── texts that do not begin at position 0 ─────────────────────────────────────────────────────────────────────


@given(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=6))
def test_ids_keep_their_positions_wherever_a_text_starts(start, prompt, new):
    sequence = Sequence(prompt, 10, start=start)
    sequence.token_ids += new
    at = dict(enumerate([*prompt, *new], start))
    for first in range(start, sequence.length + 1):
        for last in range(first, sequence.length + 1):
            assert sequence.ids(first, last) == [at[position] for position in range(first, last)]
    for first in range(start):  # the ids before the start are the cache's
        with pytest.raises(AssertionError):
            sequence.ids(first, sequence.length)
    sequence.computed = sequence.length - 1
    assert sequence.computed_ids() == ([] if start else [*prompt, *new][:-1])


@pytest.mark.parametrize("start", [0, 3])
def test_a_slot_is_released_with_the_ids_of_its_first_positions(start, monkeypatch):
    model = scripted_model([1])
    cache = model.new_cache(1, 64)
    cache.tokens[0, :start] = 5
    slots = RowCacheManager.wrap(model, cache, 1, [start])
    released = []
    monkeypatch.setattr(slots, "release", lambda slot, ids=(): released.append(ids))
    run(model, [Sequence([7, 8, 9], 2, sampling=GREEDY, start=start)], slots=slots)
    assert released == [[] if start else [7, 8, 9, 1]]
