"""Rules for Onward's own operators, each of which has a kernel."""

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


@lowers(ops.rms_norm.default)
def rms_norm(b: Builder, node: Node) -> None:
    x, weight, eps, offset, after_cast = node.args
    emit_rms_norm(b, x, weight, eps, node.outputs[0], offset, after_cast)


def emit_rms_norm(
    b: Builder,
    x: Array,
    weight: Array | None,
    eps: float,
    out: Array,
    offset: float = 0.0,
    after_cast: bool = True,
    residual: Node | None = None,
) -> None:
    """Emit the norm of x. residual: the node that computes x as a sum; then the call computes the sum, too."""
    b.call(
        "onward_rms_norm", *_norm_input(b, x, residual),
        None if weight is None else address(b.contiguous(weight)), offset, after_cast, eps, address(out), out.shape[-1],
    )  # fmt: skip


@lowers(ops.layer_norm.default)
def layer_norm(b: Builder, node: Node) -> None:
    x, weight, bias, eps = node.args
    emit_layer_norm(b, x, weight, bias, eps, node.outputs[0])


def norm_of_sum(b: Builder, norm: Node, residual: Node) -> None:
    """The sum of node `residual` and the norm of it of node `norm`, in one call."""
    if norm.op is ops.rms_norm.default:
        x, weight, eps, offset, after_cast = norm.args
        emit_rms_norm(b, x, weight, eps, norm.outputs[0], offset, after_cast, residual)
    else:
        x, weight, bias, eps = norm.args
        emit_layer_norm(b, x, weight, bias, eps, norm.outputs[0], residual)


def _norm_input(b: Builder, x: Array, residual: Node | None) -> tuple[Any, ...]:
    """The arguments of a norm kernel that say what it normalises.

    Rows, columns and dtype; then an address and a stride for the input, the residual and their sum.
    """
    x_rows, rows, columns, stride = b.rows(x)
    size = rows, columns, float_code(x)
    if residual is None:
        return *size, address(x_rows), stride, None, 0, None, 0
    left, right = residual.args[:2]  # contiguous, as the sum is
    return *size, address(left), columns, address(right), columns, address(x), columns


def emit_layer_norm(
    b: Builder,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    out: Array,
    residual: Node | None = None,
) -> None:
    b.call(
        "onward_layer_norm", *_norm_input(b, x, residual),
        None if weight is None else address(b.contiguous(weight)),
        None if bias is None else address(b.contiguous(bias)), eps, address(out), out.shape[-1],
    )  # fmt: skip


@lowers(ops.rotate.default)
def rotate(b: Builder, node: Node) -> None:
    x, cos, sin, interleaved = node.args
    out = node.outputs[0]
    x, cos, sin = (a if a.strides[-1] == 1 else b.contiguous(a) for a in (x, cos, sin))
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
    """The half of `sin` that is not negated."""
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
    """The format in which the weight of a linear node is packed."""
    if node.op is ops.packed_linear.default:
        data: Array = node.args[1]
        return PACKED_FORMATS[data.dtype]
    return QUANTIZED_FORMATS[node.args[3]]


@lowers(ops.packed_linear.default, ops.quantized_linear.default)
def linear(b: Builder, node: Node) -> None:
    linears(b, [node])


def linears(b: Builder, nodes: list[Node]) -> None:
    """Products of one x with several weights of one format."""
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
        "onward_linear_many",
        parts,
        len(parts),
        linear_format(nodes[0]),
        rows,
        inputs,
        address(x),
        float_code(x),
        stride,
    )


@lowers(ops.packed_linear_by_head.default)
def linear_by_head(b: Builder, node: Node) -> None:
    x, data, rows, inputs = node.args
    out, heads = node.outputs[0], data.shape[0]
    x, vectors, _, step = b.rows(x)
    b.call(
        "onward_linear_by_head", PACKED_FORMATS[data.dtype], vectors // heads, heads, rows, inputs, address(x),
        float_code(x), heads * step, step, address(data), address(out), float_code(out), heads * rows, rows,
    )  # fmt: skip


@lowers(ops.quantized_rows.default)
def quantized_rows(b: Builder, node: Node) -> None:
    data, ids, format, rows, inputs, _ = node.args
    _lookup(b, QUANTIZED_FORMATS[format], rows, inputs, data, ids, node.outputs[0])


def _lookup(b: Builder, format: Format, rows: int, inputs: int, data: Array, ids: Array, out: Array) -> None:
    wide = b.temporary(ids.shape, torch.int64)
    b.copy(ids, wide)
    b.call(
        "onward_linear_rows", format, rows, inputs, address(data), address(wide), wide.numel,
        address(out), float_code(out), inputs,
    )  # fmt: skip


@lowers(ops.packed_rows.default)
def packed_rows(b: Builder, node: Node) -> None:
    data, ids, rows, inputs = node.args
    _lookup(b, PACKED_FORMATS[data.dtype], rows, inputs, data, ids, node.outputs[0])


@lowers(ops.swiglu.default)
def swiglu(b: Builder, node: Node) -> None:
    _elementwise(b, node, "onward_swiglu")


@lowers(ops.sigmoid_gate.default)
def sigmoid_gate(b: Builder, node: Node) -> None:
    _elementwise(b, node, "onward_sigmoid_gate")


@lowers(ops.geglu.default)
def geglu(b: Builder, node: Node) -> None:
    _elementwise(b, node, "onward_geglu", node.args[2])


@lowers(ops.add.default)
def add(b: Builder, node: Node) -> None:
    _elementwise(b, node, "onward_add")


def _elementwise(b: Builder, node: Node, kernel: str, *options: float) -> None:
    """Call a kernel of two operands of one shape. Its options come after the dtype."""
    left, rows, columns, left_stride = b.rows(node.args[0])
    right, _, _, right_stride = b.rows(node.args[1])
    b.call(
        kernel, rows, columns, float_code(left), *options, address(left), left_stride, address(right), right_stride,
        address(node.outputs[0]), columns,
    )  # fmt: skip


@lowers(ops.argmax.default)
def argmax(b: Builder, node: Node) -> None:
    x, rows, columns, stride = b.rows(node.args[0])
    b.call("onward_argmax", rows, columns, address(x), float_code(x), stride, address(node.outputs[0]))


@lowers(ops.cached_attention.default)
def cached_attention(b: Builder, node: Node) -> None:
    q, keys, values, offsets, sinks, scale, window, softcap, table = node.args
    emit_attention(b, q, keys, values, node.outputs[0], offsets, None, sinks, scale, window, softcap, table)


@lowers(ops.attention.default)
def attention(b: Builder, node: Node) -> None:
    q, k, v, mask, sinks, causal, scale, window, softcap = node.args
    offsets = None
    if causal:
        offsets = b.constant(torch.full((q.shape[0],), k.shape[2] - q.shape[2], dtype=torch.int32))
    emit_attention(b, q, k, v, node.outputs[0], offsets, mask, sinks, scale, window, softcap)


def emit_attention(
    b: Builder,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    offsets: Array | None,
    mask: Array | None,
    sinks: Array | None,
    scale: float,
    window: int,
    softcap: float,
    table: Array | None = None,
) -> None:
    q, k, v = (a if a.strides[-1] == 1 else b.contiguous(a) for a in (q, k, v))
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
        table = table if table.strides[-1] == 1 else b.contiguous(table)
        arguments |= {"positions": BLOCK * table.shape[1], "table": address(table), "table_stride": table.strides[0]}
    if mask is not None:
        mask = as_float32(b, mask)
        arguments["mask"] = address(mask)
        arguments["mask_strides"] = broadcast(mask, (batch, heads, queries, k.shape[2]))
    if sinks is not None:
        arguments["sinks"] = address(b.contiguous(as_float32(b, sinks)))
    b.call("onward_attention", [arguments])


def as_float32(b: Builder, array: Array) -> Array:
    if array.dtype == torch.float32:
        return array
    copy = b.temporary(array.shape, torch.float32)
    b.copy(array, copy)
    return copy


@lowers(ops.write_cache.default)
def write_cache(b: Builder, node: Node) -> None:
    heads(b, [cache_part(node)], node.args[2], None)


def cache_part(node: Node) -> dict[str, object]:
    """The part of `onward_heads` that stores new keys or values [B, G, T, D] in a cache, dense or in blocks."""
    cache, new, _, table = node.args
    part = {
        "heads": new.shape[1],
        "x": new,
        "out": address(cache),
        "out_strides": cache.strides[:3],
        "to_cache": 1,
        "positions": cache.shape[2],
    }
    if table is not None:
        if table.strides[-1] != 1:
            raise Unsupported("a table whose rows are not contiguous")
        part |= {"positions": BLOCK * table.shape[1], "table": address(table), "table_stride": table.strides[0]}
    return part


def heads(
    b: Builder, parts: list[dict[str, object]], offsets: Array | None, angles: tuple[Array, Array] | None
) -> None:
    """Call `onward_heads`. In the parts "x" is an array [B, H, T, D]; this puts its address in its place."""
    sample = parts[0]["x"]
    assert isinstance(sample, Array)
    if any(isinstance(x, Array) and x.strides[-1] != 1 for part in parts for x in (part["x"],)):
        for part in parts:
            assert isinstance(part["x"], Array)
            part["x"] = b.contiguous(part["x"])
    batch, _, queries, dim = sample.shape
    for part in parts:
        x = part["x"]
        assert isinstance(x, Array)
        part |= {"x": address(x), "x_strides": x.strides[:3]}
    cos = sin = strides = None
    pairs = 0
    if angles is not None:
        cos, sin, strides = address(angles[0]), positive_half(angles[1]), list(angles[0].strides[:2])
        pairs = angles[0].shape[-1] // 2
    b.call(
        "onward_heads", parts, len(parts), batch, queries, dim, float_code(sample), cos, sin, strides, pairs,
        None if offsets is None else address(b.contiguous(offsets)),
    )  # fmt: skip
