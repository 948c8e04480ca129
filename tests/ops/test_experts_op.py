"""experts: the weighted sum of the chosen feed-forward blocks, in any format; the others are not read."""

import math

import pytest
import torch
from expert_cases import DTYPE_OF, FORMATS, SIZES, exact_and_bound, for_activation, layer, packed, routes
from rounding import assert_within, random
from torch import Tensor

import onward
from onward import ops
from onward.errors import RequestError
from onward.ops.experts import ACTIVATIONS
from onward.ops.quantized import round_activations


def as_read(format: str):
    if format in DTYPE_OF:
        return lambda x: x
    return lambda x: round_activations(x.to(torch.float32), format)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_sum_of_the_chosen_experts(size, format, biases):
    experts, inner, width, chosen, tokens = size
    weights = layer(format, experts, inner, width, biases=biases)
    x = random(tokens, width, dtype=DTYPE_OF.get(format, torch.float32))
    ids, shares = routes(tokens, experts, chosen)
    for activation in ACTIVATIONS:
        exact, bound = exact_and_bound(x, ids, shares, weights, activation, as_read(format))
        for form in (weights, packed(weights)):
            got = ops.experts(x, ids, shares, **for_activation(form, activation), activation=activation)
            assert got.dtype == x.dtype
            assert_within(got, exact, bound)


@pytest.mark.parametrize("format", FORMATS)
def test_unchosen_experts_are_not_read(format):
    weights = packed(layer(format, 6, 40, 70))
    x, ids, shares = random(5, 70, dtype=DTYPE_OF.get(format, torch.float32)), torch.tensor([[1, 4]] * 5), None
    ids, shares = ids.to(torch.int32), random(5, 2)
    before = ops.experts(x, ids, shares, **weights)
    for weight in weights.values():
        data = weight if isinstance(weight, Tensor) else weight.data
        for index in (0, 2, 3, 5):
            data[index] = 255 if data.dtype == torch.uint8 else math.nan  # scales of NaN
    assert torch.equal(ops.experts(x, ids, shares, **weights), before)


@pytest.mark.parametrize("dtype", DTYPE_OF)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stock_and_packed_experts_have_equal_bits_alone_and_batched(dtype, activation):
    if ops.choice().form == "definition":
        pytest.skip("torch's product rounds a row by how many rows there are")
    weights = for_activation(layer(dtype, 6, 40, 70, biases=True), activation)
    x, (ids, shares) = random(23, 70, dtype=DTYPE_OF[dtype]), routes(23, 5, 2)  # no token chose the last expert
    whole = ops.experts(x, ids, shares, **weights, activation=activation)
    like = {"gate": None} | packed({name: weight for name, weight in weights.items() if weight is not None})
    assert torch.equal(whole, ops.experts(x, ids, shares, **like, activation=activation))
    for rows in ([0], [22], [3, 4, 5], list(range(17))):
        assert torch.equal(ops.experts(x[rows], ids[rows], shares[rows], **weights, activation=activation), whole[rows])


def test_leading_dimensions_are_preserved_and_strides_do_not_matter():
    weights, x = packed(layer("float32", 4, 16, 32)), random(2, 3, 64)[..., ::2]
    ids, shares = ops.top_experts(random(2, 3, 4), 2)
    got = ops.experts(x, ids, shares, **weights)
    assert got.shape == (2, 3, 32)
    flat = ops.experts(x.reshape(6, 32), ids.view(6, 2), shares.view(6, 2), **weights)
    torch.testing.assert_close(got.view(6, 32), flat, rtol=1e-6, atol=1e-6)


def test_no_tokens_are_no_work():
    weights = packed(layer("float32", 4, 16, 32))
    empty = torch.zeros(0, 2)
    assert ops.experts(torch.zeros(0, 32), empty.to(torch.int32), empty, **weights).shape == (0, 32)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_equal_those_of_the_sum(format):
    weights = layer(format, 4, 16, 32)
    dtype = DTYPE_OF.get(format, torch.float32)
    x = random(3, 32, dtype=dtype).requires_grad_()
    ids, shares = routes(3, 4, 2)
    ops.experts(x, ids, shares.requires_grad_(), **packed(weights)).sum().backward()
    assert x.grad.isfinite().all()
    assert bool(x.grad.any())
    assert shares.grad.isfinite().all()
    assert bool(shares.grad.any())


def test_packed_experts_equal_the_stock_ones_and_stay_packed():
    for dtype in DTYPE_OF.values():
        stock = random(3, 17, 33, dtype=dtype)
        once = ops.pack_experts(stock)
        assert ops.pack_experts(once) is once
        assert torch.equal(once if isinstance(once, Tensor) else once.unpack(), stock)
        one_by_one = ops.pack_experts(list(stock))
        assert torch.equal(one_by_one if isinstance(one_by_one, Tensor) else one_by_one.unpack(), stock)


def test_quantized_experts_are_a_pytree_of_their_matrices():
    weights = layer("int4", 3, 20, 70)["gate"]
    (data,), spec = torch.utils._pytree.tree_flatten(weights)
    again = torch.utils._pytree.tree_unflatten([data], spec)
    assert again.shape == (3, 20, 70)
    assert torch.equal(again.dequantize()[2], weights.expert(2).dequantize())


@pytest.mark.parametrize("format", FORMATS)
def test_programs_equal_the_ops(format):
    dtype = DTYPE_OF.get(format, torch.float32)
    params = packed(layer(format, 8, 24, 40, biases=True))
    params |= {"table": ops.pack(random(16, 40, dtype=dtype)), "router": ops.pack(random(8, 40, dtype=dtype))}
    params["tokens"] = random(16, 40, dtype=dtype)

    def forward(tokens, offsets, cache, params):
        x = ops.embedding(tokens, params["tokens"])
        ids, shares = ops.top_experts(ops.linear(x, params["router"]), 3, normalize=True)
        named = {name: value for name, value in params.items() if name not in ("table", "router", "tokens")}
        return ops.linear(ops.experts(x, ids, shares, **named), params["table"]), cache

    tokens, offsets = torch.arange(6, dtype=torch.int32).view(2, 3), torch.zeros(2, dtype=torch.int32)
    want, _ = forward(tokens, offsets, (), params)
    program = onward.compile(forward, params=params, cache=(), batch=2, tokens=3)
    got, _ = program(tokens, offsets, ())
    assert torch.equal(got, want)


def call(**changes):
    weights = layer("float32", 4, 16, 32)
    arguments = {"x": random(3, 32), "chosen": torch.zeros(3, 2, dtype=torch.int32), "weights": torch.ones(3, 2)}
    return ops.experts(**(arguments | weights | changes))


BAD = {
    "int32 chosen": {"chosen": torch.zeros(3, 2, dtype=torch.int64)},
    "float32 weights": {"weights": torch.ones(3, 1)},
    r"float x \[..., D\]": {"x": torch.zeros(3, 32, dtype=torch.int32)},
    r"down \[E, 32, I\]": {"down": torch.zeros(4, 16, 32)},
    "of x's dtype": {"x": random(3, 32, dtype=torch.bfloat16)},
    "all of one format": {"up": layer("int8", 4, 16, 32)["up"]},
    r"biases are \[4, 16\]": {"gate_bias": torch.zeros(16)},
    "activation is one of": {"activation": "relu"},
    "'relu2' has no gate, all others require one; got 'relu2' with a gate": {"activation": "relu2"},
    r"lie in 0 … 3; got 0 … 4": {"chosen": torch.tensor([[0, 4]] * 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_shapes_and_dtypes_raise_one_error(message):
    with pytest.raises(RequestError, match=message):
        call(**BAD[message])


def test_a_packed_layer_refuses_an_expert_out_of_range():
    weights = packed(layer("float32", 4, 16, 32))
    with pytest.raises(RequestError, match="lie in 0 … 3; got -1 … 0"):
        call(**weights, chosen=torch.tensor([[0, -1]] * 3, dtype=torch.int32))


@pytest.mark.parametrize("format", FORMATS)
def test_autocast_computes_in_its_dtype(format):
    weights, x = layer(format, 4, 16, 32), random(3, 32)
    ids, shares = routes(3, 4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.experts(x, ids, shares, **packed(weights))
    assert got.dtype == torch.bfloat16
