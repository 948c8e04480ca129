"""bitsandbytes: NF4 and FP4 (Dettmers et al., arXiv 2305.14314) and LLM.int8 (arXiv 2208.07339).

Tensors of a module in 4 bits: weight uint8 [N * K / 2, 1], the first number in the high bits; weight.absmax, of each
run of 64; weight.quant_map, the 16 values; weight.quant_state.bitsandbytes__nf4, JSON as bytes. Where absmax is
quantized, too, weight.nested_absmax and weight.nested_quant_map give it. In 8 bits: weight int8 [N, K] and SCB float
[N].
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.quantizers import held
from onward.ops import QuantizedWeight

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_TENSORS = {
    *("weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax"),
    *("weight.nested_quant_map", *_STATES),
}


@dataclass(frozen=True)
class BitsAndBytes:
    """Each tensor shows whether it has 4 or 8 bits."""

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if names & {"SCB", "weight.absmax"} else set()

    def weight(self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int]) -> Tensor:
        if "SCB" in names:
            codes, scale = _rows(read, shape)
            return codes.float() * scale.unsqueeze(1)
        codes, values, absmax, block = _blocks(read, names, shape)
        return (values[codes.long()] * absmax.repeat_interleave(block)[: codes.numel()]).view(shape)

    def held(
        self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        if "SCB" in names:
            codes, scale = _rows(read, shape)
            return held.integers(codes.to(torch.int16) + 128, scale.unsqueeze(1), 128, shape[1], dtype)
        codes, values, absmax, block = _blocks(read, names, shape)
        if shape[1] % block:
            return None  # a block goes on in the next row
        return held.nf4(codes.view(shape), values, absmax.view(shape[0], -1), block, dtype)


def _rows(read: Callable[[str], Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """8 bits: codes int8 [N, K] and float32 scales [N]."""
    codes, scale = read("weight"), read("SCB").float()
    if codes.dtype != torch.int8 or tuple(codes.shape) != shape or scale.shape != shape[:1]:
        raise ValueError(f"weight is {codes.dtype} {list(codes.shape)} with {list(scale.shape)} scales")
    return codes, scale / 127


def _blocks(
    read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """4 bits: codes uint8 [N * K], the 16 values, float32 absmax of each run, and how long a run is."""
    codes = read("weight")
    if codes.dtype != torch.uint8 or codes.numel() * 2 != shape[0] * shape[1]:
        raise ValueError(f"weight is {codes.dtype} {list(codes.shape)}, and must hold {shape[0] * shape[1]} fours")
    state = json.loads(bytes(read(next(name for name in _STATES if name in names)).tolist()))
    flat, block = codes.flatten(), int(state["blocksize"])
    absmax = _absmax(read, names, state)
    if len(absmax) != -(-shape[0] * shape[1] // block):
        raise ValueError(f"{shape[0] * shape[1]} weights in runs of {block} do not have {len(absmax)} absmax")
    return torch.stack((flat >> 4, flat & 15), dim=-1).flatten(), _table(read, "weight.quant_map", 16), absmax, block


def _absmax(read: Callable[[str], Tensor], names: set[str], state: Mapping[str, Any]) -> Tensor:
    absmax = read("weight.absmax")
    if "weight.nested_absmax" not in names:
        return absmax.float()
    scales = read("weight.nested_absmax").float().repeat_interleave(int(state["nested_blocksize"]))
    return _table(read, "weight.nested_quant_map", 256)[absmax.long()] * scales[: len(absmax)] + float(
        state["nested_offset"]
    )


def _table(read: Callable[[str], Tensor], name: str, count: int) -> Tensor:
    table = read(name).float()
    if table.shape != (count,):
        raise ValueError(f"{name} must hold {count} values; got {list(table.shape)}")
    return table


def read_method(settings: Mapping[str, Any]) -> BitsAndBytes:
    return BitsAndBytes()
