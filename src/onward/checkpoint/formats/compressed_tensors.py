"""compressed-tensors (https://github.com/vllm-project/compressed-tensors); each tensor shows its own format.

Tensors of a module:
    pack-quantized   weight_packed int32 [N, ⌈K / ⌊32 / b⌋⌉], lowest bits first, each code plus 2^(b - 1);
                     weight_scale [N, K / g]; weight_zero_point packed likewise along N; weight_g_idx [K];
                     weight_shape
    int-quantized    weight int8 [N, K]; weight_scale [N, 1] or [N, K / g] or [1]; weight_zero_point
    float-quantized  weight float8_e4m3fn; weight_scale as above, or [⌈N / 128⌉, ⌈K / 128⌉] for blocks
    nvfp4            weight_packed uint8 [N, K / 2] of FP4; weight_scale float8_e4m3fn [N, K / 16]; weight_global_scale
    mxfp4            weight_packed uint8 [N, K / 2]; weight_scale uint8 [N, K / 32], exponents of 2 plus 127
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, QuantizationMethod, Read, words
from onward.checkpoint.formats.stored import (
    Float8,
    Integers,
    Mxfp4,
    Nvfp4,
    Shape,
    StoredWeight,
    inputs_per_scale,
    nibbles,
    scales_by_row,
    unpacked,
)

FIELDS = Fields(
    read=frozenset({"config_groups", "sparsity_config"}),
    # Schemes for the KV cache and activations are for kernels that round those.
    ignored=words("format kv_cache_scheme global_compression_ratio version use_optimized_inference"),
    refused={"transform_config": ({"config_groups": {}},)},
)
_TENSORS = words("""
weight weight_packed weight_scale weight_zero_point weight_shape weight_g_idx weight_global_scale input_scale
input_global_scale input_zero_point output_scale output_zero_point
""")


@dataclass(frozen=True)
class _Scheme:
    """block, groups: sizes of the blocks and groups that share a scale, if known. bits: widths of packed weights."""

    block: Shape | None
    bits: tuple[int, ...]
    groups: tuple[int, ...] = ()

    def decode(self, read: Read, names: Set[str], shape: Shape) -> StoredWeight:
        if "weight_packed" in names:
            packed = read("weight_packed")
            return _fp4(read, packed, shape) if packed.dtype == torch.uint8 else self._packed(read, names, shape)
        codes, scale = read("weight"), read("weight_scale").float()
        if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or tuple(codes.shape) != shape:
            got = f"{codes.dtype} {list(codes.shape)}"
            raise ValueError(f"weight must be int8 or float8_e4m3fn {list(shape)}; got {got}")
        by_rows, group = scales_by_row(scale, shape, self.block, self.groups)
        if codes.dtype == torch.float8_e4m3fn:
            return Float8(codes, by_rows, group)
        zeros = torch.full_like(by_rows, 128)
        if "weight_zero_point" in names:
            points = read("weight_zero_point").float()
            zeros = zeros + scales_by_row(points, shape, self.block, self.groups)[0]
        return Integers(codes.to(torch.int16) + 128, by_rows, zeros, group)

    def _packed(self, read: Read, names: Set[str], shape: Shape) -> Integers:
        packed, (outputs, inputs) = read("weight_packed"), shape
        bits = next((bits for bits in self.bits if packed.shape == (outputs, -(-inputs // (32 // bits)))), None)
        if bits is None:
            widths = " or ".join(map(str, self.bits))
            raise ValueError(f"weight_packed {list(packed.shape)} does not hold a {widths}-bit weight {list(shape)}")
        codes = unpacked(packed, bits, 1, is_stream=False)[:, :inputs]
        scale = read("weight_scale")
        if scale.dim() != 2 or scale.shape[0] != outputs:
            raise ValueError(f"weight_scale {list(scale.shape)} does not match a weight {list(shape)}")
        groups = torch.arange(inputs) // inputs_per_scale(scale.shape[1], inputs, self.groups)
        order = read("weight_g_idx").long() if "weight_g_idx" in names else groups
        if order.shape != (inputs,) or int(order.max()) >= scale.shape[1]:
            raise ValueError(f"weight_g_idx {list(order.shape)} does not assign a group to each of {inputs} inputs")
        # compressed-tensors marks an unset order with -1: inputs are then in order.
        groups = groups if int(order.min()) < 0 else order
        return Integers(codes, scale, _zeros(read, names, scale, bits), groups)


def _zeros(read: Read, names: Set[str], scale: Tensor, bits: int) -> Tensor:
    """Zero points of packed codes in the shape of the scales, offset by 2^(bits - 1) like the codes."""
    middle = 2 ** (bits - 1)
    if "weight_zero_point" not in names:
        return torch.full_like(scale, middle, dtype=torch.int32)
    zeros = read("weight_zero_point")
    # Older versions packed only the weight: zero points are integers around 0.
    is_plain = zeros.dtype == torch.int8
    zeros = zeros.int() + middle if is_plain else unpacked(zeros, bits, 0, is_stream=False)[: len(scale)]
    if zeros.shape != scale.shape:
        raise ValueError(f"weight_zero_point {list(zeros.shape)} does not match weight_scale {list(scale.shape)}")
    return zeros


def _fp4(read: Read, packed: Tensor, shape: Shape) -> StoredWeight:
    codes, scale = nibbles(packed), read("weight_scale")
    fits = shape[1] == 32 * scale.shape[1] if scale.dtype == torch.uint8 else shape[1] % scale.shape[1] == 0
    if tuple(codes.shape) != shape or scale.shape[0] != shape[0] or not fits:
        sizes = f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)}"
        raise ValueError(f"{sizes} do not hold a weight {list(shape)}")
    if scale.dtype == torch.uint8:
        return Mxfp4(packed, scale)
    return Nvfp4(codes, scale, read("weight_global_scale"))


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError(f"sparse weights are not supported; got sparsity_config {settings['sparsity_config']!r}")
    groups, complete = _schemes(settings.get("config_groups"))
    block = next((group["block_structure"] for group in groups if group.get("block_structure")), None)
    # 7-bit codes are packed into as many integers as 8-bit codes: only config.json tells them apart.
    widths = dict.fromkeys(group["num_bits"] for group in groups if group.get("num_bits"))
    if wrong := [bits for bits in widths if not isinstance(bits, int) or not 1 < bits <= 16]:
        raise ValueError(f"num_bits must be an integer from 2 to 8; got {wrong[0]!r}")
    packed = tuple(bits for bits in widths if bits <= 8)
    sizes = tuple(dict.fromkeys(group["group_size"] for group in groups if group.get("group_size") not in (None, -1)))
    if wrong := [each for each in sizes if type(each) is not int or each < 1]:
        raise ValueError(f"group_size must be a positive integer; got {wrong[0]!r}")
    if not complete:
        packed, sizes = tuple(dict.fromkeys((*packed, 4, 8, 2))), ()
    scheme = _Scheme(_block(block), packed or (4, 8, 2), sizes)
    return QuantizationMethod(_TENSORS, {"weight_scale", "weight_packed"}, scheme.decode)


def _schemes(config_groups: Any) -> tuple[list[Mapping[str, Any]], bool]:
    """The weight scheme of each group, and whether all groups have one: others may be a preset ("W4A16")."""
    config_groups = config_groups or {}
    if not isinstance(config_groups, Mapping):
        raise ValueError(f"config_groups must be an object; got {config_groups!r}")
    schemes: list[Mapping[str, Any]] = []
    for name, group in config_groups.items():
        if isinstance(group, list):
            continue
        weights = group.get("weights") or {} if isinstance(group, Mapping) else group
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups: {name!r} must describe the weights; got {weights!r}")
        schemes.append(weights)
    return schemes, len(schemes) == len(config_groups)


def _block(structure: Any) -> Shape | None:
    if structure is None:
        return None
    sizes = structure.split("x") if isinstance(structure, str) else structure
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(part).isdecimal() and int(part) for part in sizes):
        raise ValueError(f"block_structure must be two sizes; got {structure!r}")
    return int(sizes[0]), int(sizes[1])
