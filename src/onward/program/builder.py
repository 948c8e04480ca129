"""The builder with which rules turn an operator into kernel calls, and the table of rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.native.structs import Element
from onward.ops.operator import DTYPES
from onward.program.graph import Address, Argument, Array, KernelCall, Kind, Node, ProgramCall, Storage, Trace, address

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
    """There is no kernel for this use of an operator; the message says what is missing."""


class Builder:
    """Collects the kernel calls of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.calls: list[ProgramCall] = []
        self.node: Node | None = None  # the one that is being lowered
        self._scalars: dict[tuple[float, torch.dtype], Array] = {}

    def call(self, kernel: str, *args: Argument) -> None:
        assert self.node is not None
        self.calls.append(KernelCall(kernel, args, self.node))

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────

    def temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """A contiguous array in the program's own memory."""
        strides = contiguous_strides(shape)
        array = Array(self._storage(Kind.TEMPORARY, 0), dtype, tuple(shape), strides, 0)
        array.storage.nbytes = array.nbytes
        return array

    def constant(self, tensor: Tensor) -> Array:
        tensor = tensor.contiguous()
        storage = self._storage(Kind.CONSTANT, tensor.nbytes)
        storage.constant = tensor
        return Array(storage, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0)

    def scalar(self, value: float | int | bool, dtype: torch.dtype) -> Array:
        """A constant without dimensions."""
        key = (value, dtype)
        if key not in self._scalars:
            self._scalars[key] = self.constant(torch.tensor(value, dtype=dtype))
        return self._scalars[key]

    def _storage(self, kind: Kind, nbytes: int) -> Storage:
        storage = Storage(len(self.trace.storages), kind, nbytes)
        self.trace.storages.append(storage)
        return storage

    # ── layouts ───────────────────────────────────────────────────────────────────────────────────────────

    def contiguous(self, array: Array) -> Array:
        if array.contiguous:
            return array
        copy = self.temporary(array.shape, array.dtype)
        self.copy(array, copy)
        return copy

    def rows(self, array: Array) -> tuple[Array, int, int, int]:
        """An array [..., D] as rows: (it or a copy, number of rows, D, elements from row to row)."""
        layout = uniform_rows(array)
        if layout is None:
            array = self.contiguous(array)
            layout = uniform_rows(array)
            assert layout is not None
        return (array, *layout)

    def copy(self, source: Array, to: Array) -> None:
        """to[...] = source[...], broadcast and cast."""
        from onward.native.structs import Unary

        self.unary(Unary.COPY, source, to)

    def unary(self, op: int, x: Array, out: Array, parameter: float = 0.0) -> None:
        self.call(
            "onward_unary", op, len(out.shape), list(out.shape), address(x), ELEMENTS[x.dtype], broadcast(x, out.shape),
            address(out), ELEMENTS[out.dtype], list(out.strides), parameter,
        )  # fmt: skip


def float_code(array: Array) -> int:
    """The code of a float dtype that the fused kernels take."""
    if array.dtype not in DTYPES:
        raise Unsupported(f"dtype {array.dtype}")
    return DTYPES[array.dtype]


def element_code(array: Array) -> int:
    if array.dtype not in ELEMENTS:
        raise Unsupported(f"dtype {array.dtype}")
    return ELEMENTS[array.dtype]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def broadcast(array: Array, shape: Sequence[int]) -> list[int]:
    """The strides of an array over a shape that it broadcasts to: 0 where it repeats."""
    missing = len(shape) - len(array.shape)
    return [0] * missing + [
        0 if size == 1 and full_size != 1 else stride
        for size, stride, full_size in zip(array.shape, array.strides, shape[missing:], strict=True)
    ]


def uniform_rows(array: Array) -> tuple[int, int, int] | None:
    """(rows, columns, elements from row to row) of an array [..., D]; None where its rows are not evenly spaced."""
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
RULES: dict[OpOverload, Rule] = {}


def lowers(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Register a rule for operators. A rule emits calls, or raises `Unsupported`; then its calls are dropped."""

    def register(rule: Rule) -> Rule:
        for op in ops:
            RULES[op] = rule
        return rule

    return register


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, defaults filled in."""
    arguments = {argument.name: argument.default_value for argument in node.op._schema.arguments}
    arguments |= dict(zip(arguments, node.args, strict=False))
    return arguments | node.kwargs


__all__ = [
    "ELEMENTS",
    "RULES",
    "Address",
    "Builder",
    "Rule",
    "Unsupported",
    "broadcast",
    "contiguous_strides",
    "element_code",
    "float_code",
    "lowers",
    "named_arguments",
    "uniform_rows",
]
