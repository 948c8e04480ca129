"""The product with quantized weights: kernels and definition agree within float32 rounding."""

import pytest
import torch
from quantized_cases import DTYPES, FORMATS, UNIT, noise, numbers, packed, spread
from torch.utils import _pytree as pytree

from onward import ops
from onward.errors import RequestError
from onward.ops import QuantizedWeight

pytestmark = pytest.mark.usefixtures("form")
ODD_SIZES = [1, 3, 17, 31, 33, 127, 1000]


def rounded_x(x, format):
    """float64 x as it is rounded to 8 bits: in steps of absmax / 127 of a token, with the integers from float32
    arithmetic, or of the least power of two that takes the absmax of 32 inputs to 127."""
    if format == "int8":
        absmax = x.to(torch.float32).abs().amax(-1, keepdim=True)
        q = (x.to(torch.float32) * torch.div(torch.tensor(127.0), absmax)).nan_to_num(0.0).round()
        return q.to(torch.float64) * (absmax / 127).to(torch.float64)
    parts = []
    for part in x.to(torch.float64).split(32, -1):
        step = 2.0 ** (part.abs().amax(-1, keepdim=True) / 127).log2().ceil()
        parts.append(torch.where(step > 0, (part / step).round() * step, 0.0))
    return torch.cat(parts, -1)


def exact_and_bound(x, weight, bias):
    """In float64: the product of the rounded x, and how far float32 may be from it.

    q * scale is rounded once on either side, K products are added, two scales multiplied, a bias added: no order and no
    form has more than K + 4 roundings on the way of any term. One last rounding is to x's dtype.
    """
    inputs = weight.shape[1]
    q, scales = weight.unpack()
    w64 = numbers(weight.format, q).to(torch.float64) * spread(scales, inputs)
    x64 = rounded_x(x, weight.format)
    exact, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        exact, size = exact + bias.to(torch.float64), size + bias.to(torch.float64).abs()
    inside = (inputs + 4) * UNIT[torch.float32] * size
    return exact, inside + UNIT[x.dtype] * (exact.abs() + inside)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize(("rows", "inputs"), [*zip(ODD_SIZES, reversed(ODD_SIZES), strict=True), (127, 64), (16, 96)])
def test_every_form_equals_the_integer_product(format, dtype, tokens, rows, inputs):
    weight = packed(format, rows, inputs)
    x = noise(2, tokens, inputs, seed=1).to(dtype)
    for bias in (None, noise(rows, seed=2).to(dtype)):
        got = ops.linear(x, weight, bias)
        assert got.dtype == dtype
        assert got.shape == (2, tokens, rows)
        exact, bound = exact_and_bound(x, weight, bias)
        error = (got.to(torch.float64) - exact).abs()
        assert bool((error <= bound).all()), f"{float((error / bound).max()):.3g} times what rounding explains"


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_x_explains_the_distance_to_the_float_product(format):
    """Each element of x moves by half a step at most: absmax / 254 of its token, or absmax / 127 of its group of 32."""
    weight, x = packed(format, 33, 100), noise(7, 100)
    w64 = weight.dequantize().to(torch.float64)
    groups = x.split(100 if format == "int8" else 32, -1)
    steps = torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in groups], -1)
    bound = (steps.to(torch.float64) / (254 if format == "int8" else 127)) @ w64.abs().T * (1 + 1e-4)
    assert bool(((ops.linear(x, weight).to(torch.float64) - x.to(torch.float64) @ w64.T).abs() <= bound).all())


@pytest.mark.parametrize("format", FORMATS)
def test_token_alone_equals_the_token_in_a_batch(form, format):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    weight, x = packed(format, 50, 333), noise(19, 333)
    together = ops.linear(x, weight)
    assert all(torch.equal(ops.linear(x[t], weight), together[t]) for t in range(len(x)))


@pytest.mark.parametrize("format", FORMATS)
def test_x_may_have_any_layout(format):
    weight, x = packed(format, 17, 40), noise(3, 40, 5)
    for strange in (x.transpose(1, 2), x.transpose(1, 2)[:, ::2], x[0].T.expand(4, 5, 40)):
        assert torch.equal(ops.linear(strange, weight), ops.linear(strange.contiguous(), weight))
    bias = noise(17, 2)[:, 0]
    assert torch.equal(ops.linear(x.mT, weight, bias), ops.linear(x.mT.contiguous(), weight, bias.clone()))


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens_give_no_outputs(format):
    assert ops.linear(torch.empty(2, 0, 33), packed(format, 17, 33)).shape == (2, 0, 17)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_only_a_nonfinite_token_gives_nan(format, bad):
    weight, x = packed(format, 17, 70), noise(4, 70)
    expected = ops.linear(x, weight)
    x[2, 69] = bad
    got = ops.linear(x, weight)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("format", FORMATS)
def test_zero_and_tiny_tokens_give_the_bias(format):
    weight, bias = packed(format, 17, 33), noise(17)
    for x in (torch.zeros(2, 33), torch.full((2, 33), 1e-40)):
        assert torch.equal(ops.linear(x, weight, bias), bias.expand(2, 17))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [torch.tensor([[30, 0, 7], [7, 16, 15]]).int(), torch.arange(31), torch.tensor(3)])
def test_rows_equal_those_of_the_dequantized_weight(format, dtype, ids):
    weight = packed(format, 31, 77, dtype=dtype)
    assert torch.equal(ops.embedding(ids, weight), weight.dequantize()[ids.long()])
    assert weight.rows(ids[..., None][..., :0]).shape == (*ids.shape, 0, 77)


@pytest.mark.parametrize("format", FORMATS)
def test_dequantizing_multiplies_numbers_by_scales(format):
    weight = packed(format, 1000, 300)  # more rows than are taken at once
    q, scales = weight.unpack()
    assert torch.equal(weight.dequantize(), (numbers(format, q) * spread(scales, 300).to(torch.float32)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(17, 70), (1100, 1000)])  # the second is more than is taken at once
def test_gradients_equal_those_of_the_unrounded_product(format, dtype, rows, inputs):
    weight = packed(format, rows, inputs)
    x, bias = noise(3, 2, inputs).to(dtype).requires_grad_(), noise(rows).to(dtype).requires_grad_()
    upstream = noise(3, 2, rows).to(dtype)
    out = ops.linear(x, weight, bias)
    assert torch.equal(out, ops.linear(x.detach(), weight, bias.detach()))
    out.backward(upstream)
    u64, w64 = upstream.to(torch.float64), weight.dequantize().to(torch.float64)
    inside = (rows + 1) * UNIT[torch.float32] * (u64.abs() @ w64.abs())
    bound = inside + UNIT[dtype] * ((u64 @ w64).abs() + inside)
    assert bool(((x.grad.to(torch.float64) - u64 @ w64).abs() <= bound).all())
    torch.testing.assert_close(bias.grad, upstream.to(torch.float32).sum((0, 1)).to(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_compiled_gives_the_same_bits(format):
    weight, bias = packed(format, 33, 70), noise(33)

    def forward(ids, weight):
        return ops.linear(torch.tanh(ops.embedding(ids, weight)), weight, bias) + 1

    ids = torch.tensor([[1, 32, 0]])
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids, weight), forward(ids, weight))


@pytest.mark.parametrize("format", FORMATS)
def test_the_operators_pass_torchs_opcheck(format):
    weight, bias = packed(format, 33, 70), noise(33)
    checks = ("test_schema", "test_faketensor")
    linear = (noise(2, 3, 70), weight.data, bias, format, 33)
    torch.library.opcheck(torch.ops.onward.quantized_linear.default, linear, test_utils=checks)
    rows = (weight.data, torch.tensor([[1, 32]]), format, 33, 70, torch.bfloat16)
    torch.library.opcheck(torch.ops.onward.quantized_rows.default, rows, test_utils=checks)


def test_a_weight_is_a_pytree_of_its_bytes():
    weight = packed("int4", 17, 33, dtype=torch.bfloat16)
    leaves, spec = pytree.tree_flatten({"w": weight})
    assert leaves == [weight.data]
    again = pytree.tree_unflatten(leaves, spec)["w"]
    assert isinstance(again, QuantizedWeight)
    assert (again.format, again.shape, again.dtype) == ("int4", (17, 33), torch.bfloat16)
    assert weight.to(dtype=torch.float32).dequantize().dtype == torch.float32
    assert weight.to(device="cpu").data is weight.data


@pytest.mark.parametrize("format", FORMATS)
def test_mismatched_arguments_are_refused(format):
    weight = packed(format, 17, 33)
    for x, complaint in [
        (noise(2, 34), r"expects float x \[..., 33\]; got x torch.float32 \[2, 34\]"),
        (torch.zeros(2, 33, dtype=torch.int64), r"expects float x.*int64"),
        (noise(2, 33).double(), r"expects float x.*float64"),
        (torch.tensor(1.0), r"expects float x"),
    ]:
        with pytest.raises(RequestError, match=complaint):
            ops.linear(x, weight)
    with pytest.raises(RequestError, match=r"expects a float bias \[17\]; got bias torch.float32 \[1\]"):
        ops.linear(noise(2, 33), weight, noise(1))
    for ids in ([17], [-1], [0, 16, 31]):  # the block extends to row 31
        with pytest.raises(RequestError, match=r"ids of a table of 17 rows lie in 0 … 16; got"):
            weight.rows(torch.tensor(ids))
    with pytest.raises(RequestError, match="int32 or int64"):
        weight.rows(torch.tensor([1.0]))
