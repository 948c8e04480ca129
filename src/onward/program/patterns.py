"""Match sequences of torch operators that spell out an op of `onward.ops`.

A forward written in plain torch spells a norm as seven operators and a rotation as five. A pattern matches the last of
them and replaces it with one node of `onward.ops`; the others become dead code. A pattern only matches the op's exact
definition, with roundings at the same places: a rotation whose products are each rounded to bfloat16 does not match.

A pattern is a function (graph, node) -> the nodes that replace the node, or None.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from onward.ops.kernel_calls import DTYPES
from onward.program.builder import named_arguments
from onward.program.graph import Array, Kind, Node, PackedParams, Trace, Uses, contiguous_strides

aten, ops = torch.ops.aten, torch.ops.onward

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
        self.constant = Uses(trace.nodes).constant  # whether no node changes an array after its creation
        self._producers = {node.outputs[0]: node for node in trace.nodes if len(node.outputs) == 1}
        self._storage_producers = {array.storage: node for array, node in self._producers.items()}
        self.signed_sines: dict[Array, Array] = {}  # copies with the first half negated, by a rotation's sines

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


def is_float(array: Any) -> bool:
    """Whether it is an array of a dtype that the ops support."""
    return isinstance(array, Array) and array.dtype in DTYPES


def gate(graph: Graph, node: Node) -> list[Node] | None:
    if node.op is not aten.mul.Tensor or not is_float(node.outputs[0]) or not node.outputs[0].is_contiguous():
        return None
    out = node.outputs[0]
    for activated, up in operands_of(node):
        activation = graph.producer(activated, aten.silu.default, aten.gelu.default)
        if activation is not None and all(
            isinstance(each, Array) and each.shape == out.shape and each.dtype == out.dtype and graph.constant(each)
            for each in (activation.args[0], up)
        ):
            if activation.op is aten.silu.default:
                return [node.replaced_by(ops.swiglu.default, activation.args[0], up)]
            tanh = named_arguments(activation)["approximate"] == "tanh"
            return [node.replaced_by(ops.geglu.default, activation.args[0], up, tanh)]
    return None


def rms_norm(graph: Graph, node: Node) -> list[Node] | None:
    """The last operator is the product with the weight, or the cast that follows it."""
    if node.op is aten.rms_norm.default:
        return _torch_rms_norm(node)
    out = node.outputs[0] if len(node.outputs) == 1 else None
    if out is None or not is_float(out) or not out.shape:
        return None
    match = None
    if node.op is aten.mul.Tensor:
        matches = (_weighted(graph, out, *pair) for pair in operands_of(node))
        match = next(filter(None, matches), None) or _unweighted(graph, out, out)
    elif node.op in CASTS and node.args[0].dtype == torch.float32:
        matches = (_weighted_in_float32(graph, out, *pair) for pair in graph.operands(node.args[0], aten.mul.Tensor))
        match = next(filter(None, matches), None) or _unweighted(graph, out, node.args[0])
    return None if match is None else _norm_nodes(node, out, *match)


def layer_norm(graph: Graph, node: Node) -> list[Node] | None:
    """torch's own layer norm with weight and bias."""
    if node.op is not aten.layer_norm.default:
        return None
    x, shape, weight, bias, eps, *_ = named_arguments(node).values()
    if len(shape) != 1 or not is_float(x):
        return None
    if any(not isinstance(each, Array) or each.dtype != x.dtype for each in (weight, bias)):
        return None
    return [node.replaced_by(ops.layer_norm.default, x, weight, bias, float(eps))]


def _torch_rms_norm(node: Node) -> list[Node] | None:
    x, shape, weight, eps = named_arguments(node).values()
    matches = is_float(x) and isinstance(weight, Array) and weight.dtype == x.dtype
    if not matches or len(shape) != 1:
        return None
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    return [node.replaced_by(ops.rms_norm.default, x, weight, eps, 0.0, True)]


_Norm = tuple[Array, Array | None, float, float]  # x, weight, eps, offset


def _weighted(graph: Graph, out: Array, quotient: Any, weight: Any) -> _Norm | None:
    """weight * quotient.to(dtype): rounded, then multiplied. In float32 also (offset + weight) * quotient."""
    match = _quotient(graph, graph.before_rounding(quotient))
    if match is None:
        return None
    offset = 0.0
    if out.dtype == torch.float32:
        weight, offset = _weight_and_offset(graph, weight)
    return _checked(graph, out, match[0], weight, match[1], offset)


def _weighted_in_float32(graph: Graph, out: Array, quotient: Any, factor: Any) -> _Norm | None:
    """(quotient * (offset + weight.float())).to(dtype), rounded once. (Without an offset the op rounds twice.)"""
    match = _quotient(graph, quotient)
    weight, offset = _weight_and_offset(graph, factor)
    if match is None or not offset or not isinstance(weight, Array) or weight.dtype != torch.float32:
        return None
    return _checked(graph, out, match[0], graph.before_upcast(weight), match[1], offset)


def _unweighted(graph: Graph, out: Array, quotient: Array) -> _Norm | None:
    """The quotient itself, rounded once: a norm without a weight."""
    match = _quotient(graph, quotient)
    return None if match is None or match[0].dtype != out.dtype else (match[0], None, match[1], 0.0)


def _quotient(graph: Graph, value: Any) -> tuple[Array, float] | None:
    """x and eps, if the value is x.float() * rsqrt(mean(x.float()^2) + eps) in float32."""
    if not isinstance(value, Array) or value.dtype != torch.float32:
        return None
    for upcast, inverse in graph.operands(value, aten.mul.Tensor):
        match = _mean_square_and_eps(graph, inverse)
        x = graph.before_upcast(upcast)  # an x that isn't cast matches too: the product casts it
        if match is not None and is_float(x) and graph.before_upcast(match[0]) == x and graph.constant(x):
            return x, match[1]
    return None


def _mean_square_and_eps(graph: Graph, inverse: Any) -> tuple[Array, float] | None:
    """x and eps, if the value is rsqrt(mean(x^2) + eps)."""
    root = graph.producer(inverse, aten.rsqrt.default, aten.pow.Tensor_Scalar)
    if root is None or root.args[1:] not in ((), (-0.5,)):
        return None
    for mean, eps in graph.operands(root.args[0], aten.add.Tensor):
        squared = _squared(graph, mean)
        if squared is not None and isinstance(eps, float):
            return squared, eps
    return None


def _squared(graph: Graph, mean: Any) -> Array | None:
    """The float32 x, if the value is mean(x^2) over the last axis with keepdim."""
    node = graph.producer(mean, aten.mean.dim)
    if node is None:
        return None
    arguments, squares = named_arguments(node), node.args[0]
    dims = arguments["dim"] if isinstance(arguments["dim"], list | tuple) else [arguments["dim"]]
    last_axis = [dim % len(squares.shape) for dim in dims] == [len(squares.shape) - 1]
    if not last_axis or not arguments["keepdim"] or squares.dtype != torch.float32:
        return None
    square = graph.producer(squares, aten.square.default, aten.pow.Tensor_Scalar)
    if square is not None:
        x: Array = square.args[0]
        return x if square.args[1:] in ((), (2,)) else None
    return next((left for left, right in graph.operands(squares, aten.mul.Tensor) if left == right), None)


def _weight_and_offset(graph: Graph, factor: Any) -> tuple[Any, float]:
    """(w, 1.0) for 1.0 + w; (factor, 0.0) for anything else."""
    for offset, weight in graph.operands(factor, aten.add.Tensor):
        if isinstance(offset, float | int) and isinstance(weight, Array):
            return weight, float(offset)
    return factor, 0.0


def _checked(graph: Graph, out: Array, x: Array, weight: Any, eps: float, offset: float) -> _Norm | None:
    matches = isinstance(weight, Array) and weight.shape == x.shape[-1:] and weight.dtype == x.dtype == out.dtype
    return (x, weight, eps, offset) if matches and graph.constant(weight) else None


def _norm_nodes(node: Node, out: Array, x: Array, weight: Array | None, eps: float, offset: float) -> list[Node] | None:
    """The node of the norm, over rows in the memory order of the result."""
    order = sorted(range(len(out.shape)), key=lambda dim: (-out.strides[dim], dim))
    if order[-1] != len(order) - 1:
        order = list(range(len(order)))
    x, out = x.permuted(order), out.permuted(order)
    if x.shape != out.shape or not out.is_contiguous():
        return None
    if weight is None:
        return [node.replaced_by(aten.rms_norm.default, x, [x.shape[-1]], None, eps, outputs=(out,))]
    return [node.replaced_by(ops.rms_norm.default, x, weight, eps, offset, not offset, outputs=(out,))]


def product(graph: Graph, node: Node) -> list[Node] | None:
    """linear(x, w, bias), x @ w and addmm(bias, x, w) with a matrix w among the params."""
    operands = _operands(node)
    if operands is None or not node.outputs[0].is_contiguous():
        return None
    x, weight, bias = operands
    if not _can_pack(graph, x, weight, bias):
        return None
    data = graph.packed(weight)
    return None if data is None else [node.replaced_by(ops.packed_linear.default, x, data, bias, *weight.shape)]


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """x [..., K], weight [N, K] and bias of the product."""
    if node.op is aten.linear.default:
        x, weight, bias = named_arguments(node).values()
        return x, weight, bias
    bias = None
    if node.op is aten.addmm.default:
        bias, x, weight, beta, alpha = named_arguments(node).values()
        if alpha != 1 or beta != 1:
            return None
    elif node.op in (aten.matmul.default, aten.mm.default):
        x, weight = node.args[:2]
    else:
        return None
    return (x, weight.permuted((1, 0)), bias) if len(weight.shape) == 2 else None


def _can_pack(graph: Graph, x: Any, weight: Any, bias: Any) -> bool:
    if not (is_float(x) and is_float(weight) and len(weight.shape) == 2 and x.dtype == weight.dtype):
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        return False
    return weight.storage.kind is Kind.PARAM and graph.constant(weight) and len(x.shape) >= 2


# Unary operators, which map equal halves to equal halves.
_UNARY = (aten.cos.default, aten.sin.default, aten.neg.default, aten.clone.default, *CASTS)


def rotation(graph: Graph, node: Node) -> list[Node] | None:
    """The last operator is the sum, or the cast of a sum that was computed in float32."""
    if node.op is aten.add.Tensor:
        pairs = operands_of(node)
    elif node.op in CASTS:
        pairs = graph.operands(node.args[0], aten.add.Tensor)
    else:
        return None
    out = node.outputs[0]
    if not is_float(out) or len(out.shape) != 4 or out.strides[-1] != 1:
        return None
    for first, second in pairs:
        match = _terms(graph, first, second)
        if match is not None and (match[0].shape, match[0].dtype) == (out.shape, out.dtype):
            x, cos, sin = match
            before, signed = _signed(graph, sin, node)
            return [*before, node.replaced_by(ops.rotate.default, x, cos, signed, False, outputs=(out,))]
    return None


def _terms(graph: Graph, first: Any, second: Any) -> tuple[Array, Array, Array] | None:
    """x [B, H, T, D], cos and sin [B, T, D], if the terms are x * cos and rotate_half(x) * sin in float32."""
    for upcast, cos in graph.operands(first, aten.mul.Tensor):
        for rotated, sin in graph.operands(second, aten.mul.Tensor):
            x = graph.before_upcast(upcast)
            if not is_float(x) or len(x.shape) != 4 or _rotated_half(graph, rotated) != x or not graph.constant(x):
                continue
            angles = [_without_heads(graph, each, x) for each in (cos, sin)]
            if angles[0] is not None and angles[1] is not None:
                return x, angles[0], angles[1]
    return None


def _rotated_half(graph: Graph, value: Any) -> Any:
    """x, if the value is cat((-x2, x1)) of the halves of x; either may be cast to float32, before or after."""
    value = graph.before_upcast(value)
    node = graph.producer(value, aten.cat.default)
    if node is None or len(node.args[0]) != 2 or (node.args[1:] or (0,))[0] not in (-1, len(value.shape) - 1):
        return None
    negated = graph.producer(node.args[0][0], aten.neg.default)
    if negated is None:
        return None
    first, second = node.args[0][1], negated.args[0]
    half = first.shape[-1]
    whole = replace(first, shape=(*first.shape[:-1], 2 * half))
    return graph.before_upcast(whole) if whole.narrowed(half, half) == second else None


def _without_heads(graph: Graph, angles: Any, x: Array) -> Array | None:
    """cos or sin [B, 1, T, D] in float32 with equal halves, as [B, T, D]."""
    batch, _, queries, dim = x.shape
    if not isinstance(angles, Array) or angles.dtype != torch.float32 or not _equal_halves(graph, angles):
        return None
    if angles.shape != (batch, 1, queries, dim):
        return None
    flat = replace(angles, shape=(batch, queries, dim), strides=tuple(angles.strides[i] for i in (0, 2, 3)))
    return flat if flat.is_contiguous() else None


def _equal_halves(graph: Graph, angles: Array) -> bool:
    """Whether both halves of the last axis have equal values, because they are concatenated copies."""
    node = graph.storage_producer(angles)
    if node is None or angles.strides[-1] != 1:
        return False
    out = node.outputs[0]
    if out.shape[-1] != angles.shape[-1] or out.strides[-1] != 1 or out.offset != angles.offset:
        return False
    if node.op is aten.cat.default:
        parts = node.args[0]
        dim = (node.args[1:] or (0,))[0]
        return len(parts) == 2 and parts[0] == parts[1] and dim in (-1, len(out.shape) - 1)
    scales = node.op is aten.mul.Tensor and not isinstance(node.args[1], Array)
    return (scales or node.op in _UNARY) and _equal_halves(graph, node.args[0])


def _signed(graph: Graph, sin: Array, node: Node) -> tuple[list[Node], Array]:
    """The nodes that compute the sines of `ops.rotate`, once, and the sines: their first half is negated."""
    known = graph.signed_sines.get(sin)
    if known is not None:
        return [], known
    half = sin.shape[-1] // 2
    negated = graph.trace.temporary((*sin.shape[:-1], half), sin.dtype)
    signed = graph.trace.temporary(sin.shape, sin.dtype)
    graph.signed_sines[sin] = signed
    return [
        node.replaced_by(aten.neg.default, sin.narrowed(0, half), outputs=(negated,)),
        node.replaced_by(aten.cat.default, [negated, sin.narrowed(half, half)], -1, outputs=(signed,)),
    ], signed


Pattern = Callable[[Graph, Node], list[Node] | None]

PATTERNS: tuple[Pattern, ...] = (rms_norm, layer_norm, rotation, gate, product)


def canonicalise(trace: Trace, packed: PackedParams | None = None) -> list[Node]:
    """The nodes of a trace, with matched patterns replaced by ops.

    packed: the cache of packed matrices; None if params may change.
    """
    graph = Graph(trace, packed)
    nodes: list[Node] = []
    for node in trace.nodes:
        replacements = (pattern(graph, node) for pattern in PATTERNS)
        nodes += next((replacement for replacement in replacements if replacement is not None), [node])
    return nodes
