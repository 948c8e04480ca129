"""Checkpoints quantized by other tools: the weights of every method equal its definition, number by number."""

import json

import pytest
import torch
from quantized_forms import (
    CT,
    FORMS,
    IDS,
    TORCHAO,
    awq,
    change_config,
    drawn,
    e4m3,
    fields,
    fp8_blocks,
    gptq,
    made,
    nf4,
    packed_ct,
    scales_of,
    torchao_int4,
    torchao_int8,
    torchao_integers,
)
from safetensors.torch import load_file, save_file

import onward
from onward.errors import CheckpointError, ConfigError
from onward.language_model import quantize_folder
from onward.models import marked_parts
from onward.ops import QuantizedWeight
from onward.ops.linear import stock_weight
from onward.ops.quantized_layout import NF4


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_the_float_weights(tmp_path, form):
    folder, twin = made(tmp_path, form)
    with pytest.warns(UserWarning, match="become floats as they are read"):
        lm = onward.load(folder)
    assert torch.equal(lm.logits(IDS), onward.load(twin).logits(IDS))


def test_quantized_weights_can_be_quantized_again(tmp_path):
    folder, twin = made(tmp_path, "gptq")
    ours, theirs = (onward.load(source, quantize="int8").logits(IDS) for source in (folder, twin))
    assert torch.equal(ours, theirs)


def test_a_requantized_folder_names_only_the_new_format(tmp_path):
    folder, twin = made(tmp_path, "gptq")
    quantize_folder(folder, tmp_path / "small", "int8")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert "onward_quantization" in config
    assert "quantization_config" not in config
    ours, theirs = onward.load(tmp_path / "small"), onward.load(twin, quantize="int8")
    assert torch.equal(ours.logits(IDS), theirs.logits(IDS))


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("awq", {"quant_method": "hqq"}, "'hqq'; supported are awq, gptq"),
        ("awq", {"bits": 3}, "got bits 3"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("gptq", {"bits": 5}, "GPTQ supports 2, 3, 4 and 8 bits; got 5"),
        ("gptq", {"checkpoint_format": "marlin"}, "got 'marlin'"),
        ("fp8", {"weight_block_size": 128}, "must be two sizes; got 128"),
        ("int-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ],
)
def test_unsupported_settings_are_named(tmp_path, form, settings, message):
    folder, _ = made(tmp_path, form)
    change_config(folder, **settings)
    with pytest.raises(ConfigError, match=message):
        onward.load(folder)


@pytest.mark.filterwarnings("ignore:.*become floats")
@pytest.mark.parametrize("form", FORMS)
def test_mismatched_parts_are_one_error(tmp_path, form):
    folder, _ = made(tmp_path, form)
    tensors = load_file(folder / "model.safetensors")
    parts = [
        name for name in tensors if ".layers.1.mlp.up_proj." in name and "shape" not in name and "state" not in name
    ]
    for name in parts:
        cut = tensors | {name: tensors[name].flatten()[:-1].clone()}
        save_file(cut, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"up_proj|missing"):
            onward.load(folder)


# ── in few bits ───────────────────────────────────────────────────────────────────────────────────────────────


def fp8_rows(outputs, inputs, seed):
    codes, scales = e4m3((outputs, inputs), seed), scales_of((outputs, 1), seed)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def nf4_of_bitsandbytes(outputs, inputs, seed):
    tensors, _ = nf4(outputs, inputs, seed, nested=True)
    tensors["weight.quant_map"] = table = torch.tensor(NF4)
    absmax = tensors["weight.nested_quant_map"][tensors["weight.absmax"].long()] * 0.01 + 0.03
    packed = tensors["weight"].flatten()
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten().long()
    return tensors, (table[codes] * absmax.repeat_interleave(64)).view(outputs, inputs)


def symmetric(outputs, inputs, seed, group):
    tensors, _ = gptq(outputs, inputs, seed, group=group)
    zeros = torch.full((inputs // group, outputs), 7)
    tensors["qzeros"] = fields(zeros, 4, 1)
    codes = drawn((inputs, outputs), 0, 16, seed)
    return tensors, ((codes.float() - 8) * tensors["scales"].float().repeat_interleave(group, 0)).T


GPTQ = {"quant_method": "gptq", "bits": 4}
HELD = {
    "awq": (*FORMS["awq"], "uint4"),
    "awq, groups of 128": (
        FORMS["awq"][0] | {"group_size": 128},
        lambda *shape: awq(*shape, group=128),
        "uint4_128",
    ),
    "gptq": (*FORMS["gptq"], "uint4"),
    "gptq, groups of 128": (GPTQ | {"group_size": 128}, lambda *shape: gptq(*shape, group=128), "uint4_128"),
    "gptq, one group": (GPTQ | {"group_size": -1}, lambda n, k, seed: gptq(n, k, seed, group=k), "uint4_128"),
    "gptq, symmetric": (GPTQ | {"group_size": 64}, lambda *shape: symmetric(*shape, group=64), "int4"),
    "gptq by activation": (*FORMS["gptq by activation"], "uint4"),
    "gptq of 8 bits": (
        FORMS["gptq 8 bits, v2"][0] | {"group_size": 128},
        lambda *shape: gptq(*shape, bits=8, group=128, added=0),
        "uint8_128",
    ),
    "gptq of 2 bits": (
        GPTQ | {"bits": 2, "group_size": 32},
        lambda *shape: gptq(*shape, bits=2),
        "uint4",
    ),
    "pack-quantized": (*FORMS["pack-quantized"], "int4"),
    "pack-quantized, zero points": (CT, lambda *shape: packed_ct(*shape, zero_points=True), "uint4"),
    "pack-quantized of 8 bits": (CT, lambda *shape: packed_ct(*shape, bits=8), "q8_0"),
    "int-quantized": (*FORMS["int-quantized"], "int8"),
    "float-quantized by row": (CT, fp8_rows, "fp8"),
    "nvfp4": (*FORMS["nvfp4"], "nvfp4"),
    "mxfp4": (*FORMS["mxfp4"], "mxfp4"),
    "fp8 by block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda *shape: fp8_blocks(*shape, block=(128, 128)),
        "fp8",
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4_of_bitsandbytes, "nf4"),
    "int8 of bitsandbytes": (*FORMS["int8 of bitsandbytes"], "int8"),
    "torchao, whole numbers": (*FORMS["torchao, whole numbers"], "uint4"),
    "torchao, groups of 128": (TORCHAO, lambda *shape: torchao_integers(*shape, 128, -120, 120), "uint8_128"),
    "torchao, int8": (*FORMS["torchao, int8"], "int8"),
    "torchao, float8": (*FORMS["torchao, float8"], "fp8"),
    "torchao, int4": (TORCHAO, lambda *shape: torchao_int4(*shape, shift=0.0), "int4"),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2}


def quantized(tmp_path, form):
    settings, quantize, format = HELD[form]
    return *made(tmp_path, (settings, quantize), WIDE), format


@pytest.mark.parametrize("form", HELD)
@pytest.mark.filterwarnings("error")
def test_weights_stay_quantized_without_loss(tmp_path, form):
    folder, twin, format = quantized(tmp_path, form)
    lm, floats = onward.load(folder, dtype="bfloat16"), onward.load(twin, dtype="float32")
    for layer, other in zip(lm.model.params.layers, floats.model.params.layers, strict=True):
        for part, stock in zip(marked_parts(layer), marked_parts(other), strict=True):
            assert part.weight.format == format
            exact = part.weight.to(dtype=torch.float32)
            assert torch.equal(exact.dequantize(), stock_weight(stock.weight))
            assert torch.equal(exact.rows(torch.tensor([3, 0])), stock_weight(stock.weight)[[3, 0]])
    assert lm.model.nbytes < floats.model.nbytes


@pytest.mark.parametrize("form", ["gptq by activation", "nf4", "fp8 by block"])
def test_a_program_equals_the_eager_forward(tmp_path, form):
    folder, _, _ = quantized(tmp_path, form)
    compiled, plain = (onward.load(folder, dtype="bfloat16", compile=how) for how in ("native", "eager"))
    assert compiled.generate(IDS, max_new_tokens=12).token_ids == plain.generate(IDS, max_new_tokens=12).token_ids
    assert torch.equal(compiled.logits(IDS), plain.logits(IDS))


def test_weights_without_a_packed_format_become_floats_with_a_warning(tmp_path):
    settings, quantize, _ = HELD["gptq"]

    def unheld(*shape):
        tensors, _ = quantize(*shape)
        tensors["scales"] = tensors["scales"].float() / 3  # no float16
        return tensors, torch.zeros(shape[:2])

    folder, _ = made(tmp_path, (settings, unheld), WIDE)
    with pytest.warns(UserWarning, match="14 weights quantized by gptq become floats"):
        lm = onward.load(folder, dtype="bfloat16")
    assert not any(isinstance(part.weight, QuantizedWeight) for part in marked_parts(lm.model.params))


def test_quantized_weights_can_be_requantized_and_merged(tmp_path):
    folder, twin, _ = quantized(tmp_path, "gptq by activation")
    ours, theirs = (onward.load(source, dtype="bfloat16") for source in (folder, twin))
    for format in ("int8", "int4"):
        assert torch.equal(onward.quantize(ours, format).logits(IDS), onward.quantize(theirs, format).logits(IDS))


def test_gpu_layouts_are_refused_with_advice(tmp_path):
    def tiles(outputs, inputs, seed):
        tensors, weight = torchao_int8(outputs, inputs, seed)
        del tensors["_weight_scale"]
        return tensors | {"_weight_scale_and_zero": torch.ones(inputs // 32, outputs, 2)}, weight

    folder, _ = made(tmp_path, (TORCHAO, tiles), WIDE)
    with pytest.raises(CheckpointError, match="no layouts of GPU kernels: save the model in floats"):
        onward.load(folder)
