"""The weights of many experts as one value: stacked, packed or quantized.

Shapes: E experts, each of N rows (outputs) and K inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native import advise_huge_pages
from onward.ops import quantized_layout as layout
from onward.ops.linear import Weight
from onward.ops.operator import check_no_gradient, shapes, usable_library
from onward.ops.packed import FORMATS, NativeWeight, empty_packed, pack_into
from onward.ops.quantized import PackedTensors, QuantizedWeight, register_tensors


class NativeExperts(NamedTuple):
    """Float weights [E, N, K] in the layout that the native `experts` reads.

    data: [E, blocks, units, 16, neighbours] in the weights' dtype: a `NativeWeight` for each expert. rows: N.
    inputs: K.
    """

    data: Tensor
    rows: int
    inputs: int

    def expert(self, index: int) -> NativeWeight:
        """One expert's weight; it shares the memory."""
        return NativeWeight(self.data[index], self.rows, self.inputs)

    def unpack(self) -> Tensor:
        """The stock weights [E, N, K]."""
        return torch.stack([self.expert(index).unpack() for index in range(len(self.data))])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.data), self.rows, self.inputs


@dataclass(frozen=True, eq=False)
class QuantizedExperts(PackedTensors):
    """Quantized weights [E, N, K], packed. A pytree whose one tensor is `data`.

    data: uint8 [E, blocks, bytes]: that of a `QuantizedWeight` for each expert. format: as there.
    shape: (E, N, K). dtype: of the original weights.
    """

    data: Tensor
    format: str
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def stack(cls, weights: Sequence[QuantizedWeight]) -> "QuantizedExperts":
        """The experts' weights, of one format, shape and dtype."""
        first = weights[0]
        kinds = {(weight.format, weight.shape, weight.dtype) for weight in weights}
        if len(kinds) != 1:
            raise RequestError(f"the weights of experts must have one format, shape and dtype; got {kinds}")
        data = first.data.new_empty((len(weights), *first.data.shape))
        if data.device.type == "cpu":
            advise_huge_pages(data.data_ptr(), data.nbytes)
        torch.stack([weight.data for weight in weights], out=data)
        return cls(data, first.format, (len(weights), *first.shape), first.dtype)

    def expert(self, index: int) -> QuantizedWeight:
        """One expert's weight; it shares the memory."""
        return QuantizedWeight(self.data[index], self.format, self.shape[1:], self.dtype)

    def dequantize(self) -> Tensor:
        """[E, N, K] in `dtype`."""
        return torch.stack([self.expert(index).dequantize() for index in range(self.shape[0])])


ExpertWeights = Tensor | NativeExperts | QuantizedExperts


def stack_experts(weights: Sequence[Weight]) -> Tensor | QuantizedExperts:
    """E stock or quantized weights [N, K] as one; a copy."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if quantized:
        return QuantizedExperts.stack(quantized)
    return torch.stack([weight for weight in weights if isinstance(weight, Tensor)])


def pack_experts(weights: ExpertWeights | Sequence[Weight]) -> ExpertWeights:
    """Weights [E, N, K], or E of [N, K], in the layout that this machine's `experts` reads.

    Each expert is read exactly once, in order. Weights that are packed or quantized, or not on the CPU, or without a
    native library to pack them for, keep their layout, as one value. Packed weights are a copy, detached from autograd.

    Raises:
        RequestError: the weights don't match each other, or autograd follows one.
    """
    if isinstance(weights, NativeExperts | QuantizedExperts):
        return weights
    check_no_gradient(
        "ops.pack_experts", "pack weights.detach()", *([weights] if isinstance(weights, Tensor) else weights)
    )
    first, library = weights[0], usable_library()
    fits = isinstance(first, Tensor) and first.device.type == "cpu" and first.dtype in FORMATS
    if library is None or not fits:
        return weights if isinstance(weights, Tensor) else stack_experts(weights)
    assert isinstance(first, Tensor)
    rows, inputs = first.shape
    data = empty_packed((len(weights),), rows, inputs, first.dtype)
    for index, weight in enumerate(weights):
        assert isinstance(weight, Tensor)
        if weight.shape != first.shape or weight.dtype != first.dtype:
            got = shapes(first=first, other=weight)
            raise RequestError(f"experts must have weights of one shape and dtype; got {got}")
        pack_into(library, weight, data[index])
    return NativeExperts(data, rows, inputs)


def matrix(data: Tensor, index: int, format: str, rows: int, inputs: int) -> Tensor:
    """The weight of one expert as float32 [N, K]. format: "stock", "packed", or of a `QuantizedWeight`."""
    if format == "stock":
        return data[index].to(torch.float32)
    if format == "packed":
        return NativeWeight(data[index], rows, inputs).unpack().to(torch.float32)
    return layout.values(format, data[index], inputs)[:rows]


register_tensors(QuantizedExperts, "data")
