"""Scaled dot-product attention (Vaswani et al., arXiv 1706.03762) with grouped heads, and its cached form.

Shapes: B rows, H query heads, G key/value heads (H a multiple of G), T queries, S keys, D features per head of queries
and keys, E of values and outputs (often the same).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native.interface import Code, Float, Int, Pointer, Structure, kernel
from onward.ops.attention_gradient import QUERY_BLOCK, attention_gradient, causal_visibility, grouped
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand, Unsupported, broadcast_strides
from onward.ops.kv_format import KVFormat, format_of, kernel_code
from onward.ops.kv_write import capacity, check_table, checked_ranges, dense_rows, loaded, one_row
from onward.ops.operator import Backward, Gradients, Operator, autocast_dtype, autocast_to, no_autocast, shapes


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale + mask) v, each query head with the key/value head of its group.

    Causal is aligned to the BOTTOM RIGHT: query i of T sees keys up to S - T + i, as it must when the first
    S - T keys come from a cache. A window of W lets that query see only the last W of them, itself included.

    Args:
        q: float [B, H, T, D].
        k: float [B, G, S, D], of q's dtype.
        v: float [B, G, S, E], of q's dtype.
        mask: float, broadcast to [B, H, T, S] and added to the scaled products; -inf hides a key.
        causal: hide the keys after each query.
        scale: the factor of the products q k^T; 1/sqrt(D) by default.
        sinks: float [H]: logits that take part in each head's softmax without a value (arXiv 2309.17453).
        window: how many keys a query sees, itself included; it makes the attention causal.
        softcap: c > 0: a score s, scaled and not yet masked, becomes c tanh(s / c) (Gemma 2, arXiv 2408.00118).

    Returns:
        [B, H, T, E] in q's dtype.

    Raises:
        RequestError: shapes or dtypes that don't match.
    """
    dtype = autocast_dtype(q)
    if dtype is not None:
        with no_autocast(q):
            q, k, v = autocast_to(dtype, q, k, v)
            return scaled_dot_product_attention(
                q, k, v, mask=mask, causal=causal, scale=scale, sinks=sinks, window=window, softcap=softcap
            )
    check_shapes(q, k, v)
    window, causal = _checked_window(window), causal or window is not None
    if causal and k.shape[2] < q.shape[2]:
        got = f"{k.shape[2]} keys, {q.shape[2]} queries"
        raise RequestError(f"attention: causal needs at least as many keys as queries; got {got}")
    _check_extras(q, k, mask, sinks)
    return _attention(q, k, v, mask, sinks, causal, _scale(q, scale), window, _checked_softcap(softcap))


def cached_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    offsets: Tensor,
    *,
    table: Tensor | None = None,
    value_dim: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of new queries over a KV cache, each row over its own length and no further.

    Query i of row b is at position offsets[b] + i and sees the cached positions up to itself (the keys and values of
    the new positions are in the cache already). Nothing past them is read.

    Args:
        q: float [B, H, T, D].
        keys: [B, G, S, D], of q's dtype or a format that takes it (`onward.ops.kv_format`); T + offsets[b] <= S for
            every row. With a table [N, G, 64, D], N blocks of 64 positions.
        values: the same with E features; None if they are the first features of the keys.
        offsets: int32 [B].
        table: int32 [B, M]: the block of each row's positions 64 m … 64 m + 63 (PagedAttention, arXiv 2309.06180).
            Then S is 64 M. Entries past the block of a row's last position are not read.
        value_dim: E, if values is None (multi-head latent attention).
        scale, sinks, softcap: as in `scaled_dot_product_attention`.
        window: how many positions a query sees, itself included; all of them by default.

    Returns:
        [B, H, T, E] in q's dtype.

    Raises:
        RequestError: shapes or dtypes that don't match; when the op runs, a row that reaches past the cache.
    """
    format, dtype = format_of(keys.dtype), autocast_dtype(q)
    if dtype is not None:
        if not format.takes(dtype):
            # Convert only the rows' own blocks.
            rows = (x if x is None else dense_rows(x, table, offsets + (q.shape[2] - 1)) for x in (keys, values))
            (keys, values), table = autocast_to(dtype, *rows), None
        with no_autocast(q):
            (q,) = autocast_to(dtype, q)
            return cached_attention(
                q, keys, values, offsets, table=table, value_dim=value_dim, scale=scale, sinks=sinks, window=window,
                softcap=softcap,
            )  # fmt: skip
    check_shapes(q, keys, keys if values is None else values, table, format)
    if values is not None and value_dim is None:
        value_dim = format.dim(values.shape[3])
    elif values is not None or value_dim is None or not 0 < value_dim <= q.shape[3]:
        got = "both" if values is not None else f"{value_dim} of {q.shape[3]} features"
        raise RequestError(f"attention: give values, or None and as value_dim some of the keys' features; got {got}")
    if offsets.shape != q.shape[:1] or offsets.dtype != torch.int32:
        raise RequestError(f"attention: offsets must be int32 [B]; got {shapes(offsets=offsets, q=q)}")
    _check_extras(q, keys, None, sinks)
    window, cap = _checked_window(window), _checked_softcap(softcap)
    return _cached_attention(q, keys, values, offsets, sinks, _scale(q, scale), window, cap, table, value_dim)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition, written out in float32, with keys and values repeated for each head of their group."""
    check_shapes(q, k, v)
    group = q.shape[1] // k.shape[1]
    q32, k32, v32 = (t.to(torch.float32) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q32 @ k32.transpose(-1, -2) * _scale(q, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal or window is not None:
        hidden = ~causal_visibility(q.shape[2], k.shape[2], window, q.device)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(torch.float32).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v32).to(q.dtype)


# ── in torch's operators ──────────────────────────────────────────────────────────────────────────────────


def _definition(*arguments: Any) -> Tensor:
    """The definition in the torch operators that are fastest for each case. 0: no window, no softcap."""
    # [B, T, H, D] in memory, as the kernel writes it: the order in which the output projection reads it.
    return _torch_attention(*arguments).transpose(1, 2).contiguous().transpose(1, 2)


def _torch_attention(*arguments: Any) -> Tensor:
    q, k, v, mask, sinks, causal, scale, window, softcap = arguments
    window = window or None
    if mask is not None or sinks is not None or softcap:
        cap = softcap or None
        return reference(q, k, v, mask=mask, causal=causal, scale=scale, sinks=sinks, window=window, softcap=cap)
    if q.shape[2] == 1:
        # One query per row sees every key. The heads of a group go in as queries, so each key is read once.
        k, v = (k, v) if window is None else (k[:, :, -window:], v[:, :, -window:])
        out = F.scaled_dot_product_attention(grouped(q, k.shape[1]), k, v, scale=scale)
        return out.reshape(*q.shape[:3], v.shape[3])
    if not causal:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return _causal_blocks(q, k, v, scale, window)


def _causal_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention a block of queries at a time, each against the keys that its last query sees."""
    before = k.shape[2] - q.shape[2]
    blocks = []
    # bfloat16 products would round the scores before the softmax.
    k_float = k.to(torch.float32)
    for start in range(0, q.shape[2], QUERY_BLOCK):
        block = q[:, :, start : start + QUERY_BLOCK]
        end = before + start + block.shape[2]
        begin = 0 if window is None else max(0, before + start + 1 - window)
        scores = grouped(block.to(torch.float32) * scale, k.shape[1]) @ k_float[:, :, begin:end].transpose(-1, -2)
        scores = scores.view(*block.shape[:3], end - begin)
        hidden = ~causal_visibility(block.shape[2], end - begin, window, q.device)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out = grouped(weights, k.shape[1]) @ v[:, :, begin:end]
        blocks.append(out.view(*block.shape[:3], v.shape[3]))
    return torch.cat(blocks, dim=2)


def _cached_definition(*arguments: Any) -> Tensor:
    """All rows at once over the whole cache, with a mask for positions that a row doesn't see."""
    q, keys, values, offsets, sinks, scale, window, softcap, table, value_dim = arguments
    k, v = loaded(dense_rows, keys, values, value_dim, q.dtype, table, offsets + (q.shape[2] - 1))
    queries, length = q.shape[2], k.shape[2]
    query_at = offsets.unsqueeze(1) + torch.arange(queries, device=q.device)  # [B, T]
    key_at = torch.arange(length, device=q.device)
    visible = key_at <= query_at.unsqueeze(2)  # [B, T, S]
    # Past a row's end, or before its window, there may be anything, also NaN, which a weight of 0 does not remove.
    empty = key_at > query_at[:, -1:]
    if window:
        visible &= key_at > query_at.unsqueeze(2) - window
        empty |= key_at <= query_at[:, :1] - window
    empty = empty.view(-1, 1, length, 1)
    k, v = k.masked_fill(empty, 0.0), v.masked_fill(empty, 0.0)
    mask = torch.zeros(visible.shape, device=q.device).masked_fill(~visible, float("-inf")).unsqueeze(1)
    out = reference(q, k, v, mask=mask, scale=scale, sinks=sinks, softcap=softcap or None)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _cached_by_row(*arguments: Any) -> Tensor:
    """Row by row over its own positions, so that no row's arithmetic depends on another's length."""
    q, keys, values, offsets, sinks, scale, window, softcap, table, value_dim = arguments
    rows = []
    for b, (start, end) in enumerate(checked_ranges(keys, offsets, q.shape[2], table, window)):
        k, v = loaded(one_row, keys, values, value_dim, q.dtype, table, b, start, end)
        rows.append(_definition(q[b : b + 1], k, v, None, sinks, True, scale, window, softcap))
    return rows[0] if len(rows) == 1 else torch.cat([row.transpose(1, 2) for row in rows]).transpose(1, 2)


def _gradient(backward: Backward, *arguments: Any) -> Gradients:
    if arguments[3] is not None and backward.needs[3]:  # the mask's
        return backward.of(_definition, *arguments)
    return attention_gradient(backward.grad, *arguments)


# ── the kernel ────────────────────────────────────────────────────────────────────────────────────────────


class AttentionArguments(Structure):
    """OnwardAttention of native/src/attention/attention.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "heads", "kv_heads", "queries", "positions", "dim", "value_dim")),
        *((name, Pointer) for name in ("q", "keys", "values", "out")),
        *((f"{name}_strides", Int * 3) for name in ("q", "keys", "values", "out")),
        ("offsets", Pointer), ("window", Int), ("mask", Pointer), ("mask_strides", Int * 4), ("sinks", Pointer),
        ("scale", Float), ("softcap", Float), ("dtype", Code), ("cache_format", Code), ("table", Pointer),
        ("table_stride", Int),
    )  # fmt: skip


@kernel
def onward_attention(arguments: AttentionArguments) -> Code: ...


def call_attention(
    k: KernelCalls, out: Operand, q: Operand, keys: Operand, values: Operand | None, sinks: Operand | None,
    scale: float, window: int, softcap: float, *, offsets: Operand | None = None, mask: Operand | None = None,
    table: Operand | None = None,
) -> None:  # fmt: skip
    """Attention of queries at offsets int32 [B]; None: every query sees every key. 0: no window, no softcap. values:
    None if they are the first features of the keys."""
    q, keys = k.contiguous_rows(q), k.contiguous_rows(keys)
    values = keys if values is None else k.contiguous_rows(values)
    if out.stride()[-1] != 1:
        raise Unsupported("an output whose features are not contiguous")
    batch, heads, queries, dim = q.shape
    positions, mask_strides, table_stride = capacity(keys, table), [0, 0, 0, 0], 0
    if table is not None:
        table = k.contiguous_rows(table)
        table_stride = table.stride()[0]
    if mask is not None:
        mask = _as_float32(k, mask)
        mask_strides = broadcast_strides(mask, (batch, heads, queries, keys.shape[2]))
    call = k.struct(
        AttentionArguments, batch=batch, heads=heads, kv_heads=keys.shape[1], queries=queries, positions=positions,
        dim=dim, value_dim=out.shape[3], q=k.address(q), keys=k.address(keys), values=k.address(values),
        out=k.address(out), q_strides=q.stride()[:3], keys_strides=keys.stride()[:3],
        values_strides=values.stride()[:3], out_strides=out.stride()[:3],
        offsets=k.optional(offsets), window=window, mask=None if mask is None else k.address(mask),
        mask_strides=tuple(mask_strides), sinks=None if sinks is None else k.optional(_as_float32(k, sinks)),
        scale=scale, softcap=softcap,
        dtype=k.code(q), cache_format=kernel_code(keys.dtype),
        table=None if table is None else k.address(table), table_stride=table_stride,
    )  # fmt: skip
    k.call(onward_attention, k.array([call]))


def _as_float32(k: KernelCalls, x: Operand) -> Operand:
    return x if x.dtype == torch.float32 else k.cast(x, torch.float32)


def _call(k: KernelCalls, out: Operand, *arguments: Any) -> None:
    q, keys, values, mask, sinks, causal, *options = arguments
    before = torch.full((q.shape[0],), keys.shape[2] - q.shape[2], dtype=torch.int32)
    offsets = k.constant(before) if causal else None
    call_attention(k, out, q, keys, values, sinks, *options, offsets=offsets, mask=mask)


def _call_cached(k: KernelCalls, out: Operand, *arguments: Any) -> None:
    q, keys, values, offsets, *options, table, _ = arguments
    call_attention(k, out, q, keys, values, *options, offsets=offsets, table=table)


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────────


def check_shapes(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None, format: KVFormat | None = None) -> None:
    """Raise unless q [B, H, T, D] fits k [B, G, S, D] and v [B, G, S, E], H a multiple of G, all of one float dtype.

    With a table they must be blocks [N, G, 64, D] and [N, G, 64, E]. format: of k and v if it isn't q's dtype.
    """
    format = format or format_of(q.dtype)
    if table is not None:
        check_table(table, q.shape[0], k)
    (of_q, of_k, of_v), dtype = (q.shape, k.shape, v.shape), k.dtype
    fits = len(of_q) == len(of_k) == len(of_v) == 4 and of_k[:3] == of_v[:3] and of_k[3] == format.width(of_q[3])
    fits = fits and (of_q[0] == of_k[0] or table is not None) and of_k[1] > 0 and of_q[1] % of_k[1] == 0
    if not fits:
        got = ", ".join(f"{name} {list(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise RequestError(
            f"attention: q [B, H, T, D] expects k [B, G, S, D] and v [B, G, S, E] with H a multiple of G; got {got}"
        )
    if not dtype == v.dtype == format.dtype or not format.takes(q.dtype) or q.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise RequestError(f"attention: q, k and v must be of one dtype of {names}; got {shapes(q=q, k=k, v=v)}")


def _check_extras(q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor | None) -> None:
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_floating_point()):
        raise RequestError(f"attention: sinks must be float [H]; got {shapes(sinks=sinks, q=q)}")
    if mask is None:
        return
    full_shape = (*q.shape[:3], k.shape[2])
    fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], full_shape[::-1], strict=False))
    if not fits or not mask.is_floating_point():
        raise RequestError(
            f"attention: mask must be float and broadcast to [B, H, T, S] = {list(full_shape)} (it is added: -inf "
            f"hides a key); got {shapes(mask=mask)}"
        )


def _checked_window(window: int | None) -> int:
    """The window, or 0 for no window."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise RequestError(f"attention: window must be a whole number of 1 or more; got {window!r}")
    return window or 0


def _checked_softcap(softcap: float | None) -> float:
    """The softcap, or 0 for none."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0 < softcap < math.inf:
        raise RequestError(f"attention: softcap must be a finite number above 0, or None for none; got {softcap!r}")
    return float(softcap)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else float(scale)


def _fake(q: Tensor, *rest: Any) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, rest[-1])).transpose(1, 2)


_attention = Operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, bool causal, float scale, int window,"
    " float softcap) -> Tensor",
    _definition, _call, lambda q, k, v, *_: _fake(q, v.shape[3]), gradient=_gradient,
)  # fmt: skip
_cached_attention = Operator(
    "cached_attention(Tensor q, Tensor keys, Tensor? values, Tensor offsets, Tensor? sinks, float scale, int window,"
    " float softcap, Tensor? table, int value_dim) -> Tensor",
    _cached_definition, _call_cached, _fake, _cached_by_row,
    check=lambda q, k, v, offsets, s, f, window, c, table, e: checked_ranges(k, offsets, q.shape[2], table, window),
)  # fmt: skip
