"""The one loop: chunked == whole, batched == alone, an ended row is final."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward.decoding import DecodeState, DecodeStep, Picker, Row, Token, decode_loop
from onward.sampling import History, Sampler, SamplingParams
from onward.testing import scripted_model, tiny_model

CPU = torch.device("cpu")


def run(model, prompts, rows, *, chunk=512, select=None, room=64):
    """Decode rows to their end; the emissions."""
    select = Sampler([SamplingParams()] * len(rows)) if select is None else select
    state = DecodeState.start(prompts, model.new_cache(len(prompts), room), CPU)
    return list(decode_loop(DecodeStep(model, select, chunk), state, rows))


def tokens_of(model, prompts, new, **options) -> list[list[int]]:
    rows = [Row(new) for _ in prompts]
    run(model, prompts, rows, **options)
    return [row.token_ids for row in rows]


# ── prefill ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("selects_logits", [False, True])
def test_a_prompt_is_processed_in_chunks_in_order(selects_logits):
    model = scripted_model([1], selects_logits=selects_logits)
    run(model, [list(range(10))], [Row(1)], chunk=4)
    assert [(call.tokens, call.offsets) for call in model.calls] == [
        ([[0, 1, 2, 3]], [0]),
        ([[4, 5, 6, 7]], [4]),
        ([[8, 9]], [8]),
    ]


def test_logits_are_asked_for_only_where_a_row_ends():
    model = scripted_model([1], selects_logits=True)
    run(model, [list(range(10)), list(range(6))], [Row(1), Row(1)], chunk=4)
    first, second, third = (call.logits_at for call in model.calls)
    assert first == [[], []]
    assert second[1] == [1]  # the short row's last token, 5 = 4 + 1; the long row's entry is nobody's
    assert third[0] == [1]  # 9 = 8 + 1


prompts = st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=12), min_size=1, max_size=4)


@given(prompts, st.integers(1, 13), st.booleans())
def test_what_a_row_says_depends_on_its_own_tokens_alone(prompts, chunk, selects_logits):
    """A script that mixes all of a row's tokens and their order finds out any that is lost, moved or another row's."""

    def follow(tokens):
        return sum((at + 1) * (token + 7) for at, token in enumerate(tokens)) % 31

    def by_hand(prompt, new):
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(follow(tokens))
        return tokens[len(prompt) :]

    model = scripted_model(follow, selects_logits=selects_logits)
    assert tokens_of(model, prompts, 5, chunk=chunk) == [by_hand(prompt, 5) for prompt in prompts]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [7, 1, 8, 2, 8], [31, 30]]
SAMPLED = [
    SamplingParams(temperature=t, seed=s, top_p=p) for t, s, p in [(1, 1, 1), (0.5, 2, 1), (1, 3, 0.9), (0, 4, 1)]
]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 11])
def test_chunked_is_whole_and_batched_is_alone_on_a_real_model(family, chunk):
    model = tiny_model(family, sliding_window=4)
    whole = tokens_of(model, PROMPTS, 30, select=Sampler(SAMPLED))
    assert tokens_of(model, PROMPTS, 30, select=Sampler(SAMPLED), chunk=chunk) == whole
    for prompt, params, want in zip(PROMPTS, SAMPLED, whole, strict=True):
        assert tokens_of(model, [prompt], 30, select=Sampler([params]), chunk=chunk) == [want]


# ── the end of a row ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize(("length", "chunk", "prefills"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 4, 3)])
def test_no_forward_is_run_whose_token_nobody_takes(new, length, chunk, prefills):
    model = scripted_model([1])
    run(model, [[0] * length], [Row(new)], chunk=chunk)
    assert len(model.calls) == prefills + new - 1


def test_rows_that_want_nothing_run_nothing():
    model = scripted_model([1])
    row = Row(0)
    assert run(model, [[0]], [row]) == []
    assert row.finish_reason == "length"
    assert model.calls == []


def counting_down(prompts, rows, **options):
    """Each row counts down from its prompt; 0 is the eos id. Returns the model and the emissions."""
    model = scripted_model(lambda tokens: max(tokens[-1] - 1, 0))
    return model, run(model, prompts, rows, **options)


def test_rows_end_one_by_one_and_an_ended_row_is_final():
    rows = [Row(50, {0}) for _ in range(3)]
    model, emissions = counting_down([[3], [9, 6], [1]], rows)
    assert [row.token_ids for row in rows] == [[2, 1, 0], [5, 4, 3, 2, 1, 0], [0]]
    assert [row.finish_reason for row in rows] == ["stop"] * 3
    assert [[index for index, _, _ in emission.pieces] for emission in emissions] == [
        [0, 1, 2],
        [0, 1],
        [0, 1],
        [1],
        [1],
        [1],
    ]
    assert len(model.calls) == 6, "the loop ends with the longest row"


def test_the_offset_of_an_ended_row_stands_still():
    _, emissions = counting_down([[3], [9, 6], [1]], [Row(50, {0}) for _ in range(3)])
    assert [list(emission.state.offsets) for emission in emissions] == [
        [1, 2, 1],
        [2, 3, 1],
        [3, 4, 1],
        [3, 5, 1],
        [3, 6, 1],
        [3, 7, 1],
    ]


def test_what_an_ended_row_holds_is_not_disturbed():
    model = scripted_model(lambda tokens: max(tokens[-1] - 1, 0))
    cache = model.new_cache(2, 64)
    state = DecodeState.start([[3], [9]], cache, CPU)
    rows = [Row(50, {0}), Row(50, {0})]
    list(decode_loop(DecodeStep(model, Sampler([SamplingParams()] * 2)), state, rows))
    assert cache.tokens[0, :3].tolist() == [3, 2, 1]


def test_rows_of_a_batch_have_limits_of_their_own():
    rows = [Row(0), Row(4), Row(1), Row(2, {7})]
    model, _ = counting_down([[9], [9], [9], [8]], rows)
    assert [row.token_ids for row in rows] == [[], [8, 7, 6, 5], [8], [7]]
    assert [row.finish_reason for row in rows] == ["length", "length", "length", "stop"]
    assert len(model.calls) == 4


def test_an_eos_id_at_the_last_token_is_a_stop_and_no_length():
    row = Row(2, {0})
    counting_down([[2]], [row])
    assert (row.token_ids, row.finish_reason) == ([1, 0], "stop")


def test_a_row_that_ends_in_the_middle_of_a_step_drops_the_rest():
    """A step may emit several tokens a row, as a verified draft does."""

    def step(state):
        return state, [[Token(5), Token(6), Token(7)], [Token(8), Token(9)], []]

    rows = [Row(10, {6}), Row(3), Row(0)]
    state = DecodeState.start([[1], [1], [1]], None, CPU)
    pieces = [emission.pieces for emission in decode_loop(step, state, rows)]
    assert [row.token_ids for row in rows] == [[5, 6], [8, 9, 8], []]
    assert pieces == [[(0, 5, ""), (0, 6, ""), (1, 8, ""), (1, 9, "")], [(1, 8, "")]]


def test_a_step_takes_time_and_its_consumer_takes_none_of_it():
    model = scripted_model([1])
    assert all(0 < emission.seconds < 1 for emission in run(model, [[0]], [Row(3)]))


def test_what_bans_leave_an_ended_row_concerns_nobody():
    """Its last id was the last that it might say; the row stays in the batch, for this cache cannot be narrowed."""
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 4, vocab_size=4)
    rows = [Row(2), Row(6)]
    select = Sampler([SamplingParams(no_repeat_ngram_size=1), SamplingParams()])
    prompts = [[0, 1], [2]]
    picker = Picker(select, [History(prompt) for prompt in prompts])
    run(model, prompts, rows, select=picker)
    assert [row.token_ids for row in rows] == [[2, 3], [3, 0, 1, 2, 3, 0]]
