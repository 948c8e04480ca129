"""linear_by_head: each head's features times a separate matrix, with the bits of `linear`."""

import pytest
import torch
from rounding import DTYPES, UNIT, assert_within, random

from onward import native, ops
from onward.errors import RequestError

SIZES = [(1, 1, 1), (3, 17, 31), (4, 32, 64), (5, 130, 12)]  # heads, outputs, inputs


def operands(tokens, heads, outputs, inputs, dtype):
    return random(2, tokens, heads, inputs, dtype=dtype), random(heads, outputs, inputs, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_form_equals_the_product_of_each_head(tokens, sizes, dtype):
    x, weight = operands(tokens, *sizes, dtype)
    exact = torch.einsum("bthk,hnk->bthn", x.double(), weight.double())
    size = torch.einsum("bthk,hnk->bthn", x.double().abs(), weight.double().abs())
    inside = (sizes[2] + 1) * UNIT[torch.float32] * size  # K float32 sums, then one rounding
    bound = inside + 2 * UNIT[dtype] * (exact.abs() + inside)
    for got in (ops.linear_by_head(x, weight), ops.linear_by_head(x, ops.pack_experts(weight))):
        assert got.dtype == dtype
        assert_within(got, exact, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_packed_heads_have_the_bits_of_linear(form, tokens, threads, dtype):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    native.set_num_threads(threads)
    x, weight = operands(tokens, 5, 130, 96, dtype)
    got = ops.linear_by_head(x, ops.pack_experts(weight))
    for head in range(5):
        alone = ops.linear(x[:, :, head].contiguous(), ops.pack(weight[head]))
        assert torch.equal(got[:, :, head], alone)
    assert torch.equal(ops.linear_by_head(x[1:, -1:], ops.pack_experts(weight)), got[1:, -1:])


@pytest.mark.parametrize("packed", [False, True])
def test_a_slice_of_wider_features_is_read_in_place(packed):
    wide, weight = random(2, 3, 4, 20), random(4, 9, 12, seed=1)
    weight = ops.pack_experts(weight) if packed else weight
    for x in (wide[..., :12], wide[..., 8:], wide.transpose(1, 2).contiguous().transpose(1, 2)[..., :12]):
        assert torch.equal(ops.linear_by_head(x, weight), ops.linear_by_head(x.contiguous(), weight))


def test_mismatched_shapes_are_refused():
    weight = random(4, 9, 12)
    for x in (random(2, 3, 12), random(2, 4, 11), random(2, 4, 12, dtype=torch.bfloat16)):
        with pytest.raises(RequestError, match=r"expects x \[\.\.\., H, K\] of its dtype; got x"):
            ops.linear_by_head(x, weight)
    with pytest.raises(RequestError, match=r"weight torch.float32 \[9, 12\]"):
        ops.linear_by_head(random(2, 9, 12), weight[0])
