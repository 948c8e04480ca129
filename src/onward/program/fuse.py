"""Fuse nodes into calls of one kernel: the same arithmetic in fewer passes over memory.

Every operator of a trace writes new memory unless it works in place, so an array that no node changes can be treated as
a value.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from onward.native.interface import Format
from onward.ops.heads import HeadsPart, Norm, call_heads
from onward.ops.kv_format import format_of
from onward.ops.lora import LoraPart, call_lora
from onward.ops.norm import call_layer_norm, call_rms_norm
from onward.ops.packed import FORMATS, Product, call_linear
from onward.ops.quantized import FORMATS as QUANTIZED_FORMATS
from onward.program.builder import Builder
from onward.program.graph import Array, Kind, Node, PackedParams, Storage, Trace, Uses
from onward.program.patterns import canonicalise


def share_selections(nodes: list[Node], returned: Iterable[Storage]) -> list[Node]:
    """The nodes without duplicates of equal `index_select`s; nodes that follow read the first one's result.

    returned: storages that are read after the last node. A result in one of them keeps its node, and so does a result
    that some node changes.
    """
    uses, returned = Uses(nodes), set(returned)
    first: dict[tuple[Any, ...], Storage] = {}
    replacements: dict[Storage, Storage] = {}
    shared = []
    for node in nodes:
        if replacements:
            node = _reading(replacements, node)
        if node.op is torch.ops.aten.index_select.default and all(map(uses.constant, (*node.reads, *node.outputs))):
            out = node.outputs[0].storage
            original = first.setdefault(tuple(map(_identity, node.args)), out)
            if original is not out and out.kind is Kind.TEMPORARY and out not in returned:
                replacements[out] = original
                continue
        shared.append(node)
    return shared


def _identity(argument: Any) -> Any:
    """A key for equal arguments: a tensor that occurs several times among params has a storage for each place."""
    if isinstance(argument, Array) and argument.storage.tensor is not None:
        return id(argument.storage.tensor), argument.dtype, argument.shape, argument.strides, argument.offset
    return argument


def _reading(replacements: dict[Storage, Storage], node: Node) -> Node:
    """The node, reading other storages of the same layout."""

    def substitute(value: Any) -> Any:
        if isinstance(value, Array) and value.storage in replacements:
            return replace(value, storage=replacements[value.storage])
        return value

    if not any(array.storage in replacements for array in node.reads):
        return node
    args, kwargs = pytree.tree_map(substitute, (node.args, node.kwargs))
    return replace(node, args=args, kwargs=kwargs)


ops = torch.ops.onward
_LINEARS = (ops.packed_linear.default, ops.quantized_linear.default)
_NORMS: dict[OpOverload, Callable[..., None]] = {
    ops.rms_norm.default: call_rms_norm,
    ops.layer_norm.default: call_layer_norm,
}
_ADDS = (ops.add.default, torch.ops.aten.add.Tensor)


@dataclass(eq=False)
class FusedNode:
    """Nodes that become one call. lower: emits the call."""

    nodes: list[Node]
    lower: Callable[[Builder], None]


FuseItem = Node | FusedNode


def rewrite(trace: Trace, packed: PackedParams | None = None) -> list[FuseItem]:
    """The nodes of a trace as ops, without dead nodes, fused where one kernel computes several."""
    nodes = share_selections(live_nodes(trace, canonicalise(trace, packed)), _returned(trace))
    uses = Uses(nodes)
    return fuse_heads(fuse_residuals(fuse_updates(fuse_linears(nodes, uses)), uses), uses)


def live_nodes(trace: Trace, nodes: list[Node]) -> list[Node]:
    """The nodes whose results are read. Writes to the cache count as read."""
    live_storages = _returned(trace)
    live = []
    for node in reversed(nodes):
        changed = {array.storage for array in node.writes}
        if any(s.kind is not Kind.TEMPORARY or s in live_storages for s in changed) or any(
            array.storage in live_storages and array.numel for array in node.outputs
        ):
            live.append(node)
            live_storages.update(array.storage for array in node.reads)
    return live[::-1]


def _returned(trace: Trace) -> set[Storage]:
    """The storages of the returned logits, taps and cache."""
    assert trace.logits is not None
    return {array.storage for array in (trace.logits, *trace.taps.values(), *trace.returned_cache)}


def fuse_linears(nodes: list[Node], uses: Uses) -> list[FuseItem]:
    """Fuse products of the same x, at the place of the first: x is read once, and the threads start once."""
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        if node.op in _LINEARS:
            x = node.args[0]
            weights = [array for array in node.args[1:3] if array is not None]
            ready = all(array.storage.kind is Kind.PARAM for array in weights) and uses.constant(x)
            key = (x, _format(node)) if ready else (id(node),)
            groups.setdefault(key, []).append(node)
    by_first = {id(group[0]): group for group in groups.values()}
    followers = {id(node) for group in groups.values() for node in group[1:]}
    return [_fused(_call_linear, by_first.get(id(node), [node])) for node in nodes if id(node) not in followers]


def _format(node: Node) -> Format:
    """The format of a product's weight."""
    if node.op is ops.packed_linear.default:
        return FORMATS[node.args[1].dtype]
    return QUANTIZED_FORMATS[node.args[3]]


def _call_linear(nodes: list[Node], b: Builder) -> None:
    products = [Product(node.outputs[0], *node.args[1:3]) for node in nodes]
    call_linear(b, nodes[0].args[0], _format(nodes[0]), products)


def _fused(call: Callable[[list[Node], Builder], None], group: list[Node]) -> FuseItem:
    return group[0] if len(group) == 1 else FusedNode(group, partial(call, group))


def fuse_updates(items: list[FuseItem]) -> list[FuseItem]:
    """Fuse consecutive adapter updates of products of one x: the threads start once."""
    fused: list[FuseItem] = []
    group: list[Node] = []

    def flush() -> None:
        if group:
            fused.append(_fused(_call_lora, group.copy()))
            group.clear()

    for item in items:
        if not isinstance(item, Node) or item.op is not ops.lora.default:
            flush()
            fused.append(item)
            continue
        outputs = {node.outputs[0].storage for node in group}
        if group and (_update_key(group[0]) != _update_key(item) or outputs & {array.storage for array in item.reads}):
            flush()
        group.append(item)
    flush()
    return fused


def _call_lora(nodes: list[Node], b: Builder) -> None:
    x, _, _, _, slots, *_ = nodes[0].args
    call_lora(b, x, slots, [LoraPart(node.outputs[0], *node.args[1:4], *node.args[5:]) for node in nodes])


def _update_key(node: Node) -> tuple[Any, ...]:
    """Equal for updates that can share a call: their x, the slot of each row, and the size and dtype of the stacks."""
    x, _, a, _, slots, *_ = node.args
    return x, slots, a.shape[0], a.dtype


def fuse_residuals(items: list[FuseItem], uses: Uses) -> list[FuseItem]:
    """Fuse a residual sum with its norm, at the place of the sum: one pass over the row."""
    adds = {item.outputs[0]: item for item in items if isinstance(item, Node) and _is_residual(item, uses)}
    norms: dict[int, Node] = {}  # by the node of the sum
    for item in items:
        if isinstance(item, Node) and item.op in _NORMS and item.args[0] in adds:
            weights = [array for array in item.args[1:] if isinstance(array, Array)]
            if all(array.storage.kind is Kind.PARAM and uses.constant(array) for array in weights):
                norms.setdefault(id(adds[item.args[0]]), item)
    fused_norms = {id(norm) for norm in norms.values()}
    fused: list[FuseItem] = []
    for item in items:
        norm = norms.get(id(item))
        if norm is not None:
            assert isinstance(item, Node)
            fused.append(FusedNode([norm, item], partial(_call_norm, norm, item)))
        elif id(item) not in fused_norms:
            fused.append(item)
    return fused


def _call_norm(norm: Node, add: Node, b: Builder) -> None:
    _NORMS[norm.op](b, *norm.outputs, *norm.args, terms=add.args[:2])


def _is_residual(node: Node, uses: Uses) -> bool:
    """Whether the node adds two arrays of one layout, and no node changes the sum."""
    if node.op not in _ADDS or node.kwargs:
        return False
    left, right = node.args[:2]
    out = node.outputs[0]
    return uses.constant(out) and all(
        isinstance(array, Array) and array.shape == out.shape and array.dtype == out.dtype and array.is_contiguous()
        for array in (left, right, out)
    )


# ── heads: norm, rotation and cache write ─────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _Part:
    """The nodes, in order, that process the heads of one projection, and their part of a call of `onward_heads`."""

    nodes: list[Node]
    heads: HeadsPart
    angles: tuple[Array, Array] | None
    offsets: Array | None

    @property
    def shape(self) -> tuple[Any, ...]:
        batch, _, queries, dim = self.heads.x.shape
        return batch, queries, dim, self.heads.x.dtype


def fuse_heads(items: list[FuseItem], uses: Uses) -> list[FuseItem]:
    """Fuse norm, rotation and cache write of queries, keys and values: one pass over the heads."""
    parts = {id(part.nodes[-1]): part for item in items if isinstance(item, Node) for part in _part(item, uses)}
    # A rotation before a cache write, or a norm before a rotation, belongs to the part of its reader.
    inner_nodes = {id(node) for part in parts.values() for node in part.nodes[:-1]}
    fused: list[FuseItem] = []
    pending: list[_Part] = []

    def flush() -> None:
        if pending:
            fused.append(_fused_heads(pending))
            pending.clear()

    for item in items:
        if id(item) in inner_nodes:
            continue
        part = parts.get(id(item))
        if part is not None:
            if pending and not _fits_pending(part, pending):
                flush()
            pending.append(part)
            continue
        nodes = item.nodes if isinstance(item, FusedNode) else [item]
        if any(_depends_on(nodes, pending_part) for pending_part in pending):
            flush()
        fused.append(item)
    flush()
    return fused


def _part(node: Node, uses: Uses) -> Iterator[_Part]:
    if node.op is ops.write_cache.default:
        cache, new, offsets, table = node.args
        rotate = uses.only_for(new, node)
        format = format_of(cache.dtype)
        if format.code is None or not format.takes(new.dtype) or cache.strides[-1] != 1:
            return
        if table is not None and table.strides[-1] != 1:
            return
        heads = HeadsPart(new, cache, to_cache=True, table=table)
        if rotate is not None and rotate.op is ops.rotate.default and rotate.outputs[0] == new:
            yield _rotated([rotate, node], heads, rotate, offsets, uses)
        else:
            yield _Part([node], heads, None, offsets)
    elif node.op is ops.rotate.default:
        yield _rotated([node], HeadsPart(node.args[0], node.outputs[0]), node, None, uses)


def _rotated(nodes: list[Node], heads: HeadsPart, rotate: Node, offsets: Array | None, uses: Uses) -> _Part:
    x, cos, sin, interleaved = rotate.args
    heads = heads._replace(x=x, rotate=2 if interleaved else 1)
    norm = uses.only_for(x, rotate)
    # The norm's output is [B, T, H, D], and x its transpose [B, H, T, D].
    if norm is not None and norm.op is ops.rms_norm.default and _transposed(norm.outputs[0]) == x:
        norm_input, weight, *options = norm.args
        if weight.is_contiguous() and uses.constant(norm_input):
            normed = _transposed(norm_input)
            assert normed is not None, "as its output"
            heads = heads._replace(x=normed, norm=Norm(weight, *options))
            nodes = [norm, *nodes]
    return _Part(nodes, heads, (cos, sin), offsets)


def _transposed(array: Array) -> Array | None:
    """array.transpose(1, 2) of an array with four dimensions."""
    return array.permuted((0, 2, 1, 3)) if len(array.shape) == 4 else None


def _angles_and_offsets(parts: list[_Part]) -> tuple[tuple[Array, Array] | None, Array | None]:
    """The angles and the offsets that the parts share."""
    angles = next((part.angles for part in parts if part.angles is not None), None)
    return angles, next((part.offsets for part in parts if part.offsets is not None), None)


def _fits_pending(part: _Part, pending: list[_Part]) -> bool:
    """Whether the part can share a call with the pending ones: it has the same rows, angles and offsets."""
    return pending[0].shape == part.shape and all(
        shared is None or own is None or shared == own
        for shared, own in zip(_angles_and_offsets(pending), (part.angles, part.offsets), strict=True)
    )


def _depends_on(nodes: list[Node], part: _Part) -> bool:
    """Whether the nodes must follow a pending part: they access its results, or change its inputs."""
    last = part.nodes[-1]
    results = {array.storage for array in (*last.outputs, *last.writes)}
    if any(array.storage in results for node in nodes for array in (*node.reads, *node.outputs)):
        return True
    changed = {array.storage for node in nodes for array in node.writes}
    return bool(changed & {array.storage for node in part.nodes for array in node.reads})


def _fused_heads(parts: list[_Part]) -> FusedNode:
    nodes = [node for part in parts for node in part.nodes]
    angles, offsets = _angles_and_offsets(parts)
    heads = [part.heads for part in parts]
    return FusedNode(nodes, lambda b: call_heads(b, heads, offsets, angles))
