"""Fuse nodes where one kernel does the work of several: the same arithmetic in fewer passes.

Every operator of a trace writes new memory unless it works in place. So an array that one node writes and no node
changes can be treated as a value. Equal gathers of inputs become one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.program import fused_calls, op_calls
from onward.program.builder import Builder
from onward.program.graph import Array, Kind, Node, PackedParams, Storage, Trace, Uses, address
from onward.program.patterns import canonicalise


def share_selections(nodes: list[Node], kept: Iterable[Storage]) -> list[Node]:
    """The nodes, with one `index_select` for all that select the same of one array; those that follow read its result.

    kept: storages that are read after the last node. A result in one of them keeps its node, and so does one that
    some node changes.
    """
    uses, kept = Uses(nodes), set(kept)
    first: dict[tuple[Any, ...], Storage] = {}
    instead: dict[Storage, Storage] = {}
    shared = []
    for node in nodes:
        if instead:
            node = _reading(instead, node)
        if node.op is torch.ops.aten.index_select.default and all(map(uses.constant, (*node.reads, *node.outputs))):
            out = node.outputs[0].storage
            made = first.setdefault(tuple(map(_identity, node.args)), out)
            if made is not out and out.kind is Kind.TEMPORARY and out not in kept:
                instead[out] = made
                continue
        shared.append(node)
    return shared


def _identity(argument: Any) -> Any:
    """What equal arguments share: a tensor that stands at several places of the params has a storage for each."""
    if isinstance(argument, Array) and argument.storage.tensor is not None:
        return id(argument.storage.tensor), argument.dtype, argument.shape, argument.strides, argument.offset
    return argument


def _reading(instead: dict[Storage, Storage], node: Node) -> Node:
    """The node, reading other storages of the same layout."""

    def reading(value: Any) -> Any:
        if isinstance(value, Array) and value.storage in instead:
            return replace(value, storage=instead[value.storage])
        return value

    if not any(array.storage in instead for array in node.reads):
        return node
    args, kwargs = pytree.tree_map(reading, (node.args, node.kwargs))
    return replace(node, args=args, kwargs=kwargs)


ops = torch.ops.onward
_LINEARS = (ops.packed_linear.default, ops.quantized_linear.default)
_NORMS = (ops.rms_norm.default, ops.layer_norm.default)
_ADDS = (ops.add.default, torch.ops.aten.add.Tensor)


@dataclass(eq=False)
class FusedNode:
    """Nodes that become one call. lower: emits it."""

    nodes: list[Node]
    lower: Callable[[Builder], None]

    def storages(self) -> set[Storage]:
        return {storage for node in self.nodes for storage in touched(node)}


FuseItem = Node | FusedNode


def rewrite(trace: Trace, packed: PackedParams | None = None) -> list[FuseItem]:
    """The nodes of a trace as ops, without those that nobody needs, joined where one kernel serves several."""
    nodes = share_selections(needed(trace, canonicalise(trace, packed)), _returned(trace))
    uses = Uses(nodes)
    return join_heads(join_residuals(join_updates(join_linears(nodes, uses)), uses), uses)


def touched(node: Node) -> Iterator[Storage]:
    for array in (*node.reads, *node.outputs):
        yield array.storage


def needed(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those of the nodes whose results are read. What a node writes into the cache counts as read."""
    needed_storages = _returned(trace)
    needed_nodes = []
    for node in reversed(nodes):
        changed = {array.storage for array in node.writes}
        lasting = any(s.kind is not Kind.TEMPORARY or s in needed_storages for s in changed)
        if lasting or any(array.storage in needed_storages and array.numel for array in node.outputs):
            needed_nodes.append(node)
            needed_storages.update(array.storage for array in node.reads)
    return needed_nodes[::-1]


def _returned(trace: Trace) -> set[Storage]:
    """The storages of the logits and of the cache that a forward returns."""
    assert trace.logits is not None
    return {array.storage for array in (trace.logits, *trace.returned_cache)}


def join_linears(nodes: list[Node], uses: Uses) -> list[FuseItem]:
    """Join products of the same x, at the place of the first: x is read once, and the threads start once."""
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        if node.op in _LINEARS:
            x = node.args[0]
            weights = [array for array in node.args[1:3] if array is not None]
            ready = all(array.storage.kind is Kind.PARAM for array in weights) and uses.constant(x)
            key = (x, fused_calls.linear_format(node)) if ready else (id(node),)
            groups.setdefault(key, []).append(node)
    leaders = {id(group[0]): group for group in groups.values()}
    followers = {id(node) for group in groups.values() for node in group[1:]}
    items: list[FuseItem] = []
    for node in nodes:
        group = leaders.get(id(node))
        if group is not None and len(group) > 1:
            items.append(_joined_linears(group))
        elif id(node) not in followers:
            items.append(node)
    return items


def _joined_linears(group: list[Node]) -> FusedNode:
    return FusedNode(group, lambda b: fused_calls.linears(b, group))


def join_updates(items: list[FuseItem]) -> list[FuseItem]:
    """Join neighbouring updates by adapters of products of one x: the threads start once."""
    joined: list[FuseItem] = []
    group: list[Node] = []

    def flush() -> None:
        if group:
            joined.append(group[0] if len(group) == 1 else _joined_updates(list(group)))
            group.clear()

    for item in items:
        if not isinstance(item, Node) or item.op is not ops.lora.default:
            flush()
            joined.append(item)
            continue
        made = {node.outputs[0].storage for node in group}
        if group and (not _of_same_rows(group[0], item) or made & {array.storage for array in item.reads}):
            flush()
        group.append(item)
    flush()
    return joined


def _of_same_rows(node: Node, other: Node) -> bool:
    """Whether two updates are of one x and of stacks of one kind, and of the same slot for each row."""
    (x, _, a, _, slots, *_), (other_x, _, other_a, _, other_slots, *_) = node.args, other.args
    return bool(x == other_x and slots == other_slots and _kind(a) == _kind(other_a))


def _kind(stack: Array) -> tuple[Any, ...]:
    return stack.shape[0], stack.dtype


def _joined_updates(group: list[Node]) -> FusedNode:
    return FusedNode(group, lambda b: op_calls.updates(b, group))


def join_residuals(items: list[FuseItem], uses: Uses) -> list[FuseItem]:
    """Join a residual sum with the norm of it, at the place of the sum: one pass over the row."""
    adds = {item.outputs[0]: item for item in items if isinstance(item, Node) and _is_residual(item, uses)}
    norms: dict[int, Node] = {}  # by the node of the sum
    for item in items:
        if isinstance(item, Node) and item.op in _NORMS and item.args[0] in adds:
            weights = [array for array in item.args[1:] if isinstance(array, Array)]
            if all(array.storage.kind is Kind.PARAM and uses.constant(array) for array in weights):
                norms.setdefault(id(adds[item.args[0]]), item)
    inside = {id(norm) for norm in norms.values()}
    joined: list[FuseItem] = []
    for item in items:
        norm = norms.get(id(item))
        if norm is not None:
            assert isinstance(item, Node)
            joined.append(_joined_norm(item, norm))
        elif id(item) not in inside:
            joined.append(item)
    return joined


def _is_residual(node: Node, uses: Uses) -> bool:
    """Whether the node adds two arrays of one layout, and no node changes the sum later."""
    if node.op not in _ADDS or node.kwargs:
        return False
    left, right = node.args[:2]
    out = node.outputs[0]
    return uses.constant(out) and all(
        isinstance(array, Array) and array.shape == out.shape and array.dtype == out.dtype and array.contiguous
        for array in (left, right, out)
    )


def _joined_norm(add: Node, norm: Node) -> FusedNode:
    return FusedNode([norm, add], lambda b: fused_calls.norm_of_sum(b, norm, add))


# ── heads: norm, rotation and cache write ─────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _Part:
    """The nodes, in order, that handle the heads of one projection, and their part of a call of `onward_heads`."""

    nodes: list[Node]
    fields: dict[str, Any]
    angles: tuple[Array, Array] | None
    offsets: Array | None

    @property
    def shape(self) -> tuple[Any, ...]:
        x: Array = self.fields["x"]
        return x.shape[0], x.shape[2], x.shape[3], x.dtype


def join_heads(items: list[FuseItem], uses: Uses) -> list[FuseItem]:
    """Join norm, rotation and cache write of queries, keys and values: one pass over the heads."""
    parts = {id(part.nodes[-1]): part for item in items if isinstance(item, Node) for part in _part(item, uses)}
    # A rotation before a cache write, or a norm before a rotation, belongs to the part of what follows it.
    inside = {id(node) for part in parts.values() for node in part.nodes[:-1]}
    joined: list[FuseItem] = []
    pending: list[_Part] = []

    def flush() -> None:
        if pending:
            joined.append(_joined_heads(list(pending)))
            pending.clear()

    for item in items:
        if id(item) in inside:
            continue
        part = parts.get(id(item))
        if part is not None:
            if pending and not _fit_in_one_call(pending, part):
                flush()
            pending.append(part)
            continue
        storages = item.storages() if isinstance(item, FusedNode) else set(touched(item))
        if any(_depends_on(storages, item, pending_part) for pending_part in pending):
            flush()
        joined.append(item)
    flush()
    return joined


def _part(node: Node, uses: Uses) -> Iterator[_Part]:
    if node.op is ops.write_cache.default:
        cache, new, offsets, table = node.args
        before = uses.only_for(new, node)
        if cache.dtype != new.dtype or cache.strides[-1] != 1 or (table is not None and table.strides[-1] != 1):
            return
        fields = fused_calls.cache_part(node)
        if before is not None and before.op is ops.rotate.default and before.outputs[0] == new:
            yield _rotated([before, node], fields, before, offsets, uses)
        else:
            yield _Part([node], fields, None, offsets)
    elif node.op is ops.rotate.default:
        out = node.outputs[0]
        fields = {"heads": out.shape[1], "out": address(out), "out_strides": out.strides[:3]}
        yield _rotated([node], fields, node, None, uses)


def _rotated(nodes: list[Node], fields: dict[str, Any], rotate: Node, offsets: Array | None, uses: Uses) -> _Part:
    x, cos, sin, interleaved = rotate.args
    fields |= {"x": x, "rotate": 2 if interleaved else 1}
    norm = uses.only_for(x, rotate)
    if norm is not None and norm.op is ops.rms_norm.default and _swapped(norm.outputs[0], x):
        plain, weight, eps, offset, after_cast = norm.args
        if weight.contiguous and uses.constant(plain):
            fields |= {
                "x": replace(
                    plain, shape=x.shape, strides=tuple(plain.strides[i] for i in (0, 2, 1, 3)), offset=plain.offset
                ),
                "norm_weight": address(weight),
                "eps": eps,
                "weight_offset": offset,
                "after_cast": int(after_cast),
            }
            nodes = [norm, *nodes]
    return _Part(nodes, fields, (cos, sin), offsets)


def _swapped(whole: Array, view: Array) -> bool:
    """Whether view [B, H, T, D] is whole [B, T, H, D] with two dims swapped."""
    if len(whole.shape) != 4 or whole.offset != view.offset:
        return False
    order = (0, 2, 1, 3)
    return view.shape == tuple(whole.shape[i] for i in order) and view.strides == tuple(whole.strides[i] for i in order)


def _fit_in_one_call(pending: list[_Part], part: _Part) -> bool:
    """Whether `part` fits into one call with the pending ones: it has their rows, angles and offsets."""
    angles = next((p.angles for p in pending if p.angles is not None), None)
    offsets = next((p.offsets for p in pending if p.offsets is not None), None)
    return (
        pending[0].shape == part.shape
        and (angles is None or part.angles is None or angles == part.angles)
        and (offsets is None or part.offsets is None or offsets == part.offsets)
    )


def _depends_on(storages: set[Storage], item: FuseItem, part: _Part) -> bool:
    """Whether `item` must come after a pending part: it touches what the part writes, or changes what it reads."""
    last = part.nodes[-1]
    written = {array.storage for array in (*last.outputs, *last.writes)}
    if storages & written:
        return True
    changed = {array.storage for node in _nodes(item) for array in node.writes}
    return bool(changed & {array.storage for node in part.nodes for array in node.reads})


def _nodes(item: FuseItem) -> list[Node]:
    return item.nodes if isinstance(item, FusedNode) else [item]


def _joined_heads(parts: list[_Part]) -> FusedNode:
    nodes = [node for part in parts for node in part.nodes]
    angles = next((part.angles for part in parts if part.angles is not None), None)
    offsets = next((part.offsets for part in parts if part.offsets is not None), None)
    return FusedNode(nodes, lambda b: fused_calls.heads(b, [dict(part.fields) for part in parts], offsets, angles))
