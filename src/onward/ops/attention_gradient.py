"""The gradient of attention, and the parts of its definition that it shares.

Shapes: as in `onward.ops.attention`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.ops.operator import Gradients

# Queries per block of the definition: enough for full speed, few enough that half of the products above the diagonal
# are never computed. This is faster than torch's own causal kernel on a CPU (benchmarks/LOG.md).
QUERY_BLOCK = 128
GRADIENT_BLOCK = 64


def causal_visibility(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [T, S]: which keys each query sees, aligned to the bottom right."""
    query_at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key_at = torch.arange(keys, device=device)
    visible = key_at <= query_at
    return visible if window is None else visible & (key_at > query_at - window)


def grouped(x: Tensor, groups: int) -> Tensor:
    """[B, H, T, X] -> [B, G, H/G * T, X]: the heads of a group as one matrix against their shared keys."""
    batch, heads, queries, width = x.shape
    return x.reshape(batch, groups, heads // groups * queries, width)


def attention_gradient(grad: Tensor, *arguments: Any) -> Gradients:
    """The gradients of q, k, v, a mask (None) and the sinks, from that of the output. arguments: those of the op.

    In float32, a block of queries at a time against the keys that its queries see. On a CPU this takes half the time of
    torch's flash attention, whose forward would have to run again (benchmarks/LOG.md).
    """
    q, k, v, mask, sinks, causal, scale, window, softcap = arguments
    (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
    before, float32 = keys - queries, torch.float32
    k_float, v_float = (x.to(float32).reshape(batch * groups, keys, -1) for x in (k, v))
    q_float, grad_float = (x.to(float32).reshape(batch * groups, heads // groups, queries, -1) for x in (q, grad))
    to_q, to_k, to_v = torch.empty_like(q_float), torch.zeros_like(k_float), torch.zeros_like(v_float)
    to_sinks = None if sinks is None else torch.zeros(heads, device=q.device)
    for start in range(0, queries, GRADIENT_BLOCK):
        rows = slice(start, min(start + GRADIENT_BLOCK, queries))
        count, end = rows.stop - start, before + rows.stop if causal else keys
        seen = slice(max(0, before + start + 1 - window) if window else 0, end)
        q_block, grad_block = (x[:, :, rows].flatten(1, 2) for x in (q_float, grad_float))
        k_block, v_block = k_float[:, seen], v_float[:, seen]
        scores = torch.bmm(q_block, k_block.mT).mul_(scale)
        slope = torch.tanh(scores.div_(softcap)) if softcap else None
        scores = (scores if slope is None else slope * softcap).view(batch, heads, count, -1)
        if mask is not None:
            scores += mask.expand(batch, heads, queries, keys)[:, :, rows, seen]
        if causal:
            # All of the block's queries see the keys before the block, unless there is a window.
            edge = scores if window else scores[..., -count:]
            hidden = ~causal_visibility(count, edge.shape[3], window or None, q.device)
            edge.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(float32).view(1, -1, 1, 1).expand(batch, heads, count, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1).view(batch * groups, -1, scores.shape[3])
        width = k_block.shape[1]
        to_v[:, seen] += torch.bmm(weights[..., :width].mT, grad_block)  # baddbmm_ would multiply one by one
        to_weights = torch.bmm(grad_block, v_block.mT)
        if to_sinks is not None:
            to_weights = F.pad(to_weights, (0, 1))
        to_scores = torch.ops.aten._softmax_backward_data(to_weights, weights, -1, float32)
        if to_sinks is not None:
            to_sinks += to_scores[..., width].reshape(batch, heads, count).sum((0, 2))
            to_scores = to_scores[..., :width]
        if slope is not None:
            to_scores = to_scores * (1 - slope.square())
        to_scores = to_scores * scale if sinks is not None else to_scores.mul_(scale)
        to_q[:, :, rows] = torch.bmm(to_scores, k_block).view(-1, heads // groups, count, dim)
        to_k[:, seen] += torch.bmm(to_scores.mT, q_block)
    found = (into.view(x.shape).to(x.dtype) for into, x in ((to_q, q), (to_k, k), (to_v, v)))
    return *found, None, None if to_sinks is None else to_sinks.to(sinks.dtype)
