"""The public double follows its script, and reports every violation of the contract."""

import pytest
import torch
from tests.decoding.plain_forward import without_logits_at

from onward.testing import ContractError, poison, scripted_model


def call(model, tokens, offsets, cache, **options):
    """The most likely id after each token, as lists."""
    tokens, offsets = torch.tensor(tokens, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)
    return model(tokens, offsets, cache, **options)[0].argmax(-1).tolist()


def test_a_list_script_repeats_for_a_prompt_of_one_token():
    model = scripted_model([5, 6, 7])
    cache = model.new_cache(1, 8)
    assert [call(model, [[0]], [at], cache) for at in range(4)] == [[[5]], [[6]], [[7]], [[5]]]


def test_a_function_gets_each_row_up_to_each_token():
    model = scripted_model(lambda tokens: sum(tokens) % 32)
    cache = model.new_cache(2, 8)
    assert call(model, [[1, 2, 3], [4, 5, 6]], [0, 0], cache) == [[1, 3, 6], [4, 9, 15]]
    assert call(model, [[10], [10]], [3, 1], cache) == [[16], [14]], "what stands past an offset is forgotten"


def test_a_function_may_return_logits():
    logits = torch.tensor([0.0, 2.0, 1.0])
    model = scripted_model(lambda tokens: logits, vocab_size=3)
    got, _ = model(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), model.new_cache(1, 4))
    assert torch.equal(got, logits.expand(1, 2, 3))


@pytest.mark.parametrize("plain", [False, True])
def test_logits_are_those_of_the_requested_positions(plain):
    model = scripted_model([5, 6, 7])
    model = without_logits_at(model) if plain else model
    at = torch.tensor([[2, 0]])
    assert call(model, [[1, 1, 1]], [0], model.new_cache(1, 4), logits_at=at) == [[7, 5]]


def test_every_call_is_recorded():
    model = scripted_model([1])
    cache = model.new_cache(2, 4)
    call(model, [[1, 2], [3, 4]], [0, 0], cache, logits_at=torch.tensor([[1], [0]]))
    call(model, [[9], [9]], [2, 1], cache)
    assert model.calls == [([[1, 2], [3, 4]], [0, 0], [[1], [0]]), ([[9], [9]], [2, 1], None)]


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        ([[1]], [1], "nothing was written at 0"),
        ([[1, 2, 3, 4, 5]], [0], "do not fit a cache of 4"),
        ([[1]], [4], "do not fit a cache of 4"),
        ([[1]], [-1], "do not fit a cache of 4"),
        ([[32]], [0], "ids must be from 0 to 31"),
        ([[-1]], [0], "ids must be from 0 to 31"),
        ([[1], [1]], [0, 0], r"tokens must be int32 \[1, T\]"),
        ([1], [0], r"tokens must be int32 \[1, T\]"),
        ([[1]], [0, 0], r"offsets must be int32 \[1\]"),
    ],
)
def test_calls_that_break_the_contract_are_refused(tokens, offsets, message):
    model = scripted_model([1])
    with pytest.raises(ContractError, match=message):
        call(model, tokens, offsets, model.new_cache(1, 4))
    assert model.calls == []


def test_tokens_of_another_dtype_are_refused():
    model = scripted_model([1])
    with pytest.raises(ContractError, match="int64"):
        model(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), model.new_cache(1, 4))


def test_truncated_or_poisoned_entries_cannot_be_read():
    model = scripted_model([1])
    cache = model.new_cache(1, 8)
    call(model, [[1, 2, 3, 4]], [0], cache)
    call(model, [[5]], [1], cache)  # takes back 2, 3 and 4
    with pytest.raises(ContractError, match="has offset 4, but nothing was written at 2"):
        call(model, [[6]], [4], cache)
    with pytest.raises(ContractError, match="nothing was written at 0"):
        call(model, [[6]], [2], poison(cache))


def test_an_empty_script_is_refused():
    with pytest.raises(ValueError, match="at least one id"):
        scripted_model([])
