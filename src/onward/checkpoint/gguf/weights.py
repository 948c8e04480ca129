"""The weights of a GGUF model under their stock names: blocks repacked into formats of ours, or as floats."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import (
    dequantized,
    float_rows,
    pack_blocks,
    packed_format,
    read_parts,
    scales_are_finite,
)
from onward.checkpoint.gguf.family import GgufFamily, RowOrder, blocks_of
from onward.checkpoint.gguf.names import GgufName, gguf_name
from onward.checkpoint.gguf.reader import GgufTensor
from onward.checkpoint.shards import placed
from onward.errors import CheckpointError
from onward.ops import QuantizedWeight
from onward.ops.quantized_layout import data_shape

# Made into other fields of config.json, not weights.
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Weights that are converted at once, so that what lies between stays in a cache.
_AT_ONCE = 2**20


def _default_dtype(tensors: Mapping[str, GgufTensor]) -> torch.dtype:
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return torch.float32
    return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16


class GgufTensors:
    """The weights of a model by their stock names; it remembers which were taken.

    path: the file, for errors. tensors: by GGUF's names. fields: of config.json. dtype: of norms, biases and
    activations; None takes bfloat16 where there are blocks, else the embedding's. device: on "meta" no weight is read.
    exact: give floats that the dtype does not hold as float32.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, GgufTensor],
        family: GgufFamily,
        fields: Mapping[str, Any],
        dtype: torch.dtype | None,
        device: torch.device,
        exact: bool,
    ) -> None:
        self._path, self._tensors, self._family, self._fields = path, tensors, family, fields
        self._dtype, self._device, self._exact = dtype or _default_dtype(tensors), device, exact
        # By tensor, the experts' matrices that were taken of it; None: all of it.
        self._taken: dict[str, set[int | None]] = {name: {None} for name in _NO_WEIGHTS}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        place = gguf_name(name, self._family)
        if len(place.tensors) > 1:
            return self._joined(name, place, shape, dtype)
        stored = self._found(place.tensors[0], name, shape)
        if math.prod(stored.shape) < math.prod(shape):  # an order of rows would take as much memory as metadata say
            raise self._misshaped(stored, shape)
        order = self._family.order(name, self._fields, shape[0])
        return self._ordered(name, self._part(stored, place.expert, shape, order.stored_rows), order, dtype)

    def _ordered(self, name: str, stored: GgufTensor, order: RowOrder, dtype: torch.dtype | None) -> Any:
        """A tensor as the weight of a stock name, its rows and columns in the stock order."""
        packed = (
            dtype is None
            and self._packs(stored)
            and (order.columns is None or blocks_of(order.columns, stored.type.weights) is not None)
        )
        if self._device.type == "meta":
            return self._shape_of(stored, packed)
        rows = stored.rows if len(stored.shape) > 1 else stored.rows.reshape(-1, stored.type.size)
        rows = rows if order.rows is None else rows[order.rows]
        if packed:
            return self._packed(stored, rows if order.columns is None else _with_blocks(rows, order.columns, stored))
        values = self._values(stored, rows)
        if order.columns is not None:
            values = values[:, order.columns]
        values = self._family.stock_values(name, values).reshape(stored.shape)
        return placed(self._path, stored.name, values, dtype or self._dtype_of(values), self._device)

    def _joined(self, name: str, place: GgufName, shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
        """A weight that the file has in several tensors; in the bits of their blocks where these lie one below another
        and are of one type."""
        parts = [self._found(tensor, name, shape) for tensor in place.tensors]
        if _joined_shape(place, parts) != shape:
            raise CheckpointError(
                f"{self._path}: {name!r} is made of {' and '.join(str(list(part.shape)) for part in parts)}, but the "
                f"metadata make it {list(shape)}"
            )
        for part in parts:
            self._taken[part.name] = {None}
        if place.by is torch.cat and len({part.type for part in parts}) == 1:
            rows = torch.cat([part.rows for part in parts])
            return self._ordered(name, parts[0]._replace(shape=shape, rows=rows), RowOrder(), dtype)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        whole = place.by([self._values(part, part.rows).view(part.shape) for part in parts])
        values = self._family.stock_values(name, whole)
        return placed(self._path, name, values, dtype or self._dtype_of(values), self._device)

    def _dtype_of(self, values: Tensor) -> torch.dtype:
        """That of a weight which follows the model's, or with `exact` one that holds it."""
        if not self._exact or torch.equal(values.to(self._dtype).to(values.dtype), values):
            return self._dtype
        return torch.float32

    def _found(self, tensor: str, name: str, shape: tuple[int, ...]) -> GgufTensor:
        stored = self._tensors.get(tensor)
        if stored is None:
            raise CheckpointError(
                f"{self._path}: tensor {tensor!r} of shape {list(shape)} is missing ({name!r} elsewhere)"
            )
        return stored

    def _misshaped(self, stored: GgufTensor, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: tensor {stored.name!r} has shape {list(stored.shape)}, but the metadata makes it "
            f"{list(shape)}"
        )

    def _part(
        self, stored: GgufTensor, expert: int | None, shape: tuple[int, ...], stored_rows: int | None
    ) -> GgufTensor:
        """A tensor, or the part of it that is one expert's; its shape is checked. It gets that of the weight, and all
        rows of which the weight may be some."""
        rows = stored_rows or shape[0]
        whole = (rows, *shape[1:]) if expert is None else (max(stored.shape[0], expert + 1), rows, *shape[1:])
        if not _holds(stored.shape, whole):
            raise self._misshaped(stored, whole)
        self._taken.setdefault(stored.name, set()).add(expert)
        if expert is None:
            return stored._replace(shape=shape)
        return stored._replace(shape=shape, rows=stored.rows[expert * rows : (expert + 1) * rows])

    def _packs(self, stored: GgufTensor) -> bool:
        """Whether a tensor stays in its blocks' bits. float32 asks for products that round nothing, and other devices
        than the CPU have no kernels for packed weights: there they become floats."""
        few_bits = len(stored.shape) == 2 and packed_format(stored.type, stored.shape[1]) is not None
        return few_bits and self._dtype != torch.float32 and self._device.type in ("cpu", "meta")

    def _shape_of(self, stored: GgufTensor, packed: bool) -> Any:
        """What `take` would give, without memory."""
        if not packed:
            return torch.empty(stored.shape, dtype=self._dtype, device=self._device)
        shape = stored.shape[0], stored.shape[1]
        format = packed_format(stored.type, shape[1])
        assert format is not None
        data = torch.empty(data_shape(format, shape), dtype=torch.uint8, device=self._device)
        return QuantizedWeight(data, format, shape, self._dtype)

    def _packed(self, stored: GgufTensor, rows: Tensor) -> QuantizedWeight:
        try:
            return pack_blocks(stored.type, rows, self._dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: tensor {stored.name!r}: {error}") from error

    def check_left(self, unread: Sequence[str]) -> None:
        """Raise if a tensor was not taken: the file holds another architecture than it says. unread: how the names of
        tensors begin that a file may have beside the model."""
        left = sorted(name for name in set(self._tensors) - set(self._taken) if not name.startswith(tuple(unread)))
        if left:
            raise CheckpointError(
                f"{self._path}: {len(left)} tensors are there that the architecture leaves no place for, {left[0]!r} "
                "for one"
            )
        for name, experts in self._taken.items():
            stored = self._tensors.get(name)
            if stored is not None and None not in experts and stored.shape[0] != len(experts):
                raise CheckpointError(
                    f"{self._path}: tensor {name!r} has {stored.shape[0]} experts, but the metadata say {len(experts)}"
                )

    def _values(self, stored: GgufTensor, rows: Tensor) -> Tensor:
        """Rows as floats [N, K]: as they are stored, or blocks in the model's dtype."""
        floats = float_rows(stored.type, rows)
        if floats is not None:
            return floats
        inputs = rows.shape[1] // stored.type.size * stored.type.weights
        values = torch.empty((len(rows), inputs), dtype=self._dtype)
        step = max(1, _AT_ONCE // inputs)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            if not scales_are_finite(stored.type, read_parts(stored.type, part)):
                raise CheckpointError(
                    f"{self._path}: tensor {stored.name!r} has scales that are infinite or no numbers"
                )
            values[first : first + step] = dequantized(stored.type, part)
        return values


def _holds(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor may have the weights of this shape: the converter puts in and takes out sizes of 1, and writes
    norms of groups group by group."""
    if len(shape) == 1:
        return math.prod(stored) == shape[0]
    return [size for size in stored if size > 1] == [size for size in shape if size > 1]


def _joined_shape(place: GgufName, parts: Sequence[GgufTensor]) -> tuple[int, ...] | None:
    """The shape of what a weight's tensors make; None where they do not fit each other."""
    try:
        return tuple(place.by([torch.empty(part.shape, device="meta") for part in parts]).shape)
    except (IndexError, RuntimeError):  # too few sizes, or sizes that differ
        return None


def _with_blocks(rows: Tensor, columns: Tensor, stored: GgufTensor) -> Tensor:
    """Rows whose blocks are in this order of columns."""
    blocks = blocks_of(columns, stored.type.weights)
    assert blocks is not None
    return rows.view(len(rows), -1, stored.type.size)[:, blocks].flatten(1)
