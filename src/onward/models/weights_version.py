"""Tells whether a model's weights have changed since a cache was filled with them."""

import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from onward import ops
from onward.models.model import Model
from onward.models.module import ModuleForward
from onward.ops.autocast import autocast_dtype_on
from onward.program.leaves import leaves_of


def computation(model: Model) -> "tuple[WeightsVersion, ops.Choice | None, torch.dtype | None]":
    """What keys and values depend on beside the ids: the weights as they are now, the kernels, and autocast."""
    device = model.device.type
    return WeightsVersion(model), ops.choice() if device == "cpu" else None, autocast_dtype_on(device)


@final
class WeightsVersion:
    """A snapshot of a model's weights: which tensors, where they lie, and how often each was written to. Compare two
    with ==.

    It keeps no tensor in memory. It sees an optimizer's step (a fused one too), `load_state_dict`, Onward's own
    kernels, an assignment to `tensor.data` and every other write that torch counts. It does not see writes through
    `tensor.data`, a NumPy array or a mapped file: call `torch.autograd.graph.increment_version(tensor)` after one.

    Of tensors created in inference mode torch counts no writes, so snapshots with one are never equal.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        params = model.params
        if isinstance(model.forward, ModuleForward) and params is model.forward.params:
            params = model.forward.look_up()
        tensors = [leaf for leaf in leaves_of(params) if isinstance(leaf, Tensor)]
        self._tensors = [(weakref.ref(tensor), _state_of(tensor)) for tensor in tensors]

    def is_of(self, model: Model) -> bool:
        """Whether the snapshot is of this model's weights, now or earlier."""
        return self._model() is model

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightsVersion) or len(self._tensors) != len(other._tensors):
            return False
        model = self._model()
        return (
            model is not None
            and other.is_of(model)
            and all(
                mine() is theirs() is not None and state is not None and state == their_state
                for (mine, state), (theirs, their_state) in zip(self._tensors, other._tensors, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]


def _state_of(tensor: Tensor) -> tuple[object, ...] | None:
    """Where a tensor lies, and how often it was written to; None where that is not known."""
    if tensor.is_inference():
        return None
    # Subclasses and other layouts need not have memory of their own.
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return (tensor._version,)
    # An assignment to `data` counts as no write, and new memory may lie where freed memory did. But no storage is made
    # in the place of one that a weak reference names.
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, tensor.data_ptr(), tensor._version


def _count_fused_writes(optimizer: Optimizer, args: Any, keywords: Any) -> None:
    """Count a step's writes where torch does not: those of optimizers with fused=True."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([parameter for parameter in group["params"] if parameter.grad is not None])


register_optimizer_step_post_hook(_count_fused_writes)
