"""The formats of checkpoints quantized by other tools: values by hand, and products in every form of the ops."""

import pytest
import torch

from onward import native, ops
from onward.ops.quantized import round_activations
from onward.ops.quantized_layout import E2M1, GROUPED_FORMATS, NF4, Parts, pack_parts, row_values, unpack_parts

FORMATS = ("uint4", "uint4_128", "uint8_128", "nvfp4", "fp8", "nf4")
UNIT = 2.0**-24  # of float32: half the distance of neighbours, relatively


def codes_drawn(rows, inputs, values, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, values, (rows, inputs), generator=random, dtype=torch.uint8), random


def drawn(name, rows=37, inputs=512, seed=0):
    """A packed weight of random parts, its values float64 [N, K] number by number, and the parts."""
    layout = GROUPED_FORMATS[name]
    codes, random = codes_drawn(rows, inputs, 2**layout.bits, seed)
    groups = inputs // layout.group
    scales = (torch.rand(rows, groups, generator=random) + 0.5) * 0.02
    by_group = torch.arange(inputs) // layout.group
    if layout.zeros:
        zeros = torch.randint(0, 256, (rows, groups), generator=random, dtype=torch.uint8)
        parts = Parts(codes, scales.half(), sub_minima=zeros)
        values = (codes.double() - zeros.double()[:, by_group]) * scales.half().double()[:, by_group]
    elif layout.divided:
        small = (torch.rand(rows, groups, generator=random) * 400).to(torch.float8_e4m3fn)
        divisor = torch.full((rows, -(-inputs // 256)), 3000.0)
        parts = Parts(codes, divisor, None, small.view(torch.uint8))
        factors = small.float() / 3000.0  # one rounding, in float32
        values = (torch.tensor(E2M1).double() / 2)[codes.long()] * factors.double()[:, by_group]
    else:
        if name == "fp8":
            codes[(codes & 127) == 127] = 0  # no NaN
        table = codes.view(torch.float8_e4m3fn).float() if name == "fp8" else torch.tensor(NF4)[codes.long()]
        parts = Parts(codes, scales)
        values = table.double() * scales.double()[:, by_group]
    return ops.QuantizedWeight(pack_parts(layout, parts), name, (rows, inputs), torch.float32), values, parts


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (37, 512), (16, 640)])
def test_values_equal_their_parts_rounded_once(name, rows, inputs):
    weight, values, parts = drawn(name, rows, inputs)
    expected = values.to(torch.float32)
    assert torch.equal(weight.dequantize(), expected)
    ids = torch.arange(rows)
    assert same_bits(weight.rows(ids), row_values(name, weight.data, ids, inputs))
    assert torch.equal(weight.rows(ids), expected)
    for part, back in zip(parts, unpack_parts(GROUPED_FORMATS[name], weight.data), strict=True):
        assert (part is None) == (back is None)
        assert part is None or torch.equal(back[:rows, : part.shape[1]], part)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 9, 33])
@pytest.mark.parametrize("inputs", [512, 640])
def test_the_product_is_that_of_the_values(name, tokens, inputs):
    weight, values, parts = drawn(name, 83, inputs)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(3)) * 2
    x[0, 3] = 40.0
    x64 = round_activations(x, name).double()
    # Code and zero point are multiplied apart, so a weight counts as the sum of both. On the way of a term lie a
    # rounding of each, K sums of both kinds, and a last one.
    size = values.abs()
    if parts.sub_minima is not None:
        group = GROUPED_FORMATS[name].group
        zeros = (parts.sub_minima.double() * parts.scales.double()).repeat_interleave(group, 1)
        size = size + 2 * zeros.abs()
    bound = (2 * inputs + 8) * UNIT * (x64.abs() @ size.T)
    error = (ops.linear(x, weight).double() - x64 @ values.T).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("name", FORMATS)
def test_token_alone_equals_the_token_in_a_batch(form, name):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    weight, _, _ = drawn(name, 83)
    x = torch.randn(41, 512, generator=torch.Generator().manual_seed(4))
    bits = ops.linear(x, weight)
    for count in (1, 2, 3, 4, 6, 7, 8, 9, 16):
        assert torch.equal(ops.linear(x[:count], weight), bits[:count])
    native.set_num_threads(2)
    assert torch.equal(ops.linear(x, weight), bits)


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_with_an_infinity_gives_nan_and_affects_no_other(name):
    weight, _, _ = drawn(name, 20)
    x = torch.ones(2, 512)
    x[1, 7] = torch.inf
    out = ops.linear(x, weight)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


def test_every_e4m3_number():
    codes = torch.arange(256, dtype=torch.uint8).masked_fill((torch.arange(256) & 127) == 127, 0).repeat(16, 1)
    weight = ops.QuantizedWeight(
        pack_parts(GROUPED_FORMATS["fp8"], Parts(codes, torch.ones(16, 2))), "fp8", (16, 256), torch.float32
    )
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(weight.rows(torch.arange(16)), expected)
    assert torch.equal(ops.linear(torch.eye(256), weight).T, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_one_expert_equals_a_feed_forward(form, name):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    sizes = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
    parts = {
        part: [drawn(name, *size, seed=10 * at + expert)[0] for expert in range(3)]
        for at, (part, size) in enumerate(sizes.items())
    }
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(5)) / 16
    chosen = torch.randint(0, 3, (40, 1), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    stacks = {part: ops.QuantizedExperts.stack(weights) for part, weights in parts.items()}
    got = ops.experts(x, chosen, torch.ones(40, 1), **stacks)
    for index in range(3):
        gate, up, down = (parts[part][index] for part in sizes)
        rows = x[chosen[:, 0] == index]
        hidden = ops.swiglu(ops.linear(rows, gate), ops.linear(rows, up))
        assert torch.equal(got[chosen[:, 0] == index], ops.linear(hidden, down))
