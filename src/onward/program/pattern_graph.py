"""Queries of patterns on a trace: the producer of an array, and the operands of an operator."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from onward.ops.kernel_calls import DTYPES
from onward.program.builder import named_arguments
from onward.program.graph import Array, Kind, Node, PackedParams, Trace, Uses, contiguous_strides

aten = torch.ops.aten

CASTS = (
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default, aten._to_copy.default,
)  # fmt: skip


class Graph:
    """The nodes of a trace by their results.

    Only arrays that no node changes after their creation count, so that an array stands for one value.
    """

    def __init__(self, trace: Trace, packed: PackedParams | None) -> None:
        self.trace = trace
        self._packed = packed
        self._packed_arrays: dict[Array, Array] = {}
        self._uses = Uses(trace.nodes)
        self._producers = {node.outputs[0]: node for node in trace.nodes if len(node.outputs) == 1}
        self._storage_producers = {array.storage: node for array, node in self._producers.items()}
        self.signed_sines: dict[Array, Array] = {}  # copies with the first half negated, by a rotation's sines

    def constant(self, array: Array) -> bool:
        """Whether no node changes the array after its creation."""
        return self._uses.constant(array)

    def producer(self, value: Any, *ops: OpOverload) -> Node | None:
        """The node of one of these operators that produced exactly this array, if any."""
        node = self._producers.get(value) if isinstance(value, Array) else None
        return node if node is not None and node.op in ops and self.constant(value) else None

    def storage_producer(self, value: Array) -> Node | None:
        """The node that produced the memory of which the array is a view."""
        return self._storage_producers.get(value.storage) if self.constant(value) else None

    def before_upcast(self, value: Any) -> Any:
        """The input of the cast to float32 that produced `value`; otherwise `value` itself."""
        node = self.producer(value, *CASTS)
        exact = node is not None and value.dtype == torch.float32 and is_float(node.args[0])
        return node.args[0] if node is not None and exact else value

    def before_rounding(self, value: Any) -> Any:
        """The float32 input of the cast that produced `value`; otherwise `value` itself."""
        node = self.producer(value, *CASTS)
        return node.args[0] if node is not None and node.args[0].dtype == torch.float32 else value

    def operands(self, value: Any, op: OpOverload) -> list[tuple[Any, Any]]:
        """Both operands of the commutative operator that produced `value`, in both orders; empty if it scales one."""
        node = self.producer(value, op)
        return [] if node is None else operands_of(node)

    def packed(self, weight: Array) -> Array | None:
        """The packed copy of a matrix among the params; None if params may change or no packed layout supports it."""
        if weight not in self._packed_arrays:
            copy = None if self._packed is None else self._packed.of(weight)
            if copy is None:
                return None
            data = copy.data
            storage = self.trace.new_storage(Kind.PARAM, data.nbytes, weight.storage.name)
            storage.refer_to(data)
            shape = tuple(data.shape)
            self._packed_arrays[weight] = Array(storage, data.dtype, shape, contiguous_strides(shape), 0)
        return self._packed_arrays[weight]


def operands_of(node: Node) -> list[tuple[Any, Any]]:
    """Both operands of a commutative operator, in both orders; empty if it scales one (alpha), or rounds."""
    arguments = named_arguments(node)
    if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
        return []
    left, right = node.args[:2]
    return [(left, right), (right, left)]


def narrowed(array: Array, start: int, length: int) -> Array:
    """array[..., start : start + length]."""
    shape = (*array.shape[:-1], length)
    return replace(array, shape=shape, offset=array.offset + start * array.strides[-1])


def permuted(array: Array, order: Sequence[int]) -> Array:
    """array.permute(order)."""
    return replace(array, shape=tuple(array.shape[i] for i in order), strides=tuple(array.strides[i] for i in order))


def is_float(array: Any) -> bool:
    """Whether it is an array of a dtype that the ops support."""
    return isinstance(array, Array) and array.dtype in DTYPES
