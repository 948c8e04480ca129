"""Weights by stock name -> the tensors of a GGUF file, as llama.cpp's converter makes them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.config import head_dim_of
from onward.checkpoint.gguf.exporting_families import Written
from onward.checkpoint.gguf.exporting_rope import rope_tensors
from onward.checkpoint.gguf.names import gguf_name
from onward.checkpoint.gguf.writer import Stored
from onward.errors import RequestError
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import GROUP

# Formats of ours -> types of the same numbers.
_BLOCKS = {"int4": "Q4_0", "iq4_nl": "IQ4_NL"}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def model_tensors(
    written: Written, fields: Mapping[str, Any], weights: Mapping[str, Tensor | QuantizedWeight]
) -> dict[str, Stored]:
    """The weights by GGUF's names, and the tensors that RoPE has. int4 becomes Q4_0 and iq4_nl IQ4_NL, which hold the
    same numbers.

    Args:
        written: the line of the model.
        fields: `Written.fields`.
        weights: by stock name.

    Raises:
        RequestError: int8, or 4 bits whose rows are no whole groups: no type of GGUF holds these; or experts of several
            types.
    """
    head_dim = head_dim_of(fields)
    assert head_dim is not None, "an architecture was made of the config"
    if written.needs_head:
        weights = {**weights, "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}
    tensors: dict[str, Stored] = {}
    experts: dict[str, list[Stored]] = {}
    for name, weight in weights.items():
        place = gguf_name(name, written.family)
        if place.tensors == (name,):
            raise RequestError(f"GGUF has no name for {name!r} in this family")
        (tensor,) = place.tensors
        stored = _stored(name, weight)
        order = written.family.order(name, {**fields, "head_dim": head_dim}, stored.shape[0])
        if order.rows is not None:
            stored = stored._replace(data=torch.empty_like(stored.data).index_copy_(0, order.rows, stored.data))
        if place.expert is None:
            tensors[tensor] = stored
        else:
            experts.setdefault(tensor, []).append(stored)
    return tensors | {name: _stacked(name, parts) for name, parts in experts.items()} | rope_tensors(fields, head_dim)


def _stored(name: str, weight: Tensor | QuantizedWeight) -> Stored:
    """Blocks row by row, matrices as they are, and vectors and biases as float32, in which llama.cpp computes them."""
    if isinstance(weight, Tensor):
        if weight.dim() == 1 or name.endswith(".bias"):
            weight = weight.to(torch.float32)
        return Stored(_FLOATS[weight.dtype], tuple(weight.shape), weight.contiguous())
    rows, inputs = weight.shape
    if weight.format not in _BLOCKS or inputs % GROUP:
        raise RequestError(
            f"{name} is {weight.format} {[rows, inputs]}, which no type of GGUF holds: give a dtype, for floats"
        )
    return Stored(_BLOCKS[weight.format], (rows, inputs), _blocks(weight))


def _stacked(name: str, experts: list[Stored]) -> Stored:
    """One tensor of the matrices of all experts, which are in their order."""
    first = experts[0]
    if types := sorted({expert.type for expert in experts} - {first.type}):
        raise RequestError(
            f"{name}: GGUF has one type for all that a tensor holds; these are {first.type} and {types[0]}: give a "
            "dtype, for floats"
        )
    return Stored(first.type, (len(experts), *first.shape), torch.stack([expert.data for expert in experts]))


def _blocks(weight: QuantizedWeight) -> Tensor:
    """uint8 [N, K / 32 * 18]: of each group a float16 scale, and bytes of the codes of inputs j (low half) and 16 + j.

    A code is the integer of int4 + 8, or a place in the table.
    """
    q, scales = weight.unpack()
    codes = q + 8 if weight.format == "int4" else q
    groups = codes.view(torch.uint8).view(len(q), -1, GROUP)
    halves = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return torch.cat((scales.unsqueeze(-1).contiguous().view(torch.uint8), halves), -1).flatten(1)
