"""Where an adapter's changes go: what a checkpoint calls the parts of a model's params, and whether they fit."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.adapters.peft_folder import Adapter, Update, changed_modules
from onward.errors import CheckpointError, RequestError
from onward.models import (
    Architecture,
    Embedding,
    LatentLinear,
    Linear,
    Model,
    Router,
    architecture_of,
    named_params,
)
from onward.models.linear import is_marked
from onward.ops import Weight
from onward.ops.linear import weight_shape


def adaptable(model: Model) -> Architecture:
    """The architecture of a model, whose modules an adapter names.

    Raises:
        RequestError: the model's forward is of none.
    """
    architecture = architecture_of(model)
    if architecture is None:
        raise RequestError("an adapter names modules of a checkpoint, and this model's forward was made from none")
    return architecture


def part_names(architecture: Architecture) -> list[str | None]:
    """For each leaf of the params, marked matrices being leaves: the name of its module, or of its tensor.

    None for a leaf that is None. A tied head, whose weight has the embedding's name, is "lm_head".
    """
    leaves = pytree.tree_leaves(named_params(architecture), is_leaf=is_marked)
    tables = {leaf.weight for leaf in leaves if isinstance(leaf, Embedding)}

    def name_of(leaf: Any) -> str | None:
        if isinstance(leaf, Linear) and leaf.weight in tables:
            return "lm_head"
        return str(leaf.weight).removesuffix(".weight") if is_marked(leaf) else leaf

    return [name_of(leaf) for leaf in leaves]


def check_modules(adapter: Adapter, names: Sequence[str | None], parts: Sequence[Any]) -> None:
    """Raise `CheckpointError` where an adapter changes a module that is none of the model's, or is of another kind.

    names: of `part_names`. parts: the leaves of the params, which these name.
    """
    modules = [name for name in names if name is not None]
    known = {*modules, *(name.rpartition(".")[0] for name in modules)}  # of a norm the tensor is known by its name
    if unknown := sorted(set(changed_modules(adapter)) - known):
        raise CheckpointError(
            f"the adapter changes {len(unknown)} modules that the model does not have, {unknown[0]!r} for one: is it "
            "for another model?"
        )
    named = [(name, part) for name, part in zip(names, parts, strict=True) if name is not None]
    linear = {name for name, part in named if isinstance(part, Linear | Router | LatentLinear)}
    tables = {name for name, part in named if isinstance(part, Embedding)}
    tensors = {tensor for name, part in named for tensor in _tensors(name, part)}
    others = [*(adapter.updates.keys() - linear), *(adapter.embeddings.keys() - tables)]
    if others := sorted([*others, *(adapter.replaced.keys() - tensors)]):
        raise CheckpointError(f"the adapter's update of {others[0]} is of another kind of layer than the model's")


def _tensors(name: str, part: Any) -> tuple[str, ...]:
    """The names of the tensors of a part."""
    if not is_marked(part):
        return (name,)
    return (f"{name}.weight",) if isinstance(part, Embedding) else (f"{name}.weight", f"{name}.bias")


def fitting(name: str, tensor: Tensor, weight: Weight) -> Tensor:
    """A tensor that is to take the place of a weight or a bias.

    Raises:
        CheckpointError: it has another shape.
    """
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight_shape(weight)
    if tuple(tensor.shape) != shape:
        more = tensor.dim() == len(shape) == 2 and tensor.shape[1] == shape[1] and tensor.shape[0] > shape[0]
        advice = ": tokens of its own are taken where it is merged (onward.load(…, merge=adapter))" if more else ""
        raise CheckpointError(f"the adapter's {name} is {list(tensor.shape)}, and the model's {list(shape)}{advice}")
    return tensor


def fitting_update(module: str, update: Update, shape: tuple[int, ...]) -> Update:
    """An update of a weight of this shape.

    Raises:
        CheckpointError: it is of another shape.
    """
    if shape != (update.b.shape[0], update.a.shape[1]):
        raise CheckpointError(
            f"the adapter's update of {module} is {[update.b.shape[0], update.a.shape[1]]}, and the model's weight "
            f"{list(shape)}: it is for another model"
        )
    return update


def fitting_bias(module: str, new: Tensor, bias: Tensor | None) -> Tensor:
    """A bias that is to take the place of a module's own.

    Raises:
        CheckpointError: the module has none, or one of another shape.
    """
    if bias is None:
        raise CheckpointError(f"the adapter has a bias for {module}, and the model has none there")
    return fitting(f"{module}.bias", new, bias)
