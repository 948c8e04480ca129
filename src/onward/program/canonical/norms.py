"""Norms: x * rsqrt(mean(x^2) + eps), in float32, with a weight; and torch's own norms.

Written as Llama does it, the quotient is cast back and then multiplied by the weight; as Gemma does, all of it is
float32 and the weight is 1 + w. In float32 nothing is cast, and either is the op's definition.
"""

from typing import Any

import torch

from onward.program.arrays import Array
from onward.program.canonical.graph import CASTS, Graph, either_way, is_float, operands_of, permuted
from onward.program.lowering.builder import named_arguments
from onward.program.nodes import Node

aten, ops = torch.ops.aten, torch.ops.onward


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
