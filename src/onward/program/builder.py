"""The builder that records the kernel calls of a program, and the table of rules for torch's operators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.native.generic import Unary, onward_unary
from onward.native.interface import Element, Structure
from onward.ops.kernel_calls import KernelCalls, Unsupported, broadcast_strides
from onward.program.graph import Address, Argument, Array, Infer, KernelCall, Kind, Node, ProgramCall, Trace, address

ELEMENTS = {
    torch.float32: Element.F32,
    torch.bfloat16: Element.BF16,
    torch.float16: Element.F16,
    torch.int32: Element.I32,
    torch.int64: Element.I64,
    torch.bool: Element.BOOL,
    torch.float64: Element.F64,
}
# The number of slots in every program: it serves pools of any size.
_ANY_SLOT = 2**31 - 1


class Builder(KernelCalls):
    """Records the kernel calls of one trace, with more methods for the rules of torch's operators."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls: list[ProgramCall] = []
        self.node: Node | None = None  # the node that is being lowered
        self._scalars: dict[tuple[float, torch.dtype], Array] = {}

    def call(self, kernel: str, *args: Argument) -> None:
        assert self.node is not None
        self.calls.append(KernelCall(kernel, args, self.node))

    # ── arguments ─────────────────────────────────────────────────────────────────────────────────────────

    address = staticmethod(address)

    def address_at(self, array: Array, offset: int) -> Address:
        return Address(array.storage, (array.offset + offset) * array.dtype.itemsize)

    def struct(self, kind: type[Structure], **fields: Any) -> Mapping[str, Any]:
        return fields  # `encode` knows the kind from the kernel's signature

    def array(self, structs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return structs

    def int64s(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def num_slots(self, count: int) -> int:
        return _ANY_SLOT

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────

    def constant(self, tensor: Tensor) -> Array:
        tensor = tensor.contiguous()
        storage = self.trace.new_storage(Kind.CONSTANT, tensor.nbytes, constant=tensor)
        return Array(storage, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0)

    def scalar(self, value: float | int | bool, dtype: torch.dtype) -> Array:
        """A constant [] of this value."""
        key = (value, dtype)
        if key not in self._scalars:
            self._scalars[key] = self.constant(torch.tensor(value, dtype=dtype))
        return self._scalars[key]

    def cast(self, array: Array, dtype: torch.dtype) -> Array:
        copy = self.trace.temporary(array.shape, dtype)
        self.copy(array, copy)
        return copy

    def matrix(self, array: Array) -> Array:
        """An array [..., D], or a copy of it, as a matrix [rows, D]."""
        array, rows, columns, stride = self.rows(array)
        return replace(array, shape=(rows, columns), strides=(stride, 1))

    def copy(self, source: Array, to: Array) -> None:
        """to[...] = source[...], broadcast and cast."""
        self.unary(Unary.COPY, source, to)

    def unary(self, op: int, x: Array, out: Array, parameter: float = 0.0) -> None:
        self.call(
            onward_unary, op, len(out.shape), list(out.shape), address(x), ELEMENTS[x.dtype],
            broadcast_strides(x, out.shape), address(out), ELEMENTS[out.dtype], list(out.strides), parameter,
        )  # fmt: skip


def element_code(array: Array) -> int:
    if array.dtype not in ELEMENTS:
        raise Unsupported(f"dtype {array.dtype}")
    return ELEMENTS[array.dtype]


F = TypeVar("F", bound=Callable[..., Any])
# For each operator of torch: its rule, which emits calls, or raises `Unsupported`, which discards its calls; and the
# shape and dtype of its result, for the recorder.
RULES: dict[OpOverload, Callable[[Builder, Node], None]] = {}
INFER: dict[OpOverload, Infer] = {}


def registers(table: dict[OpOverload, Any], *ops: OpOverload) -> Callable[[F], F]:
    """Register a function for operators."""

    def register(function: F) -> F:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


lowers = partial(registers, RULES)
infers = partial(registers, INFER)


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, including defaults."""
    arguments = {argument.name: argument.default_value for argument in node.op._schema.arguments}
    arguments |= dict(zip(arguments, node.args, strict=False))
    return arguments | node.kwargs
