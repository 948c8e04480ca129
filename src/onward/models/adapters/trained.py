"""LoRA adapters that are trained: parameters beside frozen weights, which may be quantized.

Shapes: R rank, K inputs, N outputs of a linear layer, B rows.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from onward import ops
from onward.errors import RequestError
from onward.models.adapters.forward import LoraUpdate, Updates
from onward.models.adapters.merge import Adapter, Update, adaptable, part_names
from onward.models.adapters.stacks import AdapterCapacity, empty_stacks, rounded_rows, write_update
from onward.models.linear import Linear, is_marked
from onward.models.live_weights import States, states_of
from onward.models.model import Model
from onward.ops.linear import weight_shape

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TrainedAdapter:
    """The parameters of an adapter: W + alpha / rank * B A for each of its modules.

    parameters: float32 A [R, K] and B [N, R], as "model.layers.0.self_attn.q_proj.lora_A.weight". B begins as zeros, so
    that a new adapter changes nothing.
    """

    def __init__(self, model: Model, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        """targets: the last parts of the names of linear layers. Raises `RequestError` if the model lacks one."""
        self.rank, self.alpha, self.targets = rank, alpha, tuple(targets)
        self._model = model
        leaves = pytree.tree_leaves(model.params, is_leaf=is_marked)
        modules = {
            name: part
            for name, part in zip(part_names(adaptable(model)), leaves, strict=True)
            if name is not None and isinstance(part, Linear)
        }
        known = sorted({name.rpartition(".")[2] for name in modules})
        if unknown := [target for target in self.targets if target not in known]:
            raise RequestError(
                f"the model has no linear layers {unknown[0]!r} for an adapter; it has {', '.join(known)}"
            )
        draws = torch.Generator().manual_seed(seed)
        self.modules = [name for name in modules if name.rpartition(".")[2] in self.targets]
        self.parameters: dict[str, Parameter] = {}
        for name in self.modules:
            outputs, inputs = weight_shape(modules[name].weight)
            a = (2 * torch.rand(rank, inputs, generator=draws) - 1) * inputs**-0.5
            self.parameters[f"{name}.lora_A.weight"] = Parameter(a)
            self.parameters[f"{name}.lora_B.weight"] = Parameter(torch.zeros(outputs, rank))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def states(self) -> States:
        """They change with the parameters."""
        return states_of(self.parameters.values())

    def copy_for(self, model: Model) -> Self:
        """A copy for another model with the same modules. Its parameters begin with the current values."""
        other = copy.copy(self)
        other._model = model
        other.parameters = {name: Parameter(each.detach().clone()) for name, each in self.parameters.items()}
        return other

    def adapter(self) -> Adapter:
        """The current values."""
        pairs = {name: [each.detach().clone() for each in self._pair(name)] for name in self.modules}
        return Adapter({name: Update(a, b * self.scale) for name, (a, b) in pairs.items()})

    def in_graph(self, params: Any) -> Any:
        """The model's params with the adapter beside them, in the graph of its parameters."""
        leaves, structure = pytree.tree_flatten(params, is_leaf=is_marked)
        names = part_names(adaptable(self._model))
        parts = [
            self._followed(name, leaf) if name in self.modules else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return pytree.tree_unflatten(parts, structure)

    def _pair(self, name: str) -> tuple[Parameter, Parameter]:
        return self.parameters[f"{name}.lora_A.weight"], self.parameters[f"{name}.lora_B.weight"]

    def _followed(self, name: str, part: Linear) -> "FollowedLinear":
        a, b = self._pair(name)
        with torch.no_grad():
            update = LoraUpdate(a.detach(), b.detach().T * self.scale)
            stack = empty_stacks({name: part}, AdapterCapacity().including(1, {name: update}), self._model)[name]
            write_update(stack, 1, update)
        return FollowedLinear(part, stack, a, b, self.scale)


class FollowedLinear(NamedTuple):
    """A linear layer with the update of one adapter, in slot 1 of `updates`, whose parameters autograd follows."""

    linear: Linear
    updates: Updates
    a: Tensor
    b: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """float [B, ..., K] -> [B, ..., N]."""
        out: Tensor = _Update.apply(x, self.linear(x), self.a, self.b, self)  # type: ignore[no-untyped-call]
        return out


class _Update(torch.autograd.Function):
    """The update of a product, as rows with the adapter get it; the gradients are those of the rounded A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, layer: FollowedLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, a, b)
        stack_a, stack_b, ranks, factors, scale, shift = layer.updates
        slots = torch.ones(x.shape[0], dtype=torch.int32)
        return ops.lora(x, y, stack_a, stack_b, slots, ranks, factors=factors, scale=scale, shift=shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, a, b), layer = ctx.saved_tensors, ctx.layer
        flat, inputs = (each.reshape(-1, each.shape[-1]).to(torch.float32) for each in (grad, x))
        a, b = (_as_stored(each, layer.updates) for each in (a.detach(), b.detach().T * layer.scale))
        to_inner = flat @ b.T
        to_a, to_b = to_inner.T @ inputs, ((inputs @ a.T).T @ flat).T * layer.scale
        return (to_inner @ a).to(x.dtype).view(x.shape), grad, to_a, to_b, None


def _as_stored(matrix: Tensor, updates: Updates) -> Tensor:
    """The values that a stack stores for float32 [R, …]."""
    if updates.factors is None:
        return matrix.to(updates.a.dtype).to(torch.float32)
    integers, scales = rounded_rows(matrix)
    return integers * scales.unsqueeze(1)
