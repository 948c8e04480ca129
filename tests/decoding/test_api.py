"""`stream` and `decode`: the loop for your own forward."""

import itertools
import math
from functools import partial

import pytest
import torch

import onward
from onward.errors import ContextOverflowError, OnwardError, RequestError
from onward.sampling import Sampler, SamplingParams, sample
from onward.testing import poison, scripted_model, tiny_model

COUNT_UP = partial(scripted_model, lambda tokens: (tokens[-1] + 1) % 32)


def decode(model, first_token=0, room=64, **options):
    """`onward.decode` over a scripted or a real model, with a new cache where none is given."""
    options = {"cache": model.new_cache(1, room), "max_new_tokens": 5} | options
    return onward.decode(model.forward, params=model.params, first_token=first_token, **options)


def test_the_first_token_is_not_in_the_result():
    assert decode(COUNT_UP(), first_token=7) == [8, 9, 10, 11, 12]


def test_each_id_costs_one_forward_and_the_last_is_not_fed_back():
    model = COUNT_UP()
    decode(model, first_token=7)
    assert [call.tokens for call in model.calls] == [[[7]], [[8]], [[9]], [[10]], [[11]]]
    assert [call.offsets for call in model.calls] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("max_new_tokens", [0, -1, -100])
def test_zero_tokens_run_nothing(max_new_tokens):
    model, seen = COUNT_UP(), []
    assert decode(model, max_new_tokens=max_new_tokens, on_token=seen.append) == []
    assert model.calls == []
    assert seen == []


@pytest.mark.parametrize("eos", [9, [9], (30, 9), frozenset({9, 30}), range(9, 11)])
def test_an_eos_id_ends_the_result_and_is_part_of_it(eos):
    model, seen = COUNT_UP(), []
    assert decode(model, first_token=6, max_new_tokens=20, eos=eos, on_token=seen.append) == [7, 8, 9]
    assert seen == [7, 8, 9], "on_token hears of the stopping id too"
    assert len(model.calls) == 3


def test_the_first_id_may_be_eos():
    model = COUNT_UP()
    assert decode(model, first_token=6, max_new_tokens=20, eos=7) == [7]
    assert len(model.calls) == 1


def test_a_first_token_that_is_an_eos_id_ends_nothing():
    assert decode(COUNT_UP(), first_token=7, max_new_tokens=2, eos=7) == [8, 9]


def test_ids_are_streamed_as_they_are_generated():
    model, seen = COUNT_UP(), []
    ids = onward.stream(
        model.forward,
        cache=model.new_cache(1, 100),
        params=model.params,
        first_token=0,
        max_new_tokens=100,
        on_token=seen.append,
    )
    assert model.calls == [], "no step is run before an id is asked for"
    for asked in range(1, 4):
        assert next(ids) == asked
        assert len(model.calls) == asked
        assert seen == list(range(1, asked + 1)), "on_token is called before the id is given out"
    ids.close()
    assert len(model.calls) == 3


def test_stream_equals_decode():
    model = tiny_model(seed=1)
    options = {"params": model.params, "first_token": 3, "max_new_tokens": 30, "eos": 99}
    streamed = list(onward.stream(model.forward, cache=model.new_cache(1, 30), **options))
    assert onward.decode(model.forward, cache=model.new_cache(1, 30), **options) == streamed


def test_an_error_in_on_token_is_raised_and_leaves_the_cache_usable():
    model = COUNT_UP()
    cache = model.new_cache(1, 64)

    def refuse_nine(token):
        if token == 9:
            raise KeyError("nine")

    with pytest.raises(KeyError, match="nine"):
        decode(model, first_token=6, cache=cache, on_token=refuse_nine)
    assert torch.is_grad_enabled()
    assert decode(model, first_token=6, cache=cache) == [7, 8, 9, 10, 11]


def test_an_error_in_the_forward_is_raised_and_leaves_the_cache_usable():
    model, fail = COUNT_UP(), itertools.chain([False, False, True], itertools.repeat(False))

    def forward(*arguments):
        if next(fail):
            raise MemoryError("no more")
        return model.forward(*arguments)

    options = {"cache": model.new_cache(1, 64), "params": (), "first_token": 6, "max_new_tokens": 5}
    with pytest.raises(MemoryError):
        onward.decode(forward, **options)
    assert torch.is_grad_enabled()
    assert onward.decode(forward, **options) == [7, 8, 9, 10, 11]


# ── room ──────────────────────────────────────────────────────────────────────────────────────────────────


def stream_without_a_sized_cache(max_len, offset=0, max_new_tokens=5):
    """A cache that does not say how long it is: a plain dict of a tensor."""
    ran = []

    def forward(tokens, offsets, cache, params):
        ran.append(int(offsets))
        cache["seen"][offsets] = tokens[:, 0]
        return torch.eye(4)[:1].unsqueeze(0), cache

    options = {"params": None, "first_token": 0, "max_new_tokens": max_new_tokens, "offset": offset}
    ids = onward.stream(forward, cache={"seen": torch.zeros(8, dtype=torch.int32)}, max_len=max_len, **options)
    return ids, ran


def test_exceeding_max_len_raises_before_the_first_step():
    with pytest.raises(
        ContextOverflowError, match=r"\(4 tokens\) \+ max_new_tokens \(5\) = 9, but the cache holds 8: .* at most 4"
    ):
        stream_without_a_sized_cache(max_len=8, offset=4)


def test_exactly_max_len_tokens_fit():
    ids, ran = stream_without_a_sized_cache(max_len=8, offset=3)
    assert list(ids) == [0] * 5
    assert ran == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("make", [COUNT_UP, tiny_model], ids=["scripted", "KVCache"])
def test_exceeding_the_cache_raises_at_the_call(make):
    model = make()
    for offset, new, max_len in [(0, 9, None), (4, 5, None), (8, 1, None), (0, 9, 100), (0, 5, 4)]:
        with pytest.raises(ContextOverflowError):
            onward.stream(
                model.forward,
                cache=model.new_cache(1, 8),
                params=model.params,
                first_token=0,
                max_new_tokens=new,
                offset=offset,
                max_len=max_len,
            )
    assert len(decode(model, room=8, max_new_tokens=8)) == 8


def test_decoding_continues_from_an_offset():
    model = COUNT_UP()
    cache = model.new_cache(1, 16)
    model(torch.tensor([[20, 21, 22]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), cache)
    assert decode(model, first_token=3, offset=3, cache=cache, max_new_tokens=2) == [4, 5]
    assert cache.tokens[0, :5].tolist() == [20, 21, 22, 3, 4]


def test_a_used_cache_gives_the_same_ids():
    model = tiny_model(seed=4)
    new = decode(model, first_token=9, max_new_tokens=40)
    used = model.new_cache(1, 64)
    decode(model, first_token=77, max_new_tokens=64, cache=used)
    assert decode(model, first_token=9, max_new_tokens=40, cache=used) == new
    assert decode(model, first_token=9, max_new_tokens=40, cache=poison(used)) == new


# ── select ────────────────────────────────────────────────────────────────────────────────────────────────


def test_select_gets_the_logits_of_the_row():
    model = COUNT_UP()
    shapes = []

    def least_likely_but_one(logits):
        shapes.append(tuple(logits.shape))
        return (logits.argmax(-1) + 1) % 32

    assert decode(model, first_token=0, max_new_tokens=3, select=least_likely_but_one) == [2, 4, 6]
    assert shapes == [(1, 32)] * 3


def test_a_sampler_draws_at_the_position_of_its_id():
    model = tiny_model(seed=2)
    got = decode(model, first_token=5, select=Sampler([SamplingParams(temperature=1.0, seed=9)]), max_new_tokens=20)
    tokens = [5]
    with torch.no_grad():
        for _ in range(20):
            prompt = torch.tensor([tokens], dtype=torch.int32)
            logits, _ = model(prompt, torch.zeros(1, dtype=torch.int32), model.new_cache(1, 64))
            tokens.append(int(sample(logits[:, -1], seed=9, positions=len(tokens))))
    assert got == tokens[1:]
    assert len(set(got)) > 5


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda logits: logits.argmax(), r"shape \[1\]; got torch.int64 \[\]"),
        (lambda logits: logits.argmax(-1, keepdim=True), r"shape \[1\]; got torch.int64 \[1, 1\]"),
        (lambda logits: logits.amax(-1), r"integer ids .* got torch.float32 \[1\]"),
        (lambda logits: torch.tensor([32]), "select returned id 32, .* from 0 to 31"),
        (lambda logits: torch.tensor([-1]), "select returned id -1"),
    ],
)
def test_a_select_that_returns_no_ids_is_refused(select, message):
    with pytest.raises(RequestError, match=message):
        decode(COUNT_UP(), select=select)


# ── invalid results of a forward ──────────────────────────────────────────────────────────────────────────


def forward_returning(logits):
    return partial(
        onward.decode, lambda tokens, offsets, cache, params: (logits, cache), cache=None, params=None, first_token=0
    )


@pytest.mark.parametrize("shape", [(1, 9), (9,), (1, 2, 9), (2, 1, 9), (1, 1, 1, 9)], ids=str)
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(RequestError, match=r"forward must return logits \[1, 1, 'V'\]; got"):
        forward_returning(torch.zeros(shape))(max_new_tokens=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_logits_are_refused(bad):
    logits = torch.zeros(1, 1, 9)
    logits[0, 0, 4] = bad
    for select in (onward.greedy, Sampler([SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, seed=1)])):
        with pytest.raises(OnwardError, match="NaN or infinite"):
            forward_returning(logits)(max_new_tokens=1, select=select)


def test_masked_ids_are_an_error_only_if_all_are_masked():
    logits = torch.full((1, 1, 9), -math.inf)
    with pytest.raises(OnwardError, match="NaN or infinite"):
        forward_returning(logits)(max_new_tokens=1)
    logits[0, 0, 4] = -3.0
    assert forward_returning(logits)(max_new_tokens=2) == [4, 4]


def test_no_gradient_is_recorded_and_grad_mode_is_restored():
    weight, modes = torch.nn.Parameter(torch.eye(5)), []

    def forward(tokens, offsets, cache, params):
        modes.append(torch.is_grad_enabled())
        return params[tokens.long()], cache

    ids = onward.stream(forward, cache=None, params=weight, first_token=3, max_new_tokens=2, compile="eager")
    assert next(ids) == 3
    assert torch.is_grad_enabled(), "also between two ids"
    assert list(ids) == [3]
    assert modes == [False, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", -1),
        ("offset", 1.0),
        ("first_token", -2),
        ("first_token", True),
        ("first_token", [1]),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(name, value):
    model = COUNT_UP()
    options = {"cache": None, "params": None, "first_token": 0, "max_new_tokens": 1, name: value}
    with pytest.raises(RequestError, match=name):
        onward.stream(model.forward, **options)


def test_an_unknown_option_raises():
    with pytest.raises(RequestError, match="unknown option 'temperature'"):
        decode(COUNT_UP(), temperature=1.0)
