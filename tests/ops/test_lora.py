"""Updates by adapters: kernel == definition, each row alone, and as the products written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import ops
from onward.errors import RequestError
from onward.ops.lora import _lora

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(rows, tokens, inputs, outputs, rank, count, dtype, seed=0, dora=False, bias=False):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    extras = {
        "scale": torch.rand(count, outputs, generator=g) + 0.5 if dora else None,
        "bias": random(outputs) if bias else None,
    }
    operands = random(rows, tokens, inputs), random(rows, tokens, outputs), random(count, rank, inputs)
    slots = torch.randint(0, count, (rows,), generator=g, dtype=torch.int32)
    return (*operands, random(count, rank, outputs) * rank**-0.5, slots), extras


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1, 7, 16, 33, 130]),
    st.sampled_from([1, 5, 16, 100, 1200]),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_the_op_is_the_definition_in_float64(rows, tokens, inputs, outputs, rank, dtype, dora, bias):
    operands, extras = drawn(rows, tokens, inputs, outputs, rank, 4, dtype, seed=rows, dora=dora, bias=bias)
    got = ops.lora(*operands, **extras)
    expected = _lora.definition(
        *(t.double() if t.is_floating_point() else t for t in operands),
        *(None if t is None else t.double() for t in extras.values()),
    )
    # In float32: `inputs` roundings in a dot product of terms of size 1, then `rank` in the second, each at most
    # eps of the sum of magnitudes; and one rounding to the dtype, half a unit of the result.
    eps = torch.finfo(torch.float32).eps
    bound = (inputs + rank + 4) * eps * (inputs * rank) ** 0.5 * 8
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=bound + torch.finfo(dtype).tiny
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone(form, dtype):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    operands, extras = drawn(6, 3, 50, 70, 5, 3, dtype, dora=True)
    x, y, a, b, slots = operands
    together = ops.lora(*operands, **extras)
    for row in range(6):
        alone = ops.lora(x[row : row + 1], y[row : row + 1], a, b, slots[row : row + 1], **extras)
        assert torch.equal(alone[0], together[row])
        for token in range(3):
            one = ops.lora(x[row, None, token], y[row, None, token], a, b, slots[row : row + 1], **extras)
            assert torch.equal(one[0], together[row, token])


def test_a_row_without_an_adapter_keeps_its_bits_even_the_sign_of_zero():
    (x, y, a, b, _), _ = drawn(2, 1, 8, 8, 2, 2, torch.float32)
    y[:] = -0.0
    a[0], b[0] = float("nan"), float("nan")
    out = ops.lora(x, y, a, b, torch.zeros(2, dtype=torch.int32))
    assert torch.equal(out.view(torch.int32), y.view(torch.int32))


def test_what_does_not_fit_is_refused():
    (x, y, a, b, slots), _ = drawn(2, 1, 8, 6, 2, 3, torch.float32)
    for wrong in [
        (x, y, a, b, slots.long()),
        (x, y, a, b, slots[:1]),
        (x, y, a[:, :1], b, slots),
        (x, y[..., :5], a, b, slots),
        (x, y, a.half(), b, slots),
    ]:
        with pytest.raises(RequestError, match="lora wants"):
            ops.lora(*wrong)


def test_a_slot_that_is_not_there_is_refused_by_the_kernel(form):
    if form == "definition":
        pytest.skip("the definition reads no value on the host")
    (x, y, a, b, _), _ = drawn(2, 1, 8, 6, 2, 3, torch.float32)
    with pytest.raises(Exception, match="onward_lora"):
        ops.lora(x, y, a, b, torch.tensor([0, 3], dtype=torch.int32))
