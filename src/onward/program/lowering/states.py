"""Rules for the operators that keep recurrent states."""

from typing import Any

import torch

from onward.ops.gated_delta import EPS
from onward.ops.state import arguments
from onward.program.arrays import Array
from onward.program.calls import address
from onward.program.lowering.builder import Builder, float_code, lowers
from onward.program.nodes import Node

ops = torch.ops.onward
_ANY_SLOT = 2**31 - 1


@lowers(ops.short_conv.default)
def short_conv(b: Builder, node: Node) -> None:
    x, weight, bias, state, held, offsets, rows, silu = node.args
    x = _features_together(b, x)
    call = {
        "batch": x.shape[0], "queries": x.shape[1], "channels": x.shape[2], "taps": weight.shape[0], "x": address(x),
        "x_strides": x.strides[:2], "weight": address(b.contiguous(weight)),
        "bias": None if bias is None else address(b.contiguous(bias)), "out": address(node.outputs[0]),
        "dtype": float_code(x), "silu": int(silu),
    }  # fmt: skip
    b.call("onward_short_conv", [call | _state(state, held, offsets, rows)])


@lowers(ops.gated_delta.default)
def gated_delta(b: Builder, node: Node) -> None:
    *inputs, log_rate, decay_bias, state, held, offsets, rows, key_heads, key_dim = node.args
    qkv, decay, beta = (_features_together(b, x) for x in inputs)
    out = node.outputs[0]
    call = {
        "batch": out.shape[0], "queries": out.shape[1], "key_heads": key_heads, "value_heads": out.shape[2],
        "key_dim": key_dim, "value_dim": out.shape[3], "qkv": address(qkv), "qkv_strides": qkv.strides[:2],
        "decay": address(decay), "decay_strides": decay.strides[:2], "beta": address(beta),
        "beta_strides": beta.strides[:2], "log_rate": address(b.contiguous(log_rate)),
        "decay_bias": address(b.contiguous(decay_bias)), "out": address(out), "dtype": float_code(qkv), "eps": EPS,
    }  # fmt: skip
    b.call("onward_gated_delta", [call | _state(state, held, offsets, rows)])


@lowers(ops.ssd.default)
def ssd(b: Builder, node: Node) -> None:
    mixed, step, log_rate, step_bias, skip, state, held, offsets, rows, groups, state_dim, least, most = node.args
    mixed, step = (_features_together(b, x) for x in (mixed, step))
    out = node.outputs[0]
    call = {
        "batch": out.shape[0], "queries": out.shape[1], "groups": groups, "heads": out.shape[2],
        "state_dim": state_dim, "head_dim": out.shape[3], "mixed": address(mixed), "mixed_strides": mixed.strides[:2],
        "step": address(step), "step_strides": step.strides[:2], "log_rate": address(b.contiguous(log_rate)),
        "step_bias": address(b.contiguous(step_bias)), "skip": address(b.contiguous(skip)), "out": address(out),
        "dtype": float_code(mixed), "least": least, "most": most,
    }  # fmt: skip
    b.call("onward_ssd", [call | _state(state, held, offsets, rows)])


def _state(state: Array, held: Array, offsets: Array, rows: Array | None) -> dict[str, Any]:
    fields = dict(arguments(state, held, offsets, rows, address))
    # A program serves memories of any number of slots: their size is no number of its own.
    return fields if rows is None else fields | {"slots": _ANY_SLOT}


def _features_together(b: Builder, x: Array) -> Array:
    return x if x.strides[-1] == 1 else b.contiguous(x)
