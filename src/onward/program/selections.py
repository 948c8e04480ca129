"""One selection in the place of several equal ones: inputs in an order of their own, gathered for several products."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.program.arrays import Array, Kind, Storage
from onward.program.nodes import Node
from onward.program.uses import Uses


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
