"""Products with a weight matrix that will not change: with a packed copy of it, which the kernels read fastest."""

from typing import Any

import torch

from onward.program.arrays import Kind
from onward.program.canonical.graph import Graph, is_float, permuted
from onward.program.lowering.builder import named_arguments
from onward.program.nodes import Node

aten, ops = torch.ops.aten, torch.ops.onward


def product(graph: Graph, node: Node) -> list[Node] | None:
    """linear(x, w, bias), x @ w and addmm(bias, x, w) with a matrix w among the params."""
    operands = _operands(node)
    if operands is None or not node.outputs[0].contiguous:
        return None
    x, weight, bias = operands
    if not _fit(graph, x, weight, bias):
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


def _fit(graph: Graph, x: Any, weight: Any, bias: Any) -> bool:
    if not (is_float(x) and is_float(weight) and len(weight.shape) == 2 and x.dtype == weight.dtype):
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        return False
    return weight.storage.kind is Kind.PARAM and graph.constant(weight) and len(x.shape) >= 2
