"""The rule for updates by adapters."""

import torch

from onward import ops as _registered  # noqa: F401 - for the names under torch.ops.onward
from onward.program.arrays import Array
from onward.program.calls import address
from onward.program.lowering.builder import Builder, float_code, lowers
from onward.program.nodes import Node


@lowers(torch.ops.onward.lora.default)
def lora(b: Builder, node: Node) -> None:
    updates(b, [node])


def updates(b: Builder, nodes: list[Node]) -> None:
    """Updates of products of one x, by the adapters of the same rows."""
    x, _, a, _, slots, *_ = nodes[0].args
    x_rows, rows, inputs, stride = b.rows(x)
    parts = [_part(b, node) for node in nodes]
    b.call(
        "onward_lora", parts, len(parts), rows, max(rows // max(slots.shape[0], 1), 1), inputs, a.shape[0],
        float_code(x), address(x_rows), stride, address(b.contiguous(slots)),
    )  # fmt: skip


def _part(b: Builder, node: Node) -> dict[str, object]:
    _, y, a, b_matrix, _, ranks, factors, scale, shift = node.args
    y_rows, _, outputs, y_stride = b.rows(y)
    a, b_matrix = (t if _slots_are_contiguous(t) else b.contiguous(t) for t in (a, b_matrix))
    part = {
        "outputs": outputs, "rank": a.shape[1], "y_stride": y_stride, "a_stride": a.strides[0],
        "b_stride": b_matrix.strides[0], "out_stride": outputs, "y": address(y_rows), "a": address(a),
        "b": address(b_matrix), "ranks": address(b.contiguous(ranks)), "out": address(node.outputs[0]),
    }  # fmt: skip
    if factors is not None:
        part["factors"] = address(b.contiguous(factors))
    if scale is not None:
        part |= {"scale": address(b.contiguous(scale)), "shift": address(b.contiguous(shift))}
    return part


def _slots_are_contiguous(stack: Array) -> bool:
    """Whether each slot [R, K] of a stack [S, R, K] lies in one piece."""
    return stack.strides[2] == 1 and stack.strides[1] == stack.shape[2]
