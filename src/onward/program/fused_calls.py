"""Rules for Onward's own operators, and calls of the kernels that fuse several of them."""

from typing import Any

import torch

from onward import ops as _registered  # noqa: F401 - for the names under torch.ops.onward
from onward.native.structs import Format
from onward.ops.kv_write import BLOCK
from onward.ops.packed import FORMATS as PACKED_FORMATS
from onward.ops.quantized import FORMATS as QUANTIZED_FORMATS
from onward.program.builder import Builder, Unsupported, broadcast, float_code, lowers
from onward.program.graph import Address, Array, Node, address

ops = torch.ops.onward


@lowers(ops.rms_norm.default, ops.layer_norm.default)
def norm(b: Builder, node: Node, add: Node | None = None) -> None:
    """add: the node that computes the input as a sum; the call then also computes the sum."""
    emit = emit_rms_norm if node.op is ops.rms_norm.default else emit_layer_norm
    emit(b, node.outputs[0], add, *node.args)


def emit_rms_norm(
    b: Builder, out: Array, add: Node | None, x: Array, weight: Array | None, eps: float, *options: Any
) -> None:
    """options: the offset of the weight, and whether the product with it follows the cast."""
    offset, after_cast = options or (0.0, True)
    b.call(
        "onward_rms_norm", *_norm_input(b, x, add), b.optional(weight), offset, after_cast, eps, address(out),
        out.shape[-1],
    )  # fmt: skip


def emit_layer_norm(
    b: Builder, out: Array, add: Node | None, x: Array, weight: Array | None, bias: Array | None, eps: float
) -> None:
    b.call(
        "onward_layer_norm", *_norm_input(b, x, add), b.optional(weight), b.optional(bias), eps, address(out),
        out.shape[-1],
    )  # fmt: skip


def _norm_input(b: Builder, x: Array, add: Node | None) -> tuple[Any, ...]:
    """Rows, columns and dtype of a norm's input; then address and stride of the input, the residual and their sum."""
    x_rows, rows, columns, stride = b.rows(x)
    size = rows, columns, float_code(x)
    if add is None:
        return *size, address(x_rows), stride, None, 0, None, 0
    left, right = add.args[:2]  # contiguous, like the sum
    return *size, address(left), columns, address(right), columns, address(x), columns


@lowers(ops.rotate.default)
def rotate(b: Builder, node: Node) -> None:
    x, cos, sin, interleaved = node.args
    out = node.outputs[0]
    x, cos, sin = map(b.with_contiguous_rows, (x, cos, sin))
    if cos.strides != sin.strides:
        cos, sin = b.contiguous(cos), b.contiguous(sin)
    pairs = cos.shape[-1] // 2
    batch, heads, queries, dim = x.shape
    b.call(
        "onward_rotate", batch, heads, queries, dim, float_code(x), address(x), list(x.strides[:3]),
        address(cos), positive_half(sin), pairs, list(cos.strides[:2]), interleaved, address(out),
        list(out.strides[:3]),
    )  # fmt: skip


def positive_half(sin: Array) -> Address:
    """The address of the half of `sin` that is not negated."""
    start = address(sin)
    return start._replace(offset=start.offset + sin.shape[-1] // 2 * sin.dtype.itemsize)


@lowers(ops.rotary_angles.default)
def rotary_angles(b: Builder, node: Node) -> None:
    radians, out = b.contiguous(node.args[0]), node.outputs[0]
    pairs = radians.shape[-1]
    cos = address(out)
    sin = cos._replace(offset=cos.offset + out.strides[0] * out.dtype.itemsize)
    b.call("onward_rotary_angles", radians.numel // max(pairs, 1), pairs, address(radians), cos, sin)


def linear_format(node: Node) -> Format:
    """The packed weight format of a linear node."""
    if node.op is ops.packed_linear.default:
        data: Array = node.args[1]
        return PACKED_FORMATS[data.dtype]
    return QUANTIZED_FORMATS[node.args[3]]


@lowers(ops.packed_linear.default, ops.quantized_linear.default)
def linear(b: Builder, node: Node) -> None:
    linears(b, [node])


def linears(b: Builder, nodes: list[Node]) -> None:
    """Emit the products of one x with several weights of one format, as one call."""
    x, rows, inputs, stride = b.rows(nodes[0].args[0])
    parts = []
    for node in nodes:
        _, data, bias, *_ = node.args
        out = node.outputs[0]
        part = {"n": out.shape[-1], "packed": address(data), "out": address(out), "out_stride": out.shape[-1],
                "out_dtype": float_code(out)}  # fmt: skip
        if bias is not None:
            part |= {"bias": address(b.contiguous(bias)), "bias_dtype": float_code(bias)}
        parts.append(part)
    b.call(
        "onward_linear_many", parts, len(parts), linear_format(nodes[0]), rows, inputs, address(x), float_code(x),
        stride,
    )  # fmt: skip


@lowers(ops.packed_linear_by_head.default)
def linear_by_head(b: Builder, node: Node) -> None:
    x, data, rows, inputs = node.args
    out, heads = node.outputs[0], data.shape[0]
    x, vectors, _, step = b.rows(x)
    b.call(
        "onward_linear_by_head", PACKED_FORMATS[data.dtype], vectors // heads, heads, rows, inputs, address(x),
        float_code(x), heads * step, step, address(data), address(out), float_code(out), heads * rows, rows,
    )  # fmt: skip


@lowers(ops.quantized_rows.default, ops.packed_rows.default)
def weight_rows(b: Builder, node: Node) -> None:
    data, ids, *format_name, rows, inputs = node.args[: -1 if node.op is ops.quantized_rows.default else None]
    format = QUANTIZED_FORMATS[format_name[0]] if format_name else PACKED_FORMATS[data.dtype]
    ids, out = b.cast(ids, torch.int64), node.outputs[0]
    b.call(
        "onward_linear_rows", format, rows, inputs, address(data), address(ids), ids.numel,
        address(out), float_code(out), inputs,
    )  # fmt: skip


@lowers(ops.swiglu.default, ops.sigmoid_gate.default, ops.geglu.default, ops.add.default)
def elementwise(b: Builder, node: Node) -> None:
    """Call the kernel of the operator's name, for two operands of one shape. Its options follow the dtype."""
    left, rows, columns, left_stride = b.rows(node.args[0])
    right, _, _, right_stride = b.rows(node.args[1])
    b.call(
        node.name.replace("onward.", "onward_"), rows, columns, float_code(left), *node.args[2:], address(left),
        left_stride, address(right), right_stride, address(node.outputs[0]), columns,
    )  # fmt: skip


@lowers(ops.argmax.default)
def argmax(b: Builder, node: Node) -> None:
    x, rows, columns, stride = b.rows(node.args[0])
    b.call("onward_argmax", rows, columns, address(x), float_code(x), stride, address(node.outputs[0]))


@lowers(ops.cached_attention.default)
def cached_attention(b: Builder, node: Node) -> None:
    q, keys, values, offsets, *options, table = node.args
    emit_attention(b, q, keys, values, node.outputs[0], *options, offsets=offsets, table=table)


@lowers(ops.attention.default)
def attention(b: Builder, node: Node) -> None:
    q, k, v, mask, sinks, causal, scale, window, softcap = node.args
    offsets = None
    if causal:
        offsets = b.constant(torch.full((q.shape[0],), k.shape[2] - q.shape[2], dtype=torch.int32))
    emit_attention(b, q, k, v, node.outputs[0], sinks, scale, window, softcap, offsets=offsets, mask=mask)


def emit_attention(
    b: Builder,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    sinks: Array | None,
    scale: float,
    window: int,
    softcap: float,
    *,
    offsets: Array | None = None,
    mask: Array | None = None,
    table: Array | None = None,
) -> None:
    q, k, v = map(b.with_contiguous_rows, (q, k, v))
    if out.strides[-1] != 1:
        raise Unsupported("an output whose features are not contiguous")
    batch, heads, queries, dim = q.shape
    arguments = {
        "batch": batch, "heads": heads, "kv_heads": k.shape[1], "queries": queries, "positions": k.shape[2], "dim": dim,
        "value_dim": v.shape[3],
        "q": address(q), "keys": address(k), "values": address(v), "out": address(out),
        "q_strides": q.strides[:3], "keys_strides": k.strides[:3], "values_strides": v.strides[:3],
        "out_strides": out.strides[:3], "window": window, "scale": scale, "softcap": softcap, "dtype": float_code(q),
    }  # fmt: skip
    if offsets is not None:
        arguments["offsets"] = address(b.contiguous(offsets))
    if table is not None:
        table = b.with_contiguous_rows(table)
        arguments |= {"positions": BLOCK * table.shape[1], "table": address(table), "table_stride": table.strides[0]}
    if mask is not None:
        mask = as_float32(b, mask)
        arguments["mask"] = address(mask)
        arguments["mask_strides"] = broadcast(mask, (batch, heads, queries, k.shape[2]))
    if sinks is not None:
        arguments["sinks"] = address(b.contiguous(as_float32(b, sinks)))
    b.call("onward_attention", [arguments])


def as_float32(b: Builder, array: Array) -> Array:
    return array if array.dtype == torch.float32 else b.cast(array, torch.float32)


@lowers(ops.write_cache.default)
def write_cache(b: Builder, node: Node) -> None:
    heads(b, [cache_part(node)], node.args[2], None)


def cache_part(node: Node) -> dict[str, Any]:
    """The part of `onward_heads` that stores new keys or values [B, G, T, D] in a dense or paged cache."""
    cache, new, _, table = node.args
    part = {
        "heads": new.shape[1], "x": new, "out": address(cache), "out_strides": cache.strides[:3], "to_cache": 1,
        "positions": cache.shape[2],
    }  # fmt: skip
    if table is not None:
        if table.strides[-1] != 1:
            raise Unsupported("a table whose rows are not contiguous")
        part |= {"positions": BLOCK * table.shape[1], "table": address(table), "table_stride": table.strides[0]}
    return part


def heads(b: Builder, parts: list[dict[str, Any]], offsets: Array | None, angles: tuple[Array, Array] | None) -> None:
    """Call `onward_heads`. "x" of each part is an array [B, H, T, D]."""
    arrays: list[Array] = [part["x"] for part in parts]
    if any(x.strides[-1] != 1 for x in arrays):
        arrays = [b.contiguous(x) for x in arrays]
    calls = [part | {"x": address(x), "x_strides": x.strides[:3]} for part, x in zip(parts, arrays, strict=True)]
    batch, _, queries, dim = arrays[0].shape
    rotation: tuple[Any, ...] = (None, None, None, 0)
    if angles is not None:
        cos, sin = angles
        rotation = (address(cos), positive_half(sin), list(cos.strides[:2]), cos.shape[-1] // 2)
    b.call(
        "onward_heads", calls, len(calls), batch, queries, dim, float_code(arrays[0]), *rotation, b.optional(offsets)
    )  # fmt: skip
