"""bitsandbytes: NF4 and FP4 (Dettmers et al., arXiv 2305.14314) and LLM.int8 (arXiv 2208.07339).

Tensors of a 4-bit module: weight uint8 [N * K / 2, 1], the first code in the high bits, or the same bytes in a wider
dtype (bnb_4bit_quant_storage); weight.absmax, one per run of 64; weight.quant_map, the 16 values;
weight.quant_state.bitsandbytes__nf4, JSON as bytes. If absmax is quantized too, it is given by weight.nested_absmax and
weight.nested_quant_map. Tensors of an 8-bit module: weight int8 [N, K] and SCB float [N]; weight_format tells whether
rows are in order.
"""

import json
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, QuantizationMethod, Read, words
from onward.checkpoint.formats.stored import Integers, Shape, StoredWeight, Table

_IGNORED = """
load_in_8bit load_in_4bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant
llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold
"""
# The tensors determine everything: which weights are quantized, to which values, in which runs and dtype.
FIELDS = Fields(read=frozenset(), ignored=words(_IGNORED))
_STORAGES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_TENSORS = {*_STATES} | words("""
weight SCB weight_format weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map
""")


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    return QuantizationMethod(_TENSORS, {"SCB", "weight.absmax"}, _decode)


def _decode(read: Read, names: Set[str], shape: Shape) -> StoredWeight:
    return (_rows if "SCB" in names else _blocks)(read, names, shape)


def _rows(read: Read, names: Set[str], shape: Shape) -> Integers:
    """8 bits."""
    if "weight_format" in names and bool(read("weight_format").any()):
        raise ValueError("weight_format is a GPU tile layout, and only row order is supported: save the model again")
    codes, scale = read("weight"), read("SCB").float()
    if codes.dtype != torch.int8 or tuple(codes.shape) != shape or scale.shape != shape[:1]:
        raise ValueError(f"weight is {codes.dtype} {list(codes.shape)} with {list(scale.shape)} scales")
    return Integers(codes.to(torch.int16) + 128, (scale / 127).unsqueeze(1), 128, shape[1])


def _blocks(read: Read, names: Set[str], shape: Shape) -> Table:
    """4 bits."""
    codes = read("weight")
    count = shape[0] * shape[1]
    if codes.dtype not in _STORAGES or codes.nbytes * 2 != count:
        raise ValueError(f"weight is {codes.dtype} {list(codes.shape)}, and must hold {count} 4-bit codes")
    codes = codes.contiguous().flatten().view(torch.uint8)
    state = json.loads(bytes(read(next(name for name in _STATES if name in names)).tolist()))
    if list(state.get("shape", shape)) != list(shape):
        raise ValueError(f"quant_state has shape {state['shape']}")
    block, absmax = int(state["blocksize"]), _absmax(read, names, state)
    if len(absmax) != -(-count // block):
        raise ValueError(f"{count} weights in runs of {block} do not match {len(absmax)} absmax")
    codes = torch.stack((codes >> 4, codes & 15), dim=-1).view(shape)
    return Table(codes, _table(read, "weight.quant_map", 16), absmax, block)


def _absmax(read: Read, names: Set[str], state: Mapping[str, Any]) -> Tensor:
    absmax = read("weight.absmax")
    if "weight.nested_absmax" not in names:
        return absmax.float()
    scales = read("weight.nested_absmax").float().repeat_interleave(int(state["nested_blocksize"]))
    offset = float(state["nested_offset"])
    return _table(read, "weight.nested_quant_map", 256)[absmax.long()] * scales[: len(absmax)] + offset


def _table(read: Read, name: str, count: int) -> Tensor:
    table = read(name).float()
    if table.shape != (count,):
        raise ValueError(f"{name} must hold {count} values; got {list(table.shape)}")
    return table
