"""Gated activations: silu(gate) * up and gelu(gate) * up."""

from typing import Any

import torch

from onward.program.arrays import Array
from onward.program.canonical.graph import Graph, either_way, is_float, operands_of
from onward.program.lowering.builder import named_arguments
from onward.program.nodes import Node

aten, ops = torch.ops.aten, torch.ops.onward


def gate(graph: Graph, node: Node) -> list[Node] | None:
    if node.op is not aten.mul.Tensor or not is_float(node.outputs[0]) or not node.outputs[0].contiguous:
        return None
    for activated, up in either_way(operands_of(node)):
        activation = graph.maker(activated, aten.silu.default, aten.gelu.default)
        if activation is not None and _fit(graph, node.outputs[0], activation.args[0], up):
            inputs = activation.args[0], up
            if activation.op is aten.silu.default:
                return [Node(ops.swiglu.default, inputs, {}, node.outputs, (), node.where)]
            args = (*inputs, named_arguments(activation)["approximate"] == "tanh")
            return [Node(ops.geglu.default, args, {}, node.outputs, (), node.where)]
    return None


def _fit(graph: Graph, out: Array, gate: Any, up: Any) -> bool:
    return all(
        isinstance(each, Array) and each.shape == out.shape and each.dtype == out.dtype and graph.constant(each)
        for each in (gate, up)
    )
