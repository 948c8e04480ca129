"""linear: stock and packed weights give the matrix product."""

import pytest
import torch
from rounding import DTYPES, ODD_SIZES, UNIT, assert_within, random

from onward import ops
from onward.errors import RequestError
from onward.models.linear import pack_params
from onward.testing.tiny import tiny_model

FORMS = {
    "stock": ops.linear,
    "packed": lambda x, weight, bias: ops.linear(x, ops.pack(weight), bias),
}


def exact_and_bound(x, weight, bias):
    """In float64: x @ weight.T + bias, and how far K + 1 float32 sums and one last rounding may be from it."""
    x64, w64, b64 = (None if t is None else t.to(torch.float64) for t in (x, weight, bias))
    exact, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        exact, size = exact + b64, size + b64.abs()
    inside = (weight.shape[1] + 1) * UNIT[torch.float32] * size
    return exact, inside + 2 * UNIT[x.dtype] * (exact.abs() + inside)


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("outputs", [1, 17, 127])
@pytest.mark.parametrize("inputs", ODD_SIZES)
def test_every_form_equals_the_matrix_product(which, dtype, tokens, outputs, inputs):
    x, weight = random(2, tokens, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, random(outputs, dtype=dtype, seed=2)):
        got = FORMS[which](x, weight, bias)
        assert got.dtype == dtype
        assert got.shape == (2, tokens, outputs)
        assert_within(got, *exact_and_bound(x, weight, bias))


def test_packing_twice_equals_packing_once():
    packed = ops.pack(random(17, 33))
    assert ops.pack(packed) is packed


def test_embedding_returns_rows_unchanged():
    table = random(31, 17, dtype=torch.bfloat16)
    tokens = torch.tensor([[30, 0, 7], [7, 7, 1]], dtype=torch.int32)
    assert torch.equal(ops.embedding(tokens, table), table[tokens.long()])


@pytest.mark.parametrize("looked_up_by", ["native", "definition"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", ODD_SIZES)
def test_rows_of_a_packed_table_equal_the_stock_ones(looked_up_by, dtype, inputs):
    table = random(37, inputs, dtype=dtype)
    packed = ops.pack(table)
    if not isinstance(packed, ops.NativeWeight):
        pytest.skip("nothing is packed without the native library")
    before = ops.choice().form
    ops.choose(looked_up_by)
    try:
        for ids in (torch.tensor([[0, 36, 15], [16, 5, 5]], dtype=torch.int32), torch.tensor(36)):
            assert torch.equal(ops.embedding(ids, packed), table[ids.long()])
        with pytest.raises(RequestError, match=r"0 … 36; got 5 … 37"):
            ops.embedding(torch.tensor([37, 5]), packed)
        with pytest.raises(RequestError, match="int32 or int64"):
            ops.embedding(torch.tensor([1.0]), packed)
    finally:
        ops.choose(before)


def test_a_tied_pair_is_one_packed_weight():
    params = tiny_model(tie_word_embeddings=True).params
    packed = pack_params(params)
    assert packed.embed_tokens.weight is packed.lm_head.weight
    untied = tiny_model(tie_word_embeddings=False).params
    assert pack_params(untied).embed_tokens.weight is untied.embed_tokens.weight
