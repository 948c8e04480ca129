"""Updates by adapters: kernel == definition, each row alone, and the products written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import ops
from onward.errors import RequestError
from onward.ops.lora import _lora

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(rows, tokens, inputs, outputs, rank, count, dtype, seed=0, dora=False):
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    extras = {
        "scale": torch.rand(count, outputs, generator=g) + 0.5 if dora else None,
        "shift": torch.randn(count, outputs, generator=g) if dora else None,
    }
    operands = random(rows, tokens, inputs), random(rows, tokens, outputs), random(count, rank, inputs)
    slots = torch.randint(0, count, (rows,), generator=g, dtype=torch.int32)
    ranks = torch.randint(0, rank + 1, (count,), generator=g, dtype=torch.int32)
    ranks[0] = 0
    return (*operands, random(count, rank, outputs) * rank**-0.5, slots, ranks), extras


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 40]),
    st.integers(1, 9),
    st.sampled_from([1, 7, 16, 33, 130]),
    st.sampled_from([1, 5, 16, 100, 1200]),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_the_op_equals_the_definition_in_float64(rows, tokens, inputs, outputs, rank, dtype, dora):
    operands, extras = drawn(rows, tokens, inputs, outputs, rank, 4, dtype, seed=rows, dora=dora)
    got = ops.lora(*operands, **extras)
    expected = _lora.definition(
        *(t.double() if t.is_floating_point() else t for t in operands),
        None,
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
def test_batched_row_equals_the_row_alone(form, dtype):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    operands, extras = drawn(8, 7, 50, 700, 5, 3, dtype, dora=True)
    x, y, a, b, slots, ranks = operands
    ranks[1:] = torch.tensor([5, 3])
    together = ops.lora(*operands, **extras)
    for row in range(8):
        alone = ops.lora(x[row : row + 1], y[row : row + 1], a, b, slots[row : row + 1], ranks, **extras)
        assert torch.equal(alone[0], together[row])
        for token in range(7):
            one = ops.lora(x[row, None, token], y[row, None, token], a, b, slots[row : row + 1], ranks, **extras)
            assert torch.equal(one[0], together[row, token])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_in_8_bits_equal_those_of_their_factors(dtype):
    (x, y, _, _, slots, ranks), extras = drawn(5, 3, 37, 150, 6, 4, dtype, dora=True)
    ranks[1:] = 5
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-127, 128, (4, 6, width), generator=g, dtype=torch.int8) for width in (37, 150))
    factors = torch.rand(4, 6, generator=g) * 1e-4
    got = ops.lora(x, y, a, b, slots, ranks, factors=factors, **extras)
    # The same with the factors in b: each term of both sums is rounded in another place.
    whole = a.float(), b.float() * factors.unsqueeze(2)
    expected = ops.lora(x.float(), y.float(), *whole, slots, ranks, **extras)
    # 37 + 6 + 4 roundings of sums whose terms add up to 37 * 127 * 3 and, with b and 6 factors, that * 127 * 6e-4.
    bound = 47 * torch.finfo(torch.float32).eps * 37 * 127 * 3 * 127 * 6e-4
    torch.testing.assert_close(got.float(), expected, rtol=torch.finfo(dtype).eps, atol=bound)
    with pytest.raises(RequestError, match="lora expects"):
        ops.lora(x, y, a, b, slots, ranks)


def test_a_row_without_an_adapter_keeps_its_bits_even_negative_zero():
    (x, y, a, b, slots, ranks), extras = drawn(2, 1, 8, 8, 2, 2, torch.float32, dora=True)
    y[:] = -0.0
    a[0], b[0] = float("nan"), float("nan")
    out = ops.lora(x, y, a, b, torch.zeros_like(slots), ranks, **extras)
    assert torch.equal(out.view(torch.int32), y.view(torch.int32))


def test_entries_past_a_slots_rank_and_a_neutral_scale_change_no_bit(form):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    (x, y, a, b, slots, ranks), _ = drawn(3, 2, 30, 40, 6, 4, torch.bfloat16)
    ranks[1:] = 4
    expected = ops.lora(x, y, a[:, :4], b[:, :4], slots, ranks)
    a[:, 4:], b[:, 4:] = float("nan"), float("nan")
    ones, zeros = torch.ones(4, 40), torch.full((4, 40), -0.0)
    for extras in ({}, {"scale": ones, "shift": zeros}):
        assert torch.equal(ops.lora(x, y, a, b, slots, ranks, **extras), expected)


def test_mismatched_arguments_are_refused():
    (x, y, a, b, slots, ranks), _ = drawn(2, 1, 8, 6, 2, 3, torch.float32)
    for wrong in [
        (x, y, a, b, slots.long(), ranks),
        (x, y, a, b, slots[:1], ranks),
        (x, y, a[:, :1], b, slots, ranks),
        (x, y[..., :5], a, b, slots, ranks),
        (x, y, a.half(), b, slots, ranks),
        (x, y, a, b, slots, ranks[:2]),
    ]:
        with pytest.raises(RequestError, match="lora expects"):
            ops.lora(*wrong)
    with pytest.raises(RequestError, match="lora expects"):
        ops.lora(x, y, a, b, slots, ranks, scale=torch.ones(3, 6))


def test_the_kernel_refuses_slots_and_ranks_out_of_range(form):
    if form == "definition":
        pytest.skip("the definition reads no value on the host")
    (x, y, a, b, _, ranks), _ = drawn(2, 1, 8, 6, 2, 3, torch.float32)
    with pytest.raises(Exception, match="onward_lora"):
        ops.lora(x, y, a, b, torch.tensor([0, 3], dtype=torch.int32), ranks)
    with pytest.raises(Exception, match="onward_lora"):
        ops.lora(x, y, a, b, torch.tensor([0, 1], dtype=torch.int32), ranks + 3)
