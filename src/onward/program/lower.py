"""Turn a trace into kernel calls, with one rule for each operator."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch._ops import OpOverload

from onward.ops.operator import FAKES

# The rules of a file are there once it is imported.
from onward.program import aten_matrices, aten_pointwise, aten_shapes, fused_calls, op_calls  # noqa: F401
from onward.program.builder import RULES, Builder, Unsupported
from onward.program.fuse import FusedNode, FuseItem, rewrite
from onward.program.graph import Array, Infer, Kind, Node, PackedParams, ProgramCall, TorchCall, Trace

# Shapes and dtypes of results, for the recorder: of torch's operators and of ours.
INFER: Mapping[OpOverload, Infer] = ChainMap(aten_pointwise.INFER, FAKES)

aten = torch.ops.aten


def is_whole(op: OpOverload) -> bool:
    """Whether the recorder keeps a composite operator whole: it does where there is a rule for it."""
    return op in RULES


def lower(trace: Trace, packed: PackedParams | None = None) -> list[ProgramCall]:
    """The calls of a traced forward, in order; the logits end up contiguous in a storage of kind LOGITS.

    packed: packed copies of params that will not change; None where they may.
    """
    builder = Builder(trace)
    items = rewrite(trace, packed)
    for item in items:
        _lower(builder, item)
    _return_cache(builder)
    _return_logits(builder)
    return builder.calls


def _lower(builder: Builder, item: FuseItem) -> None:
    if isinstance(item, FusedNode):
        builder.node = item.nodes[0]
        item.lower(builder)
        return
    builder.node = item
    before = len(builder.calls)
    rule = RULES.get(item.op)
    try:
        if rule is None:
            raise Unsupported("no kernel for this operator")
        rule(builder, item)
    except Unsupported as reason:
        del builder.calls[before:]
        builder.calls.append(TorchCall(item, str(reason)))


def _return_cache(builder: Builder) -> None:
    """Copy the values of a returned cache into the given one, where the forward made new tensors."""
    trace = builder.trace
    changed = [(old, new) for old, new in zip(trace.cache, trace.returned_cache, strict=True) if old != new]
    # First into temporaries: a forward may return the tensors of its cache in another order.
    copies = []
    for old, new in changed:
        builder.node = _return_node(old)
        copy = builder.temporary(new.shape, new.dtype)
        builder.copy(new, copy)
        copies.append(copy)
    for (old, _), copy in zip(changed, copies, strict=True):
        builder.node = _return_node(old)
        builder.copy(copy, old)


def _return_logits(builder: Builder) -> None:
    trace = builder.trace
    logits = trace.logits
    assert logits is not None
    storage = logits.storage
    if storage.kind is Kind.TEMPORARY and logits.contiguous and logits.nbytes == storage.nbytes:
        storage.kind = Kind.LOGITS
        return
    builder.node = _return_node(logits)
    out = builder.temporary(logits.shape, logits.dtype)
    builder.copy(logits, out)
    out.storage.kind = Kind.LOGITS
    trace.logits = replace(out)


def _return_node(array: Array) -> Node:
    return Node(aten.copy_.default, (array, array), {}, (), (array,), "what the forward returns")


def fallbacks(calls: Sequence[ProgramCall]) -> list[TorchCall]:
    return [call for call in calls if isinstance(call, TorchCall)]
