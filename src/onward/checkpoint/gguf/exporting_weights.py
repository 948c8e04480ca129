"""Weights by stock name -> the tensors of a GGUF file, as llama.cpp's converter makes them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.exporting_families import Written
from onward.checkpoint.gguf.family import Change, GgufFamily
from onward.checkpoint.gguf.layout import blocks_of
from onward.checkpoint.gguf.names import GgufName, gguf_name
from onward.checkpoint.gguf.writer import Stored
from onward.errors import RequestError
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import GROUP

# Formats of ours -> types of the same numbers.
_BLOCKS = {"int4": "Q4_0", "iq4_nl": "IQ4_NL"}
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def model_tensors(
    written: Written,
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    weights: Mapping[str, Tensor | QuantizedWeight],
) -> dict[str, Stored]:
    """The weights by GGUF's names. int4 becomes Q4_0 and iq4_nl IQ4_NL, which hold the same numbers.

    Args:
        written: the line of the model.
        config: the checkpoint's config.json.
        fields: the config.json that the file's metadata make.
        weights: by the stock names of the model's own architecture.

    Raises:
        RequestError: int8, or 4 bits whose rows are no whole groups: no type of GGUF holds these; experts of several
            types; or a weight that is another after what the converter computes of it was undone.
    """
    stock = {name: _rows(name, weight) for name, weight in weights.items()}
    file = _Tensors(written.family, fields)
    for name, weight in written.weights(config, fields, stock).items():
        file.put(name, weight)
    return file.whole()


class _Tensors:
    """Takes the weights, and puts them where a reader finds them."""

    def __init__(self, family: GgufFamily, fields: Mapping[str, Any]) -> None:
        self._family, self._fields = family, fields
        self._tensors: dict[str, Stored] = {}
        self._experts: dict[str, list[Stored]] = {}

    def put(self, name: str, weight: Tensor | Stored) -> None:
        place = gguf_name(name, self._family)
        if place.tensors == (name,):
            raise RequestError(f"GGUF has no name for {name!r} in this family")
        for change in self._family.changes:
            weight = _changed(name, weight, change) if change.of(name) else weight
        if len(place.tensors) > 1:
            self._tensors |= zip(place.tensors, _parts(name, weight, place, self._fields), strict=True)
            return
        (tensor,) = place.tensors
        stored = self._ordered(name, tensor, _stored(name, weight))
        if place.expert is None:
            self._tensors[tensor] = stored
        else:
            self._experts.setdefault(tensor, []).append(stored)

    def whole(self) -> dict[str, Stored]:
        return self._tensors | {tensor: _stacked(tensor, experts) for tensor, experts in self._experts.items()}

    def _ordered(self, name: str, tensor: str, stored: Stored) -> Stored:
        """The rows and columns of a weight in the order of the file: the whole tensor, to which other weights may add
        their rows."""
        order = self._family.order(name, self._fields, stored.shape[0])
        shape = self._family.shape(name, self._fields, stored.shape)
        data = stored.data if order.columns is None else _in_columns(name, stored, order.columns)
        if order.rows is None:
            return Stored(stored.type, shape, data)
        rows = order.stored_rows or len(data)
        empty = Stored(stored.type, (rows, *shape[1:]), data.new_zeros(rows, *data.shape[1:]))
        whole = self._tensors.get(tensor, empty)
        _check_types(tensor, [whole, stored])
        return whole._replace(data=whole.data.index_copy(0, order.rows, data))


def _changed(name: str, weight: Tensor | Stored, change: Change) -> Tensor:
    assert isinstance(weight, Tensor), "what is computed of weights is of norms and rates, which are floats"
    computed = change.write(weight.to(torch.float32))
    back = change.read(computed)
    same = back.to(weight.dtype) == weight if change.bound is None else (back - weight).abs() <= change.bound(weight)
    if not bool(same.all()):
        raise RequestError(f"{name}: GGUF has {change.what} in float32, and what is left of them is not the same")
    return computed


def _rows(name: str, weight: Tensor | QuantizedWeight) -> Tensor | Stored:
    """Floats as they are; blocks row by row."""
    if isinstance(weight, Tensor):
        return weight
    rows, inputs = weight.shape
    if weight.format not in _BLOCKS or inputs % GROUP:
        raise RequestError(
            f"{name} is {weight.format} {[rows, inputs]}, which no type of GGUF holds: give a dtype, for floats"
        )
    return Stored(_BLOCKS[weight.format], (rows, inputs), _blocks(weight))


def _stored(name: str, weight: Tensor | Stored) -> Stored:
    """Vectors, biases and convolutions as float32, the only type that llama.cpp computes them in."""
    if isinstance(weight, Stored):
        return weight
    if weight.dim() == 3:  # [channels, 1, taps]
        weight = weight.squeeze(1)
        return Stored("F32", tuple(weight.shape), weight.to(torch.float32))
    if weight.dim() == 1 or name.endswith(".bias"):
        weight = weight.to(torch.float32)
    return Stored(_FLOATS[weight.dtype], tuple(weight.shape), weight)


def _parts(name: str, weight: Tensor | Stored, place: GgufName, fields: Mapping[str, Any]) -> list[Stored]:
    """The tensors of a weight that is cut: of blocks between rows alone."""
    if isinstance(weight, Tensor):
        return [_stored(part, each) for part, each in zip(place.tensors, place.cut(weight, fields), strict=True)]
    if place.by is not torch.cat:
        raise RequestError(
            f"{name}: GGUF has it cut in parts that cut blocks of {weight.type}: give a dtype, for floats"
        )
    parts = place.cut(weight.data, fields)
    return [weight._replace(shape=(len(part), *weight.shape[1:]), data=part) for part in parts]


def _in_columns(name: str, stored: Stored, columns: Tensor) -> Tensor:
    """The data of a matrix, its columns (or blocks) where the file has them."""
    if stored.type in _FLOATS.values():
        return torch.empty_like(stored.data).index_copy_(1, columns, stored.data)
    blocks = blocks_of(columns, GROUP)
    if blocks is None:
        raise RequestError(
            f"{name}: GGUF has an order of columns that cuts blocks of {stored.type}: give a dtype, for floats"
        )
    data = stored.data.view(len(stored.data), len(blocks), -1)
    return torch.empty_like(data).index_copy_(1, blocks, data).flatten(1)


def _stacked(name: str, experts: list[Stored]) -> Stored:
    """One tensor of the matrices (or biases) of all experts, which are in their order."""
    _check_types(name, experts)
    first = experts[0]
    return Stored(first.type, (len(experts), *first.shape), torch.stack([expert.data for expert in experts]))


def _check_types(name: str, parts: list[Stored]) -> None:
    first = parts[0].type
    if types := sorted({part.type for part in parts} - {first}):
        raise RequestError(
            f"{name}: GGUF has one type for all that a tensor holds; these are {first} and {types[0]}: give a dtype, "
            "for floats"
        )


def _blocks(weight: QuantizedWeight) -> Tensor:
    """uint8 [N, K / 32 * 18]: of each group a float16 scale, and bytes of the codes of inputs j (low half) and 16 + j.

    A code is the integer of int4 + 8, or a place in the table.
    """
    q, scales = weight.unpack()
    codes = q + 8 if weight.format == "int4" else q
    groups = codes.view(torch.uint8).view(len(q), -1, GROUP)
    halves = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return torch.cat((scales.unsqueeze(-1).contiguous().view(torch.uint8), halves), -1).flatten(1)
