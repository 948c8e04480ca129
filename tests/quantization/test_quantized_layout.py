"""The packed bytes are where docs/quantized-checkpoints.md says. tests/native reads them with the kernels."""

import struct

import pytest
import torch
from hypothesis import given
from quantized_cases import FORMATS, SHAPES, documented_functions, integers, packed

from onward.errors import RequestError
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import data_shape, pack


@pytest.mark.parametrize("format", FORMATS)
@given(shape=SHAPES)
def test_unpacking_inverts_packing(format, shape):
    q, scales = integers(format, *shape)
    weight = QuantizedWeight.pack(format, q, scales)
    assert weight.data.shape == data_shape(format, shape)
    assert all(torch.equal(*pair) for pair in zip(weight.unpack(), (q, scales), strict=True))


@given(shape=SHAPES)
def test_int8_bytes_have_the_documented_layout(shape):
    q, scales = integers("int8", *shape)
    data = bytes(pack("int8", q, scales).flatten().tolist())
    block = 64 + -(-shape[1] // 4) * 64
    for n in range(shape[0]):
        start = n // 16 * block
        assert struct.unpack_from("<f", data, start + n % 16 * 4) == (scales[n].item(),)
        for k in range(shape[1]):
            assert data[start + 64 + k // 4 * 64 + n % 16 * 4 + k % 4] == q[n, k] + 128


@pytest.mark.parametrize(("format", "offset"), [("int4", 8), ("iq4_nl", 0)])
@given(shape=SHAPES)
def test_bits_have_the_documented_layout(format, offset, shape):
    q, scales = integers(format, *shape)
    data = bytes(pack(format, q, scales).flatten().tolist())
    block = -(-shape[1] // 64) * 576
    for n in range(shape[0]):
        for k in range(shape[1]):
            pair = n // 16 * block + k // 64 * 576
            assert struct.unpack_from("<e", data, pair + k % 64 // 32 * 32 + n % 16 * 2) == (scales[n, k // 32].item(),)
            byte = data[pair + 64 + k % 64 // 8 * 64 + n % 16 * 4 + k % 4]
            assert (byte >> 4 * (k % 8 // 4)) & 15 == q[n, k] + offset


@pytest.mark.parametrize("format", FORMATS)
@given(shape=SHAPES)
def test_padding_of_a_block_has_no_effect(format, shape):
    rows, inputs = shape
    weight = packed(format, rows, inputs)
    whole = (-(-rows // 16) * 16, -(-inputs // 64) * 64 if format != "int8" else -(-inputs // 4) * 4)
    q, scales = QuantizedWeight(weight.data, format, whole, torch.float32).unpack()
    filling = 8 if format == "iq4_nl" else 0
    assert bool((q[rows:] == filling).all())
    assert bool((q[:, inputs:] == filling).all())
    assert not scales[rows:].any()


def random_bytes(count, seed=0):
    return bytes(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def random_scales(count):
    return torch.rand(count, generator=torch.Generator().manual_seed(1)).to(torch.float16).tolist()


def test_the_documented_converter_converts_q4_0():
    """Blocks of Q4_0 as llama.cpp defines them: a float16 d, then 16 bytes, low halves first; value d * (q - 8)."""
    rows, groups = 17, 3
    scales, raw = random_scales(rows * groups), random_bytes(rows * groups * 16)
    blocks = [(d, raw[16 * i : 16 * i + 16]) for i, d in enumerate(scales)]
    expected = [d * (q - 8) for d, block in blocks for q in [b & 15 for b in block] + [b >> 4 for b in block]]
    raw_blocks = b"".join(struct.pack("<e", d) + block for d, block in blocks)
    weight = documented_functions()["from_q4_0"](raw_blocks, rows, groups * 32)
    assert weight.dequantize().flatten().tolist() == expected


def test_the_documented_converter_converts_q8_0():
    """Blocks of Q8_0: a float16 d, then 32 signed bytes. int8 rounds them again, by half a step at most."""
    rows, groups = 17, 3
    scales, raw = random_scales(rows * groups), random_bytes(rows * groups * 32)
    expected = torch.tensor(
        [d * (b - 256 if b > 127 else b) for d, b in zip([d for d in scales for _ in range(32)], raw, strict=True)]
    )
    raw_blocks = b"".join(struct.pack("<e", d) + raw[32 * i : 32 * i + 32] for i, d in enumerate(scales))
    weight = documented_functions()["from_q8_0"](raw_blocks, rows, groups * 32)
    expected = expected.view(rows, groups * 32)
    step = expected.abs().amax(1, keepdim=True) / 127
    # and the float32 roundings of the scale, the quotient and the product, each of a number up to absmax
    assert bool(((weight.dequantize() - expected).abs() <= step * (0.5 + 127 * 3 * 2.0**-24)).all())


@pytest.mark.parametrize(
    ("format", "q", "scales", "complaint"),
    [
        ("int3", torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 1), "as 'int8', 'int4' or 'iq4_nl'; got 'int3'"),
        ("int8", torch.zeros(2, 3), torch.zeros(2, 1), r"int8 \[N, K\].*got q torch.float32 \[2, 3\]"),
        ("int8", torch.zeros(6, dtype=torch.int8), torch.zeros(6, 1), r"int8 \[N, K\].*\[6\]"),
        ("int8", torch.zeros(0, 3, dtype=torch.int8), torch.zeros(0, 1), r"int8 \[N, K\].*\[0, 3\]"),
        ("int8", torch.zeros(1, 65537, dtype=torch.int8), torch.zeros(1, 1), "1 … 65536 inputs"),
        ("int8", torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2), r"float32 \[2, 1\]; got scales .* \[2\]"),
        ("int4", torch.zeros(2, 33, dtype=torch.int8), torch.zeros(2, 2), r"float16 \[2, 2\]; got .*float32"),
        ("int4", torch.zeros(2, 33, dtype=torch.int8), torch.zeros(2, 1).half(), r"float16 \[2, 2\]; got .*\[2, 1\]"),
    ],
)
def test_arrays_that_fit_no_format_are_refused(format, q, scales, complaint):
    with pytest.raises(RequestError, match=complaint):
        QuantizedWeight.pack(format, q, scales)
