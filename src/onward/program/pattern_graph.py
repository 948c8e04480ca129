"""Which node made an array, and what an operator's operands are: the questions that patterns ask of a trace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from onward.ops.operator import DTYPES
from onward.program.builder import contiguous_strides, named_arguments
from onward.program.graph import Array, Kind, Node, PackedParams, Storage, Trace, Uses

aten = torch.ops.aten

CASTS = (
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default, aten._to_copy.default,
)  # fmt: skip


class Graph:
    """The nodes of a trace by what they make.

    Only arrays that no node changes after they were made count: such an array is a value, wherever it is read.
    """

    def __init__(self, trace: Trace, packed: PackedParams | None) -> None:
        self._trace = trace
        self._packed = packed
        self._packed_arrays: dict[Array, Array] = {}
        self._uses = Uses(trace.nodes)
        self._makers = {node.outputs[0]: node for node in trace.nodes if len(node.outputs) == 1}
        self._storage_makers = {array.storage: node for array, node in self._makers.items()}
        self.signed_sines: dict[Array, Array] = {}  # by the sines of a rotation: with the first half negated

    def constant(self, *arrays: Array) -> bool:
        """Whether no node changes these arrays: they have one value from their making to the end."""
        return all(map(self._uses.constant, arrays))

    def maker(self, value: Any, *ops: OpOverload) -> Node | None:
        """The node of one of these operators that made exactly this array, if there is one."""
        node = self._makers.get(value) if isinstance(value, Array) else None
        return node if node is not None and node.op in ops and self.constant(value) else None

    def storage_maker(self, value: Array) -> Node | None:
        """The node that made the memory of which the array is a view."""
        return self._storage_makers.get(value.storage) if self.constant(value) else None

    def widened(self, value: Any) -> Any:
        """What a cast from a shorter float to float32 was made of; the value itself where no such cast made it."""
        node = self.maker(value, *CASTS)
        exact = node is not None and value.dtype == torch.float32 and is_float(node.args[0])
        return node.args[0] if node is not None and exact else value

    def rounded(self, value: Any) -> Any:
        """The float32 array that a cast made `value` of; the value itself where no such cast made it."""
        node = self.maker(value, *CASTS)
        return node.args[0] if node is not None and node.args[0].dtype == torch.float32 else value

    def operands(self, value: Any, op: OpOverload) -> tuple[Any, Any] | None:
        """Both operands of the binary operator that made `value`, unless it scales one (alpha)."""
        node = self.maker(value, op)
        return None if node is None else operands_of(node)

    def packed(self, weight: Array) -> Array | None:
        """The packed copy of a matrix among the params; None where params may change, or where it has no layout."""
        if weight not in self._packed_arrays:
            copy = None if self._packed is None else self._packed.of(weight)
            if copy is None:
                return None
            data = copy.data
            storage = Storage(len(self._trace.storages), Kind.PARAM, data.nbytes, weight.storage.name)
            storage.refer_to(data)
            self._trace.storages.append(storage)
            shape = tuple(data.shape)
            self._packed_arrays[weight] = Array(storage, data.dtype, shape, contiguous_strides(shape), 0)
        return self._packed_arrays[weight]

    def temporary(self, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        """A new contiguous array for a node that a pattern adds."""
        storage = Storage(len(self._trace.storages), Kind.TEMPORARY, 0)
        self._trace.storages.append(storage)
        array = Array(storage, dtype, shape, contiguous_strides(shape), 0)
        storage.nbytes = array.nbytes
        return array


def operands_of(node: Node) -> tuple[Any, Any] | None:
    """Both operands of a binary operator; None where it scales one, or rounds."""
    arguments = named_arguments(node)
    if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
        return None
    return node.args[0], node.args[1]


def either_way(pair: tuple[Any, Any] | None) -> list[tuple[Any, Any]]:
    """The operands of a sum or product in both orders; none for None."""
    return [] if pair is None else [pair, pair[::-1]]


def narrowed(array: Array, start: int, length: int) -> Array:
    """array[..., start : start + length]."""
    shape = (*array.shape[:-1], length)
    return replace(array, shape=shape, offset=array.offset + start * array.strides[-1])


def permuted(array: Array, order: Sequence[int]) -> Array:
    """array.permute(order)."""
    return replace(array, shape=tuple(array.shape[i] for i in order), strides=tuple(array.strides[i] for i in order))


def is_float(array: Any) -> bool:
    """Whether it is an array of a dtype that the ops take."""
    return isinstance(array, Array) and array.dtype in DTYPES


__all__ = ["CASTS", "Graph", "either_way", "is_float", "narrowed", "operands_of", "permuted"]
