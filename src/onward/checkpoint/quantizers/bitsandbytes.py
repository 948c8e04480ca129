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
        codes = read("weight")
        if "SCB" in names:
            scale = read("SCB").float()
            if codes.dtype != torch.int8 or tuple(codes.shape) != shape or scale.shape != shape[:1]:
                raise ValueError(f"weight is {codes.dtype} {list(codes.shape)} with {list(scale.shape)} scales")
            return codes.float() * (scale / 127).unsqueeze(1)
        if codes.dtype != torch.uint8 or codes.numel() * 2 != shape[0] * shape[1]:
            raise ValueError(f"weight is {codes.dtype} {list(codes.shape)}, and must hold {shape[0] * shape[1]} fours")
        state = json.loads(bytes(read(next(name for name in _STATES if name in names)).tolist()))
        flat = codes.flatten()
        values = _table(read, "weight.quant_map", 16)[torch.stack((flat >> 4, flat & 15), dim=-1).flatten().long()]
        absmax = _absmax(read, names, state)
        return (values * absmax.repeat_interleave(int(state["blocksize"]))[: values.numel()]).view(shape)


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
