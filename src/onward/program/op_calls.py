"""Rules for the ops of adapters, mixtures of experts and recurrent states."""

from typing import Any

import torch

from onward import ops as _registered  # noqa: F401 - for the names under torch.ops.onward
from onward.ops.experts import ACTIVATIONS, format_code
from onward.ops.gated_delta import EPS
from onward.ops.recurrent_state import state_fields
from onward.ops.router import SCORES
from onward.program.builder import Builder, Unsupported, float_code, lowers
from onward.program.graph import Array, Node, address


@lowers(torch.ops.onward.lora.default)
def lora(b: Builder, node: Node) -> None:
    updates(b, [node])


def updates(b: Builder, nodes: list[Node]) -> None:
    """Emit the adapter updates of several products of one x, with the same adapter slot for each row, as one call."""
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
    # Each slot [R, K] of a stack [S, R, K] has to be contiguous.
    a, b_matrix = (t if t.strides[1:] == (t.shape[2], 1) else b.contiguous(t) for t in (a, b_matrix))
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


ops = torch.ops.onward


@lowers(ops.top_experts.default)
def top_experts(b: Builder, node: Node) -> None:
    logits, bias, count, score, *groups, normalize, scale = node.args
    expert_ids, weights = node.outputs
    logits, rows, experts, stride = b.rows(logits)
    b.call(
        "onward_top_experts", rows, experts, address(logits), float_code(logits), stride, count, SCORES.index(score),
        b.optional(bias), *groups, normalize, scale, address(expert_ids), address(weights),
    )  # fmt: skip


@lowers(ops.experts.default)
def experts(b: Builder, node: Node) -> None:
    x, expert_ids, weights, gate, up, down, *biases, format, inner, activation, alpha, limit = node.args
    if format == "stock":
        raise Unsupported("unpacked weights, which every call packs again: pass weights from ops.pack_experts")
    x, rows, width, stride = b.rows(x)
    out = node.outputs[0]
    arguments = {
        "tokens": rows, "width": width, "inner": inner, "experts": up.shape[0], "chosen": expert_ids.shape[-1],
        "x": address(x), "x_stride": stride, "x_dtype": float_code(x), "ids": address(b.contiguous(expert_ids)),
        "weights": address(b.contiguous(weights)), "gate": None if gate is None else address(gate), "up": address(up),
        "down": address(down),
        "out": address(out), "out_stride": width, "out_dtype": float_code(out), "format": format_code(format, up),
        "activation": ACTIVATIONS.index(activation), "alpha": alpha, "limit": limit,
    }  # fmt: skip
    for name, bias in zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True):
        if bias is not None:
            arguments |= {name: address(b.contiguous(bias)), "bias_dtype": float_code(bias)}
    b.call("onward_experts", [arguments])


_ANY_SLOT = 2**31 - 1


@lowers(ops.short_conv.default)
def short_conv(b: Builder, node: Node) -> None:
    x, weight, bias, *state, silu = node.args
    x = b.with_contiguous_rows(x)
    call = {
        "batch": x.shape[0], "queries": x.shape[1], "channels": x.shape[2], "taps": weight.shape[0], "x": address(x),
        "x_strides": x.strides[:2], "weight": address(b.contiguous(weight)),
        "bias": b.optional(bias), "out": address(node.outputs[0]), "dtype": float_code(x), "silu": int(silu),
    }  # fmt: skip
    b.call("onward_short_conv", [call | _state(*state)])


@lowers(ops.gated_delta.default)
def gated_delta(b: Builder, node: Node) -> None:
    qkv, decay, beta, A_log, decay_bias, *state, key_heads, key_dim = node.args
    qkv, decay, beta = map(b.with_contiguous_rows, (qkv, decay, beta))
    out = node.outputs[0]
    call = {
        "batch": out.shape[0], "queries": out.shape[1], "key_heads": key_heads, "value_heads": out.shape[2],
        "key_dim": key_dim, "value_dim": out.shape[3], "qkv": address(qkv), "qkv_strides": qkv.strides[:2],
        "decay": address(decay), "decay_strides": decay.strides[:2], "beta": address(beta),
        "beta_strides": beta.strides[:2], "log_rate": address(b.contiguous(A_log)),
        "decay_bias": address(b.contiguous(decay_bias)), "out": address(out), "dtype": float_code(qkv), "eps": EPS,
    }  # fmt: skip
    b.call("onward_gated_delta", [call | _state(*state)])


@lowers(ops.ssd.default)
def ssd(b: Builder, node: Node) -> None:
    mixed, dt, A_log, step_bias, skip, *state, groups, state_dim, least, most = node.args
    mixed, dt = map(b.with_contiguous_rows, (mixed, dt))
    out = node.outputs[0]
    call = {
        "batch": out.shape[0], "queries": out.shape[1], "groups": groups, "heads": out.shape[2],
        "state_dim": state_dim, "head_dim": out.shape[3], "mixed": address(mixed), "mixed_strides": mixed.strides[:2],
        "step": address(dt), "step_strides": dt.strides[:2], "log_rate": address(b.contiguous(A_log)),
        "step_bias": address(b.contiguous(step_bias)), "skip": address(b.contiguous(skip)), "out": address(out),
        "dtype": float_code(mixed), "least": least, "most": most,
    }  # fmt: skip
    b.call("onward_ssd", [call | _state(*state)])


def _state(state: Array, block_numbers: Array, offsets: Array, rows: Array | None) -> dict[str, Any]:
    fields = dict(state_fields(state, block_numbers, offsets, rows, address))
    # A program serves pools with any number of slots, so that number must not be part of it.
    return fields if rows is None else fields | {"slots": _ANY_SLOT}
