"""Rules for torch's elementwise operators, and the shapes and dtypes of their results."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.errors import ProgramError
from onward.native.generic import Binary, Unary, onward_binary, onward_where
from onward.ops.kernel_calls import Unsupported, broadcast_strides
from onward.program.builder import ELEMENTS, INFER, Builder, element_code, lowers, named_arguments
from onward.program.graph import Array, Infer, Node, address

aten = torch.ops.aten

# Operations by torch's names, which are mostly their own.
_RENAMED = {
    Binary.MIN: ("minimum",), Binary.MAX: ("maximum",), Binary.FLOOR_DIV: ("floor_divide",),
    Binary.AND: ("bitwise_and", "logical_and"), Binary.OR: ("bitwise_or", "logical_or"), Binary.XOR: ("bitwise_xor",),
}  # fmt: skip
_UNARY = {code.name.lower(): code for code in Unary if code not in (Unary.COPY, Unary.GELU, Unary.GELU_TANH)}
_BINARY = {name: code for code in Binary for name in _RENAMED.get(code, (code.name.lower(),))}
# Operators that convert integers to float32.
_TO_FLOAT = {
    "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "log1p", "expm1", "exp2",
    "div",
}  # fmt: skip
_TO_BOOL = {"logical_not", "isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"}
# The operations that torch uses for x ** n.
_POWERS = {2: Unary.SQUARE, 0.5: Unary.SQRT, -0.5: Unary.RSQRT, -1: Unary.RECIPROCAL, 1: Unary.COPY}


def _overloads(name: str) -> list[OpOverload]:
    """The functional and the in-place overloads of an aten operator."""
    overloads = []
    for packet_name in (name, f"{name}_"):
        packet = getattr(aten, packet_name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not any(argument.is_out for argument in op._schema.arguments):
                overloads.append(op)
    return overloads


def _unary_rule(code: Unary) -> Callable[[Builder, Node], None]:
    def rule(b: Builder, node: Node) -> None:
        element_code(node.args[0])
        b.unary(code, node.args[0], _output(node))

    return rule


def _binary_rule(code: Binary) -> Callable[[Builder, Node], None]:
    def rule(b: Builder, node: Node) -> None:
        arguments = named_arguments(node)
        if arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode") is not None:
            raise Unsupported("alpha or rounding_mode")
        x, y = node.args[:2]
        if node.op._schema.name.startswith("aten::logical"):
            x, y = (_as_bool(b, side) for side in (x, y))
        binary(b, code, x, y, _output(node))

    return rule


def binary(b: Builder, code: Binary, x: Any, y: Any, out: Array) -> None:
    """out = x op y, for arrays or numbers x and y, at least one an array."""
    compute = _compute_dtype(x, y, code)
    left, right = (side if isinstance(side, Array) else b.scalar(side, compute) for side in (x, y))
    b.call(
        onward_binary, code, ELEMENTS[compute], len(out.shape), list(out.shape),
        address(left), element_code(left), broadcast_strides(left, out.shape),
        address(right), element_code(right), broadcast_strides(right, out.shape),
        address(out), element_code(out), list(out.strides),
    )  # fmt: skip


def _compute_dtype(x: Any, y: Any, code: Binary) -> torch.dtype:
    """The dtype that both operands are cast to: torch's promoted dtype, but float32 for float16 and bfloat16."""
    kinds = [side.dtype if isinstance(side, Array) else type(side) for side in (x, y)]
    if torch.float64 in kinds:
        return torch.float64
    floats = any(kind is float or (isinstance(kind, torch.dtype) and kind.is_floating_point) for kind in kinds)
    return torch.float32 if floats or code == Binary.DIV else torch.int64


def _as_bool(b: Builder, side: Any) -> Array:
    if not isinstance(side, Array):
        return b.scalar(bool(side), torch.bool)
    if side.dtype == torch.bool:
        return side
    nonzero = b.trace.temporary(side.shape, torch.bool)
    binary(b, Binary.NE, side, 0, nonzero)
    return nonzero


def _output(node: Node) -> Array:
    """The new array, or the array that an in-place operator changes."""
    return (node.outputs or node.writes)[0]


# ── shapes and dtypes ─────────────────────────────────────────────────────────────────────────────────────────
# torch's own meta implementations are partly written in Python, and importing them takes a second.


def _infer(name: str) -> Infer:
    def infer(*args: Any, **kwargs: Any) -> Tensor:
        operands = [a for a in args[: 2 if name in _BINARY else 1] if isinstance(a, Tensor | int | float)]
        shape = broadcast_shapes(operands)
        like = next((a for a in operands if isinstance(a, Tensor) and a.shape == shape), None)
        return empty_meta(shape, _result_type(name, operands), like)

    return infer


def empty_meta(shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
    """A meta tensor whose dims have the memory order of those of `like`, as results of elementwise operators do."""
    if like is None or like.is_contiguous():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    order = sorted(range(len(shape)), key=lambda dim: (like.stride(dim), shape[dim] != 1, -dim))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def broadcast_shapes(operands: Sequence[Any]) -> tuple[int, ...]:
    """The broadcast shape of the tensors and shapes among the operands. (torch's own imports its symbolic shapes.)"""
    shapes = [tuple(getattr(operand, "shape", operand)) for operand in operands if not isinstance(operand, int | float)]
    out: list[int] = []
    for shape in shapes:
        out = [1] * (len(shape) - len(out)) + out
        for i, size in enumerate(reversed(shape), start=1):
            if size != 1:
                if out[-i] not in (1, size):
                    raise ProgramError(f"shapes that do not broadcast: {[list(shape) for shape in shapes]}")
                out[-i] = size
    return tuple(out)


def _result_type(name: str, operands: Sequence[Any]) -> torch.dtype:
    if name in _TO_BOOL:
        return torch.bool
    dtype = torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype
    return torch.float32 if name in _TO_FLOAT and not dtype.is_floating_point else dtype


_OPERATIONS: dict[str, Unary | Binary] = {**_UNARY, **_BINARY}
for _name, _code in _OPERATIONS.items():
    for _op in _overloads(_name):
        lowers(_op)(_unary_rule(_code) if isinstance(_code, Unary) else _binary_rule(_code))
        if not _op._schema.is_mutable and len(_op._schema.arguments) <= 3 and "mode" not in _op._overloadname:
            INFER[_op] = _infer(_name)


# ── other elementwise operators ───────────────────────────────────────────────────────────────────────────────


@lowers(aten.gelu.default, aten.gelu_.default)
def gelu(b: Builder, node: Node) -> None:
    tanh = named_arguments(node)["approximate"] == "tanh"
    b.unary(Unary.GELU_TANH if tanh else Unary.GELU, node.args[0], _output(node))


INFER[aten.gelu.default] = _infer("gelu")


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: Builder, node: Node) -> None:
    if named_arguments(node).get("alpha", 1) != 1:
        raise Unsupported("alpha")
    binary(b, Binary.SUB, node.args[1], node.args[0], _output(node))


@lowers(aten.pow.Tensor_Scalar, aten.pow_.Scalar)
def power(b: Builder, node: Node) -> None:
    x, exponent = node.args
    if exponent not in (*_POWERS, 3) or not x.dtype.is_floating_point:
        raise Unsupported(f"an exponent of {exponent}")
    if exponent != 3:
        b.unary(_POWERS[exponent], x, _output(node))
        return
    # x * x * x, as torch computes it; in float32 for float16 and bfloat16.
    square = b.trace.temporary(x.shape, torch.promote_types(x.dtype, torch.float32))
    b.unary(Unary.SQUARE, x, square)
    binary(b, Binary.MUL, square, x, _output(node))


INFER[aten.pow.Tensor_Scalar] = lambda x, exponent: empty_meta(x.shape, torch.result_type(x, exponent), x)


@lowers(aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.clamp_max.default)
def clamp(b: Builder, node: Node) -> None:
    arguments, x, out = named_arguments(node), node.args[0], _output(node)
    for bound, code in ((arguments.get("min"), Binary.MAX), (arguments.get("max"), Binary.MIN)):
        if bound is not None:
            binary(b, code, x, bound, out)
            x = out


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(b: Builder, node: Node) -> None:
    condition, x, y = node.args
    choose(b, condition, x, y, _output(node))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
def masked_fill(b: Builder, node: Node) -> None:
    x, mask, value = node.args
    choose(b, mask, value, x, _output(node))


def choose(b: Builder, condition: Array, x: Any, y: Any, out: Array) -> None:
    if condition.dtype != torch.bool:
        raise Unsupported(f"a condition of {condition.dtype}")
    x, y = (side if isinstance(side, Array) else b.scalar(side, out.dtype) for side in (x, y))
    b.call(
        onward_where, len(out.shape), list(out.shape), address(condition), broadcast_strides(condition, out.shape),
        address(x), element_code(x), broadcast_strides(x, out.shape),
        address(y), element_code(y), broadcast_strides(y, out.shape),
        address(out), element_code(out), list(out.strides),
    )  # fmt: skip


@lowers(
    aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.reshape.default, aten.flatten.using_ints, aten.alias_copy.default,
    aten.type_as.default, aten.ravel.default, aten.numpy_T.default,
)  # fmt: skip
def copy(b: Builder, node: Node) -> None:
    """Operators that copy their elements in the same order."""
    x, out = node.args[0], node.outputs[0]
    element_code(out)
    if x.shape == out.shape:
        b.copy(x, out)
    elif out.is_contiguous():  # a reshape that is not a view
        b.copy(x, out.reshaped(x.shape))
    else:
        raise Unsupported("a reshape into a layout that is not contiguous")


@lowers(aten.copy_.default)
def copy_(b: Builder, node: Node) -> None:
    b.copy(node.args[1], node.args[0])


@lowers(
    aten.fill_.Scalar, aten.fill_.Tensor, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zero_.default,
)  # fmt: skip
def fill(b: Builder, node: Node) -> None:
    out, name, arguments = _output(node), node.op._schema.name, named_arguments(node)
    value: Any = 0 if "zero" in name else 1 if "ones" in name else arguments.get("fill_value", arguments.get("value"))
    b.copy(value if isinstance(value, Array) else b.scalar(value, out.dtype), out)


@lowers(aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default)
def empty(b: Builder, node: Node) -> None:
    """Emit nothing: the values of an empty tensor are undefined."""


@lowers(aten.cat.default, aten.concat.default, aten.stack.default)
def cat(b: Builder, node: Node) -> None:
    arguments, out = named_arguments(node), node.outputs[0]
    dim = arguments["dim"] % len(out.shape)
    offset = out.offset
    for part in arguments["tensors"]:
        if node.op is aten.stack.default:
            part = _insert_dim(part, dim, 1)
        elif len(part.shape) != len(out.shape):  # torch accepts an empty tensor of one dimension
            continue
        b.copy(part, replace(out, shape=part.shape, offset=offset))
        offset += part.shape[dim] * out.strides[dim]


def _insert_dim(array: Array, dim: int, size: int) -> Array:
    """The array with a new dimension, along which it repeats."""
    shape = (*array.shape[:dim], size, *array.shape[dim:])
    return replace(array, shape=shape, strides=(*array.strides[:dim], 0, *array.strides[dim:]))


@lowers(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, node: Node) -> None:
    (x, repeats, dim, output_size), out = named_arguments(node).values(), node.outputs[0]
    if dim is None or output_size is not None:
        raise Unsupported("repeat_interleave without a dim")
    if not out.is_contiguous():
        raise Unsupported("an output that is not contiguous")
    repeated = _insert_dim(x, dim % len(x.shape) + 1, repeats)
    b.copy(repeated, out.reshaped(repeated.shape))
