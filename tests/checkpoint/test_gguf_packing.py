"""Blocks become packed weights without loss, with the product of the dequantized values in every form of the ops."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import TYPES, blocks_of, dequantized, scales_at, write_model

import onward
from onward import native, ops
from onward.checkpoint.gguf.blocks import grouped_format, pack_blocks, read_parts
from onward.checkpoint.gguf.reader import TYPES as BLOCK_TYPES
from onward.errors import CheckpointError
from onward.ops.quantized import round_activations
from onward.ops.quantized_layout import pack_parts, unpack_parts
from tiny_checkpoint import refused

BLOCKS = {block.name: block for block in BLOCK_TYPES.values() if block.weights > 1}
UNIT = 2.0**-24  # of float32: half the distance of neighbours, relatively


@pytest.fixture(params=["definition", *native.available_isas()])
def form(request):
    before = ops.choice()
    ops.choose(request.param)
    yield request.param
    ops.choose("definition" if before.form == "definition" else before.isa)


def drawn(type: str, rows: int = 37, inputs: int = 512, seed: int = 0) -> tuple[np.ndarray, ops.QuantizedWeight]:
    raw = blocks_of(type, (rows, inputs), seed)
    return raw, pack_blocks(BLOCKS[type], torch.from_numpy(raw), torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("inputs", [256, 1280])
def test_packed_weights_equal_the_gguf_package_bit_for_bit(form, type, inputs):
    raw, weight = drawn(type, 37, inputs)
    expected = dequantized(raw, type)
    assert same_bits(weight.dequantize(), expected)
    ids = torch.tensor([[36, 0], [5, 5]])
    assert same_bits(weight.rows(ids), expected[ids])


@pytest.mark.parametrize("type", BLOCKS)
def test_any_bits_of_a_block(form, type):
    """Every code and every small scale; the float16 numbers stay finite."""
    raw = np.random.default_rng(1).integers(0, 256, (16, 4 * BLOCKS[type].size), dtype=np.uint8)
    blocks = raw.reshape(-1, BLOCKS[type].size)
    for at in scales_at(type):
        blocks[:, at + 1] &= 0xBF  # not the highest exponents
    if type == "MXFP4":
        blocks[:, 0] = np.arange(len(blocks)) % 3  # the subnormal ones, too
    weight = pack_blocks(BLOCKS[type], torch.from_numpy(raw), torch.float32)
    assert same_bits(weight.dequantize(), torch.from_numpy(gguf.quants.dequantize(raw, Kind[type])))
    assert same_bits(weight.rows(torch.arange(16)), weight.dequantize())


@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_every_isa_packs_the_same_bytes(form, type, rows):
    inputs = 96 if BLOCKS[type].weights == 32 else 768  # no whole number of units where that can be
    raw, weight = drawn(type, rows, inputs)
    parts = read_parts(BLOCKS[type], torch.from_numpy(raw))
    layout = grouped_format(BLOCKS[type])
    assert torch.equal(weight.data, pack_parts(layout, parts))
    for part, back in zip(parts, unpack_parts(layout, weight.data), strict=True):
        assert (part is None) == (back is None)
        assert part is None or torch.equal(back[:rows, : part.shape[1]], part)


def exact_and_bound(x: torch.Tensor, weight: ops.QuantizedWeight, type: str, raw: np.ndarray):
    """In float64: the product of the rounded x, and how far float32 may be from it.

    A weight is a scale times a code less a minimum, so its size counts as the sum of both. On the way of a term lie a
    rounding of each, K sums of both kinds, and a last one.
    """
    layout = grouped_format(BLOCKS[type])
    parts = read_parts(BLOCKS[type], torch.from_numpy(raw))
    w64 = weight.dequantize().double()
    minima = torch.zeros_like(w64)
    if parts.minima is not None:
        zero = parts._replace(codes=torch.zeros_like(parts.codes))
        from onward.ops.quantized_layout import grouped_values

        minima = grouped_values(layout, zero).double()
    x64 = round_activations(x, weight.format).double()
    size = x64.abs() @ ((w64 - minima).abs() + minima.abs()).T
    return x64 @ w64.T, (2 * x.shape[1] + 8) * UNIT * size


@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 33])
def test_the_product_is_that_of_the_values(form, type, tokens):
    raw, weight = drawn(type, 83, 512)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(3)) * 2
    x[0, 3] = 40.0
    exact, bound = exact_and_bound(x, weight, type, raw)
    error = (ops.linear(x, weight).double() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("type", [type for type in BLOCKS if BLOCKS[type].weights == 32])
def test_an_odd_number_of_groups(form, type):
    raw, weight = drawn(type, 20, 160)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(3))
    exact, bound = exact_and_bound(x, weight, type, raw)
    assert bool(((ops.linear(x, weight).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("type", BLOCKS)
def test_a_token_alone_equals_the_token_in_a_batch(form, type):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    _, weight = drawn(type, 83, 512)
    x = torch.randn(41, 512, generator=torch.Generator().manual_seed(4))
    bits = ops.linear(x, weight)
    for count in (1, 2, 3, 6, 7, 8, 9, 16):
        assert torch.equal(ops.linear(x[:count], weight), bits[:count])
    threads = native.num_threads()
    native.set_num_threads(2)
    assert torch.equal(ops.linear(x, weight), bits)
    native.set_num_threads(threads)


@pytest.mark.parametrize("type", BLOCKS)
def test_a_token_with_an_infinity_gives_nan(form, type):
    _, weight = drawn(type, 20, 256)
    x = torch.ones(2, 256)
    x[1, 7] = torch.inf
    out = ops.linear(x, weight)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("type", BLOCKS)
def test_infinite_scales_are_refused(form, type):
    raw = blocks_of(type, (20, 256)).reshape(-1, BLOCKS[type].size)
    at = (scales_at(type) or (0,))[-1]
    bad = np.array([255], np.uint8) if type == "MXFP4" else np.array([np.inf], np.float16).view(np.uint8)
    raw[-1, at : at + len(bad)] = bad
    with refused(CheckpointError, "not finite"):
        pack_blocks(BLOCKS[type], torch.from_numpy(raw.reshape(20, -1)), torch.float32)


@pytest.mark.parametrize("type", BLOCKS)
def test_packed_weights_are_hardly_larger_than_their_blocks(type):
    _, weight = drawn(type, 64, 1024)
    size = 64 * 1024 // BLOCKS[type].weights * BLOCKS[type].size
    assert size <= weight.nbytes <= size * {"MXFP4": 1.0, "IQ4_XS": 1.03, "Q2_K": 1.28, "Q3_K": 1.06}.get(type, 1.03)


@pytest.mark.parametrize("type", TYPES)
def test_a_model_computes_with_its_packed_weights(tmp_path, type):
    """In bfloat16 matrices stay packed. Against float32 the greedy tokens of a random model mean little, so the logits
    are held to the rounding of activations to 8 bits, of which each layer has four."""
    write_model(tmp_path / "m.gguf", "llama", type)
    packed, exact = (onward.load(tmp_path / "m.gguf", dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert isinstance(packed.model.params.lm_head.weight, ops.QuantizedWeight) == (type in BLOCKS)
    ids = list(range(5, 45))
    a, b = packed.logits(ids).float(), exact.logits(ids)
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.99
