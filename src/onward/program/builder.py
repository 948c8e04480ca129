"""The builder that rules use to turn an operator into kernel calls, and the table of rules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.native.structs import Element, Unary
from onward.ops.operator import DTYPES
from onward.program.graph import Address, Argument, Array, KernelCall, Kind, Node, ProgramCall, Trace, address

ELEMENTS = {
    torch.float32: Element.F32,
    torch.bfloat16: Element.BF16,
    torch.float16: Element.F16,
    torch.int32: Element.I32,
    torch.int64: Element.I64,
    torch.bool: Element.BOOL,
    torch.float64: Element.F64,
}


class Unsupported(Exception):  # noqa: N818 - not an error: torch runs the operator instead
    """No kernel supports this use of an operator; the message names the missing feature."""


class Builder:
    """Collects the kernel calls of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls: list[ProgramCall] = []
        self.node: Node | None = None  # the node that is being lowered
        self._scalars: dict[tuple[float, torch.dtype], Array] = {}

    def call(self, kernel: str, *args: Argument) -> None:
        assert self.node is not None
        self.calls.append(KernelCall(kernel, args, self.node))

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

    # ── layouts ───────────────────────────────────────────────────────────────────────────────────────────

    def contiguous(self, array: Array) -> Array:
        return array if array.contiguous else self.cast(array, array.dtype)

    def with_contiguous_rows(self, array: Array) -> Array:
        """The array, or a copy of it, whose last dimension is contiguous."""
        return array if array.strides[-1] == 1 else self.contiguous(array)

    def cast(self, array: Array, dtype: torch.dtype) -> Array:
        """A contiguous copy of the array in another dtype."""
        copy = self.trace.temporary(array.shape, dtype)
        self.copy(array, copy)
        return copy

    def rows(self, array: Array) -> tuple[Array, int, int, int]:
        """An array [..., D] as rows: (the array or a contiguous copy, number of rows, D, row stride)."""
        layout = uniform_rows(array)
        if layout is None:
            array = self.contiguous(array)
            layout = uniform_rows(array)
            assert layout is not None
        return (array, *layout)

    def matrix(self, array: Array) -> Array:
        """An array [..., D], or a copy of it, as a matrix [rows, D]."""
        array, rows, columns, stride = self.rows(array)
        return replace(array, shape=(rows, columns), strides=(stride, 1))

    def optional(self, array: Array | None) -> Address | None:
        """The address of the contiguous array or of a copy of it; None for None."""
        return None if array is None else address(self.contiguous(array))

    def copy(self, source: Array, to: Array) -> None:
        """to[...] = source[...], broadcast and cast."""
        self.unary(Unary.COPY, source, to)

    def unary(self, op: int, x: Array, out: Array, parameter: float = 0.0) -> None:
        self.call(
            "onward_unary", op, len(out.shape), list(out.shape), address(x), ELEMENTS[x.dtype], broadcast(x, out.shape),
            address(out), ELEMENTS[out.dtype], list(out.strides), parameter,
        )  # fmt: skip


def float_code(array: Array) -> int:
    """The code of a float dtype for the fused kernels."""
    if array.dtype not in DTYPES:
        raise Unsupported(f"dtype {array.dtype}")
    return DTYPES[array.dtype]


def element_code(array: Array) -> int:
    if array.dtype not in ELEMENTS:
        raise Unsupported(f"dtype {array.dtype}")
    return ELEMENTS[array.dtype]


def broadcast(array: Array, shape: Sequence[int]) -> list[int]:
    """The strides of an array broadcast to a shape: 0 for repeated dimensions."""
    missing = len(shape) - len(array.shape)
    return [0] * missing + [
        0 if size == 1 and full_size != 1 else stride
        for size, stride, full_size in zip(array.shape, array.strides, shape[missing:], strict=True)
    ]


def uniform_rows(array: Array) -> tuple[int, int, int] | None:
    """(rows, columns, row stride) of an array [..., D]; None if its rows are not evenly spaced."""
    *leading, columns = array.shape
    *steps, last = array.strides
    if columns > 1 and last != 1:
        return None
    rows, step = 1, None
    expected: int | None = None
    for size, stride in zip(reversed(leading), reversed(steps), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        rows *= size
        expected = stride * size
    if any(size == 0 for size in leading):
        return 0, columns, columns
    return rows, columns, columns if step is None else step


Rule = Callable[[Builder, Node], None]
R = TypeVar("R", bound=Rule)
RULES: dict[OpOverload, Rule] = {}


def lowers(*ops: OpOverload) -> Callable[[R], R]:
    """Register a rule for operators. A rule emits calls, or raises `Unsupported`, which discards its calls."""

    def register(rule: R) -> R:
        for op in ops:
            RULES[op] = rule
        return rule

    return register


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, including defaults."""
    arguments = {argument.name: argument.default_value for argument in node.op._schema.arguments}
    arguments |= dict(zip(arguments, node.args, strict=False))
    return arguments | node.kwargs
