"""Digests of weights: every byte counts, the layout doesn't, and each state of the weights is read once."""

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import onward
from onward import LanguageModel
from onward.language_model import fingerprint as digesting
from onward.language_model.fingerprint import difference, digests_of, model_fingerprint, weights_of
from onward.ops import QuantizedWeight
from onward.ops.packed import NativeWeight, pack_native
from onward.testing import ByteTokenizer, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers_of(weight):
    return weight.data if isinstance(weight, QuantizedWeight | NativeWeight) else weight


def digest(weight):
    (only,) = digests_of(dataclasses.replace(tiny_model(seed=7), params={"weight": weight})).values()
    return only


@pytest.mark.parametrize("format", [None, "int8", "int4", "iq4_nl"])
def test_a_single_changed_element_changes_only_its_weights_digest(format):
    model = tiny_model(seed=7)
    if format is not None:
        model = onward.quantize(LanguageModel(model, ByteTokenizer()), format).model
    before = dict(digests_of(model))
    chance = torch.Generator().manual_seed(0)
    for name, weight in weights_of(model).items():
        if not isinstance(weight, torch.Tensor | QuantizedWeight):
            continue
        numbers = numbers_of(weight)
        if not numbers.numel():
            continue
        at = torch.unravel_index(torch.randint(numbers.numel(), (), generator=chance), numbers.shape)
        was = numbers[at].clone()
        with torch.no_grad():
            numbers[at] = was + 1
        after = digests_of(model)
        assert {other for other in before if after[other] != before[other]} == {name}
        with torch.no_grad():
            numbers[at] = was
    assert digests_of(model) == before


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_packed_weights_have_the_digest_of_the_stock_ones(rows, inputs, dtype, data):
    """For parts of any size, wherever they end, and every element counts in both."""
    stock = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    packed = pack_native(stock)
    if packed is None:
        pytest.skip("there are no kernels")
    chunk, digesting._CHUNK = digesting._CHUNK, data.draw(st.sampled_from([1, 1000, 8 << 20]))
    try:
        assert digest(packed) == digest(stock)
        other = stock.clone()
        at = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, inputs - 1))
        other[at] += 1
        assert digest(other) != digest(stock)
        assert digest(pack_native(other)) == digest(other)
    finally:
        digesting._CHUNK = chunk


def test_a_permutation_of_inputs_changes_the_digest():
    model = onward.quantize(LanguageModel(tiny_model(seed=7), ByteTokenizer()), "int8").model
    weight = next(each for each in weights_of(model).values() if isinstance(each, QuantizedWeight))
    order = torch.arange(weight.shape[1])
    reversed_order = order.flip(0)
    digests = {digest(dataclasses.replace(weight, order=each)) for each in (None, order, reversed_order)}
    assert len(digests) == 3


def test_weights_are_read_once_until_they_change(monkeypatch):
    model, read = tiny_model(seed=7), []
    before = digesting._compute_digests
    monkeypatch.setattr(digesting, "_compute_digests", lambda weights: read.append(1) or before(weights))
    first = digests_of(model)
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait(60)
        assert digests_of(model) is first

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(read) == 1
    with torch.no_grad():
        next(leaf for leaf in pytree.tree_leaves(model.params) if isinstance(leaf, torch.Tensor)).mul_(2)
    assert digests_of(model) != first
    assert len(read) == 2


def test_weights_are_not_read_before_a_digest_is_requested(monkeypatch):
    monkeypatch.setattr(digesting, "_compute_digests", lambda weights: pytest.fail("the weights are read"))
    lm = onward.load("demo")
    with onward.Engine(lm) as engine:
        engine.submit("Once", max_new_tokens=2).result(60)


def test_different_weights_are_a_different_model():
    model, other = tiny_model(seed=7), tiny_model(seed=8)
    assert difference(model_fingerprint(model), model) is None
    assert "other numbers" in difference(model_fingerprint(model), other)
