"""Lower a trace to kernel calls: by the kernel functions of Onward's ops, and a rule for each operator of torch."""

import torch

from onward import ops as _registered  # noqa: F401 - registers the kernels of ops
from onward.ops.kernel_calls import Unsupported
from onward.ops.operator import KERNELS

# Importing these modules registers their rules.
from onward.program import aten_matrices, aten_pointwise, aten_shapes  # noqa: F401
from onward.program.builder import RULES, Builder, named_arguments
from onward.program.fuse import FusedNode, FuseItem, rewrite
from onward.program.graph import Array, Kind, Node, PackedParams, ProgramCall, TorchCall, Trace


def lower(trace: Trace, packed: PackedParams | None = None) -> list[ProgramCall]:
    """The calls of a traced forward, in order. The logits are contiguous in a storage of kind LOGITS,
    the values of each tap in one of kind TAP.

    packed: packed copies of frozen params; None if params may change.
    """
    builder = Builder(trace)
    for item in rewrite(trace, packed):
        _lower(builder, item)
    _return_cache(builder)
    assert trace.logits is not None
    trace.logits = _return(builder, trace.logits, Kind.LOGITS)
    trace.taps = {name: _return(builder, values, Kind.TAP) for name, values in trace.taps.items()}
    return builder.calls


def _lower(builder: Builder, item: FuseItem) -> None:
    if isinstance(item, FusedNode):
        builder.node = item.nodes[0]
        item.lower(builder)
        return
    builder.node = item
    before = len(builder.calls)
    try:
        if item.op in KERNELS:
            out = item.outputs if len(item.outputs) > 1 else next(iter(item.outputs), None)
            KERNELS[item.op](builder, out, *(named_arguments(item).values() if item.kwargs else item.args))
        elif item.op in RULES:
            RULES[item.op](builder, item)
        else:
            raise Unsupported("no kernel for this operator")
    except Unsupported as reason:
        del builder.calls[before:]
        builder.calls.append(TorchCall(item, str(reason)))


def _return_cache(builder: Builder) -> None:
    """Copy the values of a returned cache into the input cache, where the forward made new tensors."""
    trace = builder.trace
    changed = [(old, new) for old, new in zip(trace.cache, trace.returned_cache, strict=True) if old != new]
    # Copy to temporaries first: a forward may return the tensors of its cache in another order.
    copies = []
    for old, new in changed:
        builder.node = _return_node(old)
        copies.append((old, builder.cast(new, new.dtype)))
    for old, copy in copies:
        builder.node = _return_node(old)
        builder.copy(copy, old)


def _return(builder: Builder, result: Array, kind: Kind) -> Array:
    """The result as a contiguous array in a storage of this kind."""
    storage = result.storage
    if storage.kind is not Kind.TEMPORARY or not result.is_contiguous() or result.nbytes != storage.nbytes:
        builder.node = _return_node(result)
        result = builder.cast(result, result.dtype)
    result.storage.kind = kind
    return result


def _return_node(array: Array) -> Node:
    return Node(torch.ops.aten.copy_.default, (array, array), {}, (), (array,), "the forward's return value")
