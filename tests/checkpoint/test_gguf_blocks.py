"""Dequantized bits equal those of llama.cpp's own package, for every type."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import TYPES, blocks_of, scales_at
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.checkpoint.gguf.blocks import dequantized, grouped_format, read_parts, scales_are_finite
from onward.checkpoint.gguf.reader import TYPES as BLOCK_TYPES

BY_NAME = {block.name: block for block in BLOCK_TYPES.values()}


def bits(values) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def assert_same_bits(type: str, raw: np.ndarray) -> None:
    ours = dequantized(BY_NAME[type], torch.from_numpy(raw)).numpy()
    with np.errstate(all="ignore"):  # numpy warns of infinities
        theirs = gguf.quants.dequantize(raw, Kind[type]).astype(np.float32)
    assert ours.shape == theirs.shape
    number = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~number)
    assert np.array_equal(bits(ours)[number], bits(theirs)[number])


def test_every_type_has_the_name_and_size_of_the_gguf_package():
    for number, block in BLOCK_TYPES.items():
        assert Kind(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (block.weights, block.size)
    assert set(BY_NAME) == set(TYPES)


@pytest.mark.parametrize("type", TYPES)
def test_realistic_weights(type):
    raw = (
        blocks_of(type, (5, 512))
        if type not in ("F32", "F16", "BF16")
        else gguf.quantize(np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32), Kind[type])
    )
    assert_same_bits(type, raw.view(np.uint8))


@pytest.mark.parametrize("type", TYPES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_bytes(type, data):
    size = BY_NAME[type].size
    raw = np.frombuffer(data.draw(st.binary(min_size=4 * size, max_size=4 * size)), np.uint8).reshape(2, 2 * size)
    assert_same_bits(type, raw.copy())


@pytest.mark.parametrize("type", [type for type in TYPES if scales_at(type) and BY_NAME[type].weights > 1])
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.5, 6e-8, 65504.0])
def test_extreme_scales(type, scale):
    raw = blocks_of(type, (2, 256)).reshape(-1, BY_NAME[type].size)
    for at in scales_at(type):
        raw[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    assert_same_bits(type, raw.reshape(2, -1))


@pytest.mark.parametrize("type", [type for type in TYPES if BY_NAME[type].weights > 1])
def test_nonfinite_scales_are_detected(type):
    raw = torch.from_numpy(blocks_of(type, (3, 256)))
    assert scales_are_finite(BY_NAME[type], read_parts(BY_NAME[type], raw))
    for at in scales_at(type) or (0,):
        for bad in (np.inf, -np.inf, np.nan):
            spoilt = raw.clone().view(-1, BY_NAME[type].size)
            exponent = grouped_format(BY_NAME[type]).exponent
            number = np.array([255], np.uint8) if exponent else np.array([bad], np.float16).view(np.uint8)
            spoilt[-1, at : at + len(number)] = torch.from_numpy(number)
            assert not scales_are_finite(BY_NAME[type], read_parts(BY_NAME[type], spoilt.view(3, -1)))
