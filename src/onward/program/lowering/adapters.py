"""The rule for updates by adapters."""

import torch

from onward import ops as _registered  # noqa: F401 - for the names under torch.ops.onward
from onward.program.calls import address
from onward.program.lowering.builder import Builder, float_code, lowers
from onward.program.nodes import Node


@lowers(torch.ops.onward.lora.default)
def lora(b: Builder, node: Node) -> None:
    x, y, a, b_matrix, slots, scale, bias = node.args
    x_rows, rows, inputs, x_stride = b.rows(x)
    y_rows, _, outputs, y_stride = b.rows(y)
    optional = (None if array is None else address(b.contiguous(array)) for array in (scale, bias))
    b.call(
        "onward_lora", rows, max(rows // max(slots.shape[0], 1), 1), inputs, outputs, a.shape[1], a.shape[0],
        float_code(x), address(x_rows), x_stride, address(y_rows), y_stride, address(b.contiguous(a)),
        address(b.contiguous(b_matrix)), *optional, address(b.contiguous(slots)), address(node.outputs[0]), outputs,
    )  # fmt: skip
