"""Rules for a mixture of experts: the router's choice and the experts themselves."""

import torch

from onward.ops.experts import ACTIVATIONS, format_code
from onward.ops.router import SCORES
from onward.program.calls import address
from onward.program.lowering.builder import Builder, Unsupported, float_code, lowers
from onward.program.nodes import Node

ops = torch.ops.onward


@lowers(ops.top_experts.default)
def top_experts(b: Builder, node: Node) -> None:
    logits, bias, count, score, *groups, normalize, scale = node.args
    chosen, weights = node.outputs
    logits, rows, experts, stride = b.rows(logits)
    b.call(
        "onward_top_experts", rows, experts, address(logits), float_code(logits), stride, count, SCORES.index(score),
        None if bias is None else address(b.contiguous(bias)), *groups, normalize, scale, address(chosen),
        address(weights),
    )  # fmt: skip


@lowers(ops.experts.default)
def experts(b: Builder, node: Node) -> None:
    x, chosen, weights, gate, up, down, *biases, format, inner, activation, alpha, limit = node.args
    if format == "stock":
        raise Unsupported("weights that are not packed, which each call does anew: give it ops.pack_experts of them")
    x, rows, width, stride = b.rows(x)
    out = node.outputs[0]
    arguments = {
        "tokens": rows, "width": width, "inner": inner, "experts": up.shape[0], "chosen": chosen.shape[-1],
        "x": address(x), "x_stride": stride, "x_dtype": float_code(x), "ids": address(b.contiguous(chosen)),
        "weights": address(b.contiguous(weights)), "gate": None if gate is None else address(gate), "up": address(up),
        "down": address(down),
        "out": address(out), "out_stride": width, "out_dtype": float_code(out), "format": format_code(format, up),
        "activation": ACTIVATIONS.index(activation), "alpha": alpha, "limit": limit,
    }  # fmt: skip
    for name, bias in zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True):
        if bias is not None:
            arguments |= {name: address(b.contiguous(bias)), "bias_dtype": float_code(bias)}
    b.call("onward_experts", [arguments])
