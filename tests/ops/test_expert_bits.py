"""A token's bits through experts depend only on the token, and equal those of plain feed-forward blocks."""

import pytest
import torch
from expert_cases import DTYPE_OF, FORMATS, layer, packed, routes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import random, same_bits

from onward import native, ops

KERNELS_ALONE = True
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("format", FORMATS)
@given(
    tokens=st.integers(1, 500),
    experts=st.sampled_from((1, 3, 16)),
    chosen=st.integers(1, 4),
    widths=st.tuples(st.sampled_from((1, 17, 64, 100)), st.sampled_from((1, 33, 128))),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    biases=st.booleans(),
    crowded=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@few
def test_batched_token_equals_the_token_alone(
    format, tokens, experts, chosen, widths, counts, biases, crowded, seed, data
):
    weights = packed(layer(format, experts, *widths, biases=biases, seed=seed))
    x = random(tokens, widths[1], dtype=DTYPE_OF.get(format, torch.float32), seed=seed)
    ids, shares = routes(tokens, experts, min(chosen, experts), seed)
    if crowded:  # nearly all tokens go to one expert
        ids[: tokens - 1, :1] = 0
    native.set_num_threads(counts[0])
    whole = ops.experts(x, ids, shares, **weights)
    native.set_num_threads(counts[1])
    start = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.just(start + 1) | st.integers(start + 1, tokens))
    part = slice(start, end)
    assert same_bits(ops.experts(x[part], ids[part], shares[part], **weights), whole[part])


@pytest.mark.parametrize("format", ["float32", "int8", "int4", "iq4_nl"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
def test_one_expert_equals_a_feed_forward(format, activation):
    weights = packed(layer(format, 3, 100, 130, biases=True))
    x = random(40, 130)
    chosen = torch.randint(0, 3, (40, 1), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    got = ops.experts(x, chosen, torch.ones(40, 1), **weights, activation=activation)
    gated = {
        "swiglu": ops.swiglu,
        "geglu": lambda gate, up: ops.geglu(gate, up, approximate=False),
        "geglu_tanh": ops.geglu,
    }[activation]
    for index in range(3):
        rows = x[chosen[:, 0] == index]
        one = {name: (weights[name].expert(index), weights[f"{name}_bias"][index]) for name in ("gate", "up", "down")}
        hidden = gated(ops.linear(rows, *one["gate"]), ops.linear(rows, *one["up"]))
        assert same_bits(got[chosen[:, 0] == index], ops.linear(hidden, *one["down"]))


def test_more_rows_than_are_computed_at_once():
    weights = packed(layer("int8", 2, 16, 32))
    x = random(9000, 32)
    ids, shares = routes(9000, 2, 2)
    whole = ops.experts(x, ids, shares, **weights)
    for part in (slice(0, 1), slice(4095, 4097), slice(8999, 9000)):
        assert same_bits(ops.experts(x[part], ids[part], shares[part], **weights), whole[part])
