"""Rotary position embedding as Hugging Face writes it: x * cos + rotate_half(x) * sin, computed in float32."""

from dataclasses import replace
from typing import Any

import torch

from onward.program.arrays import Array
from onward.program.canonical.graph import CASTS, Graph, either_way, is_float, narrowed, operands_of
from onward.program.nodes import Node

aten, ops = torch.ops.aten, torch.ops.onward

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
