"""Every RoPE schedule has the frequencies of transformers for all parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers_reference import LLAMA3, YARN

from onward.models.rope import rotary_schedule

MAX_POSITION = 128
# A frequency is the result of a power, which both compute alike, and of up to 8 roundings in orders of their own.
ROUNDINGS = 8 * 2**-24
POSITION = torch.ones(1, 1, dtype=torch.int32)


def theirs(rope, head_dim, length=None):
    """float32 [R] and the factor of cos and sin."""
    config = LlamaConfig(rope_parameters=dict(rope), head_dim=head_dim, max_position_embeddings=MAX_POSITION)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)


def check(rope, head_dim, context=MAX_POSITION):
    schedule = rotary_schedule({"rope_parameters": rope}, head_dim, MAX_POSITION, partial=1.0)
    expected, magnitude = theirs(rope, head_dim, context)
    at = POSITION.to(torch.float32).unsqueeze(-1)
    found = schedule.scaling.inverse_frequencies(schedule.dims, schedule.base, at, context)
    torch.testing.assert_close(found.expand_as(expected), expected, rtol=ROUNDINGS, atol=0)
    assert schedule.scaling.magnitude == pytest.approx(magnitude, rel=1e-12)
    cos, sin = schedule.angles(POSITION, context)
    half = expected.numel()
    torch.testing.assert_close(cos[0, 0, half:], expected.cos() * magnitude, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin[0, 0, half:], expected.sin() * magnitude, rtol=1e-6, atol=1e-6)


numbers = st.floats(0.125, 64)
head_dims = st.integers(2, 40).map(lambda half: 2 * half)


@given(
    head_dims,
    st.fixed_dictionaries(
        {"factor": st.floats(1, 64), "rope_theta": st.floats(2, 1e6), "beta_slow": st.floats(0.1, 3)},
        optional={
            "beta_fast": st.floats(3, 64),
            "truncate": st.booleans(),
            "mscale": numbers,
            "mscale_all_dim": numbers,
            "original_max_position_embeddings": st.integers(1, MAX_POSITION),
            "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
        },
    ),
)
@settings(max_examples=100, deadline=None)
def test_yarn(half_dim, fields):
    check({"rope_type": "yarn", "original_max_position_embeddings": 16} | fields, 2 * half_dim)


@given(st.integers(2, 20), st.data())
@settings(max_examples=30, deadline=None)
def test_longrope(pairs, data):
    lists = st.lists(numbers, min_size=pairs, max_size=pairs)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": data.draw(lists),
        "long_factor": data.draw(lists),
        "original_max_position_embeddings": 32,
    }
    rope |= data.draw(st.fixed_dictionaries({}, optional={"factor": st.floats(1, 64), "attention_factor": numbers}))
    for context in (1, 32, 33, MAX_POSITION):
        check(rope, 2 * pairs, context)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("head_dim", [6, 16, 22])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_proportional(share, head_dim, factor):
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    check(rope if factor is None else rope | {"factor": factor}, head_dim)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("rope", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}], ids=str)
def test_partial_rotation_of_a_head(rope, share):
    check({"rope_theta": 10000.0, "partial_rotary_factor": share} | rope, 24)
