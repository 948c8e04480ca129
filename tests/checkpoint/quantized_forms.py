"""Quantized checkpoints as other libraries write them, each with the same weights in floats."""

import json

import torch
from safetensors.torch import load_file, save_file

from onward.testing import random_checkpoint

IDS = [1, 17, 99, 3, 42, 8]
SHAPES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def drawn(shape, low, high, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(shape, seed):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5) * 0.02


def fields(values, bits, dim, order=None):
    """int32: whole numbers packed along `dim`, written out number by number."""
    each = 32 // bits
    size = list(values.shape)
    size[dim] //= each
    packed = torch.zeros(size, dtype=torch.int64)
    for place in range(each):
        taken = values[place::each] if dim == 0 else values[:, place::each]
        at = place if order is None else order.index(place)
        packed |= taken.long() << (bits * at)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


# Each returns the tensors of a module [N, K] and the weight that they stand for.


def awq(outputs, inputs, seed, group=32):
    codes, zeros = drawn((inputs, outputs), 0, 16, seed), drawn((inputs // group, outputs), 0, 16, seed + 1)
    scales = scales_of((inputs // group, outputs), seed).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    weight = torch.empty(outputs, inputs)
    for k in range(inputs):
        weight[:, k] = (codes[k] - zeros[k // group]) * scales[k // group].float()
    packed = {"qweight": fields(codes, 4, 1, order), "qzeros": fields(zeros, 4, 1, order), "scales": scales}
    return packed, weight


def gptq(outputs, inputs, seed, bits=4, group=32, ordered=False, added=1):
    codes = drawn((inputs, outputs), 0, 2**bits, seed)
    zeros = drawn((inputs // group, outputs), 0, 2**bits, seed + 1)
    scales = scales_of((inputs // group, outputs), seed).half()
    groups = torch.arange(inputs) // group
    tensors = {"qweight": fields(codes, bits, 0), "qzeros": fields(zeros, bits, 1), "scales": scales}
    if ordered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        tensors["g_idx"] = groups.to(torch.int32)
    weight = torch.empty(outputs, inputs)
    for k in range(inputs):
        zero = (zeros[groups[k]] + added) % 2**bits  # stored in as many bits: all ones are 0
        weight[:, k] = (codes[k] - zero) * scales[groups[k]].float()
    return tensors, weight


def packed_ct(outputs, inputs, seed, bits=4, zero_points=False, group=32):
    codes = drawn((outputs, inputs), 0, 2**bits, seed)
    scales = scales_of((outputs, inputs // group), seed).bfloat16()
    zeros = torch.full((outputs, inputs // group), 2 ** (bits - 1))
    tensors = {
        "weight_packed": fields(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zero_points:
        zeros = drawn(tuple(zeros.shape), 0, 2**bits, seed + 1)
        tensors["weight_zero_point"] = fields(zeros, bits, 0)
    weight = torch.empty(outputs, inputs)
    for k in range(inputs):
        weight[:, k] = (codes[:, k] - zeros[:, k // group]) * scales[:, k // group].float()
    return tensors, weight


def int8_rows(outputs, inputs, seed):
    codes, scales = drawn((outputs, inputs), -128, 128, seed).to(torch.int8), scales_of((outputs, 1), seed)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def e4m3(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def fp8_blocks(outputs, inputs, seed, block=(48, 40), name="weight_scale_inv"):
    codes = e4m3((outputs, inputs), seed)
    scales = scales_of((-(-outputs // block[0]), -(-inputs // block[1])), seed)
    weight = torch.empty(outputs, inputs)
    for n in range(outputs):
        for first in range(0, inputs, block[1]):
            part = slice(first, first + block[1])
            weight[n, part] = codes[n, part].float() * scales[n // block[0], first // block[1]]
    return {"weight": codes, name: scales}, weight


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(outputs, inputs, seed, kind):
    codes = drawn((outputs, inputs), 0, 16, seed)
    values = torch.tensor([FP4[code & 7] * (-1 if code & 8 else 1) for code in codes.flatten().tolist()])
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    group = 32 if kind == "mxfp4" else 16
    if kind == "mxfp4":
        scales = drawn((outputs, inputs // group), 115, 122, seed).to(torch.uint8)
        factors = 2.0 ** (scales.float() - 127)
        tensors = {"weight_packed": packed, "weight_scale": scales}
    else:
        scales = (torch.rand(outputs, inputs // group, generator=torch.Generator().manual_seed(seed)) + 1).to(
            torch.float8_e4m3fn
        )
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([40.0])}
        factors = scales.float() / 40.0
    return tensors, values.view(outputs, inputs) * factors.repeat_interleave(group, dim=1)


def nf4(outputs, inputs, seed, nested):
    codes = drawn((outputs * inputs,), 0, 16, seed)
    table = torch.linspace(-1, 1, 16)
    absmax = scales_of((outputs * inputs // 64,), seed)
    state = {"blocksize": 64, "quant_type": "nf4", "shape": [outputs, inputs]}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1), "weight.quant_map": table}
    if nested:
        levels = torch.linspace(-1, 1, 256)
        small = drawn((len(absmax),), 0, 256, seed)
        outer = torch.full((-(-len(absmax) // 256),), 0.01)
        state |= {"nested_blocksize": 256, "nested_offset": 0.03}
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": levels}
        tensors["weight.absmax"] = small.to(torch.uint8)
        absmax = levels[small] * 0.01 + 0.03
    else:
        tensors["weight.absmax"] = absmax
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (table[codes] * absmax.repeat_interleave(64)).view(outputs, inputs)


def int8_bnb(outputs, inputs, seed):
    codes, scales = drawn((outputs, inputs), -127, 128, seed).to(torch.int8), scales_of((outputs,), seed) * 127
    return {"weight": codes, "SCB": scales}, codes.float() * (scales / 127).unsqueeze(1)


def torchao_integers(outputs, inputs, seed, group, low=-8, high=8):
    codes = drawn((outputs, inputs), low, high, seed)
    scales = scales_of((outputs, inputs // group), seed).bfloat16()
    zeros = drawn(tuple(scales.shape), -3, 4, seed + 1).to(torch.int8)
    weight = torch.empty(outputs, inputs)
    for k in range(inputs):
        weight[:, k] = (codes[:, k] - zeros[:, k // group].float()) * scales[:, k // group].float()
    tensors = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales, "_weight_zero_point": zeros}
    return tensors, weight


def torchao_int8(outputs, inputs, seed):
    tensors, weight = int8_rows(outputs, inputs, seed)
    zeros = torch.zeros(outputs, 1, dtype=torch.int8)
    return {
        "_weight_qdata": tensors["weight"],
        "_weight_scale": tensors["weight_scale"],
        "_weight_zero_point": zeros,
    }, weight


def torchao_float8(outputs, inputs, seed):
    codes, scales = e4m3((outputs, inputs), seed), scales_of((outputs, 1), seed)
    return {"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * scales


def torchao_int4(outputs, inputs, seed, group=32, shift=0.01):
    codes = drawn((outputs, inputs), -8, 8, seed)
    scales = scales_of((inputs // group, outputs), seed).bfloat16()
    zeros = torch.full_like(scales, shift)
    packed = ((codes[:, ::2] & 15) | codes[:, 1::2] << 4).to(torch.int8)
    weight = torch.empty(outputs, inputs)
    for k in range(inputs):
        weight[:, k] = codes[:, k] * scales[k // group].float() + zeros[k // group].float()
    return {"_weight_qdata": packed, "_weight_scale": scales, "_weight_zero_point": zeros}, weight


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
CT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"block_structure": [48, 40]}}}}
FORMS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "gptq by activation": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda *shape: gptq(*shape, ordered=True),
    ),
    "gptq 8 bits, v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
        lambda *shape: gptq(*shape, bits=8, group=64, added=0),
    ),
    "pack-quantized": (CT, packed_ct),
    "pack-quantized, zero points": (CT, lambda *shape: packed_ct(*shape, bits=8, zero_points=True)),
    "int-quantized": (CT, int8_rows),
    "float-quantized by block": (CT, lambda *shape: fp8_blocks(*shape, name="weight_scale")),
    "nvfp4": (CT, lambda *shape: fp4(*shape, kind="nvfp4")),
    "mxfp4": (CT, lambda *shape: fp4(*shape, kind="mxfp4")),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8_blocks),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda *shape: nf4(*shape, nested=False)),
    "nf4, absmax quantized": ({"quant_method": "bitsandbytes"}, lambda *shape: nf4(*shape, nested=True)),
    "int8 of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_bnb),
    "torchao, whole numbers": (TORCHAO, lambda *shape: torchao_integers(*shape, group=32)),
    "torchao, int8": (TORCHAO, torchao_int8),
    "torchao, float8": (TORCHAO, torchao_float8),
    "torchao, int4": (TORCHAO, torchao_int4),
}


def made(tmp_path, form, shapes=SHAPES):
    """A checkpoint quantized in a form, and its twin in floats."""
    settings, quantize = FORMS[form] if isinstance(form, str) else form
    twin = random_checkpoint(tmp_path / "twin", "llama", **shapes)
    tensors, floats = {}, load_file(twin / "model.safetensors")
    for seed, (name, weight) in enumerate(sorted(floats.items())):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith(LINEARS):
            parts, floats[name] = quantize(*weight.shape, seed)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, twin / "model.safetensors")
    folder = tmp_path / "quantized"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((twin / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder, twin


def change_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
