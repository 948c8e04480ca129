"""Read plain torch as the ops that it spells out.

A forward of somebody's own writes a norm as seven operators and a rotation as five. Each pattern here finds the last of
them and puts one node of `onward.ops` in its place; the others stay, and nobody reads them any more. A pattern holds
only where what is written is the op's definition, with the roundings of the definition at the same places: a
rotation whose products are rounded to bfloat16 one by one stays as it is.

A pattern is a function (graph, node) -> the nodes that take the node's place, or None. A new one is a file and a line.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onward.program.builder import named_arguments
from onward.program.graph import Array, Kind, Node, PackedParams, Trace
from onward.program.pattern_graph import CASTS, Graph, either_way, is_float, narrowed, operands_of, permuted

aten, ops = torch.ops.aten, torch.ops.onward


def gate(graph: Graph, node: Node) -> list[Node] | None:
    if node.op is not aten.mul.Tensor or not is_float(node.outputs[0]) or not node.outputs[0].contiguous:
        return None
    for activated, up in either_way(operands_of(node)):
        activation = graph.maker(activated, aten.silu.default, aten.gelu.default)
        if activation is not None and _gate_fits(graph, node.outputs[0], activation.args[0], up):
            inputs = activation.args[0], up
            if activation.op is aten.silu.default:
                return [Node(ops.swiglu.default, inputs, {}, node.outputs, (), node.where)]
            args = (*inputs, named_arguments(activation)["approximate"] == "tanh")
            return [Node(ops.geglu.default, args, {}, node.outputs, (), node.where)]
    return None


def _gate_fits(graph: Graph, out: Array, gate: Any, up: Any) -> bool:
    return all(
        isinstance(each, Array) and each.shape == out.shape and each.dtype == out.dtype and graph.constant(each)
        for each in (gate, up)
    )


def rms_norm(graph: Graph, node: Node) -> list[Node] | None:
    """The last operator is the product with the weight, or the cast after it."""
    if node.op is aten.rms_norm.default:
        return _torch_rms_norm(node)
    out = node.outputs[0] if len(node.outputs) == 1 else None
    if out is None or not is_float(out) or not out.shape:
        return None
    found = None
    if node.op is aten.mul.Tensor:
        pairs = either_way(operands_of(node))
        found = next(filter(None, (_weighted(graph, out, *pair) for pair in pairs)), None) or _plain(graph, out, out)
    elif node.op in CASTS and node.args[0].dtype == torch.float32:
        pairs = either_way(graph.operands(node.args[0], aten.mul.Tensor))
        found = next(filter(None, (_in_float32(graph, out, *pair) for pair in pairs)), None)
        found = found or _plain(graph, out, node.args[0])
    return None if found is None else _norm_nodes(node, out, *found)


def layer_norm(graph: Graph, node: Node) -> list[Node] | None:
    """torch's own layer norm, with both weights, is the op's."""
    if node.op is not aten.layer_norm.default:
        return None
    arguments = named_arguments(node)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    if len(arguments["normalized_shape"]) != 1 or not is_float(x):
        return None
    if any(not isinstance(each, Array) or each.dtype != x.dtype for each in (weight, bias)):
        return None
    args = (x, weight, bias, float(arguments["eps"]))
    return [Node(ops.layer_norm.default, args, {}, node.outputs, (), node.where)]


def _torch_rms_norm(node: Node) -> list[Node] | None:
    arguments = named_arguments(node)
    x, weight, eps = arguments["input"], arguments["weight"], arguments["eps"]
    fits = is_float(x) and isinstance(weight, Array) and weight.dtype == x.dtype
    if not fits or len(arguments["normalized_shape"]) != 1:
        return None
    args = (x, weight, torch.finfo(x.dtype).eps if eps is None else float(eps), 0.0, True)
    return [Node(ops.rms_norm.default, args, {}, node.outputs, (), node.where)]


_Found = tuple[Array, Array | None, float, float]  # x, weight, eps, offset


def _weighted(graph: Graph, out: Array, quotient: Any, weight: Any) -> _Found | None:
    """weight * quotient.to(dtype): rounded, then multiplied. In float32 also (offset + weight) * quotient."""
    found = _quotient(graph, graph.rounded(quotient))
    if found is None:
        return None
    offset = 0.0
    if out.dtype == torch.float32:
        weight, offset = _weight_and_offset(graph, weight)
    return _checked(graph, out, found[0], weight, found[1], offset)


def _in_float32(graph: Graph, out: Array, quotient: Any, factor: Any) -> _Found | None:
    """(quotient * (offset + weight.float())).to(dtype), rounded once. (Without an offset the op rounds twice.)"""
    found = _quotient(graph, quotient)
    weight, offset = _weight_and_offset(graph, factor)
    if found is None or not offset or not isinstance(weight, Array) or weight.dtype != torch.float32:
        return None
    return _checked(graph, out, found[0], graph.widened(weight), found[1], offset)


def _plain(graph: Graph, out: Array, quotient: Array) -> _Found | None:
    """The quotient itself, rounded once: a norm without a weight."""
    found = _quotient(graph, quotient)
    return None if found is None or found[0].dtype != out.dtype else (found[0], None, found[1], 0.0)


def _quotient(graph: Graph, value: Any) -> tuple[Array, float] | None:
    """x and eps, where the value is x.float() * rsqrt(mean(x.float()^2) + eps) in float32."""
    if not isinstance(value, Array) or value.dtype != torch.float32:
        return None
    for wide, inverse in either_way(graph.operands(value, aten.mul.Tensor)):
        found = _mean_square_and_eps(graph, inverse)
        x = graph.widened(wide)  # x as it is will do: the product casts it
        if found is not None and is_float(x) and graph.widened(found[0]) == x and graph.constant(x):
            return x, found[1]
    return None


def _mean_square_and_eps(graph: Graph, inverse: Any) -> tuple[Array, float] | None:
    """The array whose mean square the inverse root is of, and eps."""
    root = graph.maker(inverse, aten.rsqrt.default)
    if root is None:
        root = graph.maker(inverse, aten.pow.Tensor_Scalar)
        if root is None or root.args[1] != -0.5:
            return None
    for mean, eps in either_way(graph.operands(root.args[0], aten.add.Tensor)):
        squared = _squared(graph, mean)
        if squared is not None and isinstance(eps, float):
            return squared, eps
    return None


def _squared(graph: Graph, mean: Any) -> Array | None:
    """The float32 array of whose squares `mean` is the mean over the last axis, kept."""
    node = graph.maker(mean, aten.mean.dim)
    if node is None:
        return None
    arguments, squares = named_arguments(node), node.args[0]
    dims = arguments["dim"] if isinstance(arguments["dim"], list | tuple) else [arguments["dim"]]
    last_axis = [dim % len(squares.shape) for dim in dims] == [len(squares.shape) - 1]
    if not last_axis or not arguments["keepdim"] or squares.dtype != torch.float32:
        return None
    square = graph.maker(squares, aten.square.default)
    if square is None:
        square = graph.maker(squares, aten.pow.Tensor_Scalar)
        if square is not None and square.args[1] != 2:
            return None
    if square is None:
        pair = graph.operands(squares, aten.mul.Tensor)
        return pair[0] if pair is not None and pair[0] == pair[1] else None
    wide: Array = square.args[0]
    return wide


def _weight_and_offset(graph: Graph, factor: Any) -> tuple[Any, float]:
    """(w, 1.0) of 1.0 + w; (the factor, 0.0) of anything else."""
    for offset, weight in either_way(graph.operands(factor, aten.add.Tensor)):
        if isinstance(offset, float | int) and isinstance(weight, Array):
            return weight, float(offset)
    return factor, 0.0


def _checked(graph: Graph, out: Array, x: Array, weight: Any, eps: float, offset: float) -> _Found | None:
    fits = isinstance(weight, Array) and weight.shape == x.shape[-1:] and weight.dtype == x.dtype == out.dtype
    return (x, weight, eps, offset) if fits and graph.constant(weight) else None


def _norm_nodes(node: Node, out: Array, x: Array, weight: Array | None, eps: float, offset: float) -> list[Node] | None:
    """The node of the norm. Its rows are taken in the order in which those of the result lie in memory."""
    order = sorted(range(len(out.shape)), key=lambda dim: (-out.strides[dim], dim))
    if order[-1] != len(order) - 1:
        order = list(range(len(order)))
    x, out = permuted(x, order), permuted(out, order)
    if x.shape != out.shape or not out.contiguous:
        return None
    if weight is None:
        return [Node(aten.rms_norm.default, (x, [x.shape[-1]], None, eps), {}, (out,), (), node.where)]
    return [Node(ops.rms_norm.default, (x, weight, eps, offset, not offset), {}, (out,), (), node.where)]


def product(graph: Graph, node: Node) -> list[Node] | None:
    """linear(x, w, bias), x @ w and addmm(bias, x, w) with a matrix w among the params."""
    operands = _operands(node)
    if operands is None or not node.outputs[0].contiguous:
        return None
    x, weight, bias = operands
    if not _product_fits(graph, x, weight, bias):
        return None
    data = graph.packed(weight)
    if data is None:
        return None
    args = (x, data, bias, *weight.shape)
    return [Node(ops.packed_linear.default, args, {}, node.outputs, (), node.where)]


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """x [..., K], the weight [N, K] and the bias of the product, in the order of `ops.linear`."""
    if node.op is aten.linear.default:
        arguments = named_arguments(node)
        return arguments["input"], arguments["weight"], arguments["bias"]
    bias = None
    if node.op is aten.addmm.default:
        arguments = named_arguments(node)
        if arguments["alpha"] != 1 or arguments["beta"] != 1:
            return None
        bias, x, weight = node.args[:3]
    elif node.op in (aten.matmul.default, aten.mm.default):
        x, weight = node.args[:2]
    else:
        return None
    return (x, permuted(weight, (1, 0)), bias) if len(weight.shape) == 2 else None


def _product_fits(graph: Graph, x: Any, weight: Any, bias: Any) -> bool:
    if not (is_float(x) and is_float(weight) and len(weight.shape) == 2 and x.dtype == weight.dtype):
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        return False
    return weight.storage.kind is Kind.PARAM and graph.constant(weight) and len(x.shape) >= 2


# Operators of one operand: of equal halves they make equal halves.
_ONE_BY_ONE = (aten.cos.default, aten.sin.default, aten.neg.default, aten.clone.default, *CASTS)


def rotation(graph: Graph, node: Node) -> list[Node] | None:
    """The last operator is the sum, or the cast of a sum that was computed in float32."""
    if node.op is aten.add.Tensor:
        pairs = either_way(operands_of(node))
    elif node.op in CASTS:
        pairs = either_way(graph.operands(node.args[0], aten.add.Tensor))
    else:
        return None
    out = node.outputs[0]
    if not is_float(out) or len(out.shape) != 4 or out.strides[-1] != 1:
        return None
    for plain, turned in pairs:
        found = _terms(graph, plain, turned)
        if found is not None and (found[0].shape, found[0].dtype) == (out.shape, out.dtype):
            x, cos, sin = found
            before, signed = _signed(graph, sin, node)
            return [*before, Node(ops.rotate.default, (x, cos, signed, False), {}, (out,), (), node.where)]
    return None


def _terms(graph: Graph, plain: Any, turned: Any) -> tuple[Array, Array, Array] | None:
    """x [B, H, T, D], cos and sin [B, T, D], where the two terms are x * cos and rotate_half(x) * sin in float32."""
    for wide, cos in either_way(graph.operands(plain, aten.mul.Tensor)):
        for half_turned, sin in either_way(graph.operands(turned, aten.mul.Tensor)):
            x = graph.widened(wide)
            if not is_float(x) or len(x.shape) != 4 or _half_turned(graph, half_turned) != x or not graph.constant(x):
                continue
            flat = [_of_all_heads(graph, angles, x) for angles in (cos, sin)]
            if flat[0] is not None and flat[1] is not None:
                return x, flat[0], flat[1]
    return None


def _half_turned(graph: Graph, value: Any) -> Any:
    """x, where the value is cat((-x2, x1)) of the halves of x; either may be cast to float32, before or after."""
    value = graph.widened(value)
    node = graph.maker(value, aten.cat.default)
    if node is None or len(node.args[0]) != 2 or (node.args[1:] or (0,))[0] not in (-1, len(value.shape) - 1):
        return None
    negated = graph.maker(node.args[0][0], aten.neg.default)
    if negated is None:
        return None
    first, second = node.args[0][1], negated.args[0]
    half = first.shape[-1]
    whole = replace(first, shape=(*first.shape[:-1], 2 * half))
    return graph.widened(whole) if narrowed(whole, half, half) == second else None


def _of_all_heads(graph: Graph, angles: Any, x: Array) -> Array | None:
    """cos or sin [B, 1, T, D] in float32, of which both halves are equal, as [B, T, D]."""
    batch, _, queries, dim = x.shape
    if not isinstance(angles, Array) or angles.dtype != torch.float32 or not _equal_halves(graph, angles):
        return None
    if angles.shape != (batch, 1, queries, dim):
        return None
    flat = replace(angles, shape=(batch, queries, dim), strides=tuple(angles.strides[i] for i in (0, 2, 3)))
    return flat if flat.contiguous else None


def _equal_halves(graph: Graph, angles: Array) -> bool:
    """Whether the two halves of the last axis hold the same values, since one operator or another repeats them."""
    node = graph.storage_maker(angles)
    if node is None or angles.strides[-1] != 1:
        return False
    made = node.outputs[0]
    if made.shape[-1] != angles.shape[-1] or made.strides[-1] != 1 or made.offset != angles.offset:
        return False
    if node.op is aten.cat.default:
        parts = node.args[0]
        along = (node.args[1:] or (0,))[0]
        return len(parts) == 2 and parts[0] == parts[1] and along in (-1, len(made.shape) - 1)
    if node.op is aten.mul.Tensor and not isinstance(node.args[1], Array):
        return _equal_halves(graph, node.args[0])
    return node.op in _ONE_BY_ONE and _equal_halves(graph, node.args[0])


def _signed(graph: Graph, sin: Array, node: Node) -> tuple[list[Node], Array]:
    """The sines as `ops.rotate` takes them, the first half negated; before, the nodes that make them at first use."""
    known = graph.signed_sines.get(sin)
    if known is not None:
        return [], known
    half = sin.shape[-1] // 2
    negated = graph.temporary((*sin.shape[:-1], half), sin.dtype)
    signed = graph.temporary(sin.shape, sin.dtype)
    graph.signed_sines[sin] = signed
    halves = [negated, narrowed(sin, half, half)]
    return [
        Node(aten.neg.default, (narrowed(sin, 0, half),), {}, (negated,), (), node.where),
        Node(aten.cat.default, (halves, -1), {}, (signed,), (), node.where),
    ], signed


Pattern = Callable[[Graph, Node], list[Node] | None]

PATTERNS: tuple[Pattern, ...] = (rms_norm, layer_norm, rotation, gate, product)


def canonicalise(trace: Trace, packed: PackedParams | None = None) -> list[Node]:
    """The nodes of a trace, with ops in the place of what spells them out.

    packed: where the copies of matrices go, if params will not change.
    """
    graph = Graph(trace, packed)
    nodes: list[Node] = []
    for node in trace.nodes:
        found = (pattern(graph, node) for pattern in PATTERNS)
        nodes += next((replacement for replacement in found if replacement is not None), [node])
    return nodes
