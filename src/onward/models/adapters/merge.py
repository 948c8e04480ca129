"""Adapters: low-rank updates of weights by their module names in the checkpoint, and their merging: W becomes W + B A.

Shapes: R rank, K inputs, N outputs of a linear layer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import CheckpointError, RequestError
from onward.models.architecture import Architecture, architecture_of, named_params
from onward.models.blocks import Decoder, DecoderNames
from onward.models.linear import (
    Embedding,
    ExpertLinear,
    LatentLinear,
    Linear,
    Router,
    ShortConv,
    float_weight,
    is_marked,
)
from onward.models.model import DividedForward, Model
from onward.ops import NativeWeight, QuantizedWeight, Weight, pack
from onward.ops.linear import weight_shape
from onward.ops.quantized import ROUNDED_FORMATS


@dataclass(frozen=True)
class Update:
    """W + B A of one linear layer; all float32. a: [R, K]. b: [N, R], scaled. magnitude: [N], the row norms of W + B A
    in DoRA; None without it."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    @property
    def product(self) -> Tensor:
        """B A, [N, K]."""
        return self.b @ self.a


@dataclass(frozen=True)
class Adapter:
    """The changes of an adapter, by module names such as "model.layers.0.self_attn.q_proj".

    updates: of linear layers. embeddings: of tables [V, D], each as an update of the transposed table [D, V]. replaced:
    replacement tensors by full name (modules_to_save, biases).
    """

    updates: Mapping[str, Update]
    embeddings: Mapping[str, Update] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A hash of the contents: adapters with the same digest compute the same."""
        digest = hashlib.blake2b(digest_size=16)
        parts = dict(self.replaced)
        for name, update in [*self.updates.items(), *self.embeddings.items()]:
            parts |= {f"{name}.{part}": tensor for part, tensor in vars(update).items() if tensor is not None}
        for name, tensor in sorted(parts.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def grown(architecture: Architecture, adapter: Adapter) -> Architecture:
    """The architecture with the adapter's added tokens, if any. A tied head is untied if the adapter's embedding and
    head differ: only one of them was trained."""
    names = _tables(architecture)
    rows = {name: len(adapter.replaced[name]) for name in names if name in adapter.replaced}
    count = max(rows.values(), default=0)
    if count <= architecture.vocab_size:
        return architecture
    needed = names[:1] if architecture.tie_word_embeddings else names
    if wrong := [name for name in needed if rows.get(name) != count]:
        raise CheckpointError(
            f"the adapter's vocabulary has {count} tokens, and its {wrong[0]} has {rows.get(wrong[0], 0)} rows: "
            "save the embedding and the head with it (save_embedding_layers=True)"
        )
    if not isinstance(architecture, Decoder):
        raise RequestError("an adapter adds tokens only to decoders of the common blocks: merge it with peft")
    tables = [adapter.replaced[name] for name in names if name in rows]
    tied = architecture.tie_word_embeddings and torch.equal(tables[0], tables[-1])
    return replace(architecture, vocab_size=count, tie_word_embeddings=tied)


def with_added_tokens(architecture: Architecture, params: Any, adapter: Adapter) -> tuple[Any, Adapter]:
    """The params with the adapter's larger tables, and the rest of the adapter; both unchanged without added tokens."""
    if grown(architecture, adapter) is architecture:
        return params, adapter
    tables = [adapter.replaced[name] for name in _tables(architecture) if name in adapter.replaced]
    dtype, device = params.embed_tokens.weight.dtype, params.embed_tokens.weight.device
    placed = [table.to(dtype=dtype, device=device) for table in tables]
    if any(table.dim() != 2 or table.shape[1] != architecture.hidden_size for table in tables):
        raise CheckpointError(f"the adapter's tables must have {architecture.hidden_size} columns")
    tied = grown(architecture, adapter).tie_word_embeddings
    head = Linear(placed[0]) if tied else params.lm_head._replace(weight=placed[1])
    rest = {name: tensor for name, tensor in adapter.replaced.items() if name not in _tables(architecture)}
    return params._replace(embed_tokens=Embedding(placed[0]), lm_head=head), replace(adapter, replaced=rest)


def _tables(architecture: Architecture) -> tuple[str, str]:
    """The names of the embedding and of the head."""
    names = architecture.names if isinstance(architecture, Decoder) else DecoderNames()
    return f"{names.embed_tokens}.weight", f"{names.lm_head}.weight"


def adaptable(model: Model) -> Architecture:
    """The architecture of a model, whose modules adapters name."""
    architecture = architecture_of(model)
    if isinstance(model.forward, DividedForward):
        raise RequestError("a model over several processes takes no adapters yet: load it without pipeline=")
    if architecture is None:
        raise RequestError("an adapter names modules of a checkpoint, and this model was not made from one")
    return architecture


def part_names(architecture: Architecture) -> list[str | None]:
    """The module or tensor name of each leaf of the params, where marked matrices are leaves; None for a None leaf. A
    tied head, whose weight has the embedding's name, is "lm_head"."""
    leaves = pytree.tree_leaves(named_params(architecture), is_leaf=is_marked)
    tables = {leaf.weight for leaf in leaves if isinstance(leaf, Embedding)}

    def name_of(leaf: Any) -> str | None:
        if isinstance(leaf, Linear) and leaf.weight in tables:
            return "lm_head"
        return str(leaf.weight).removesuffix(".weight") if is_marked(leaf) else leaf

    return [name_of(leaf) for leaf in leaves]


def check_modules(adapter: Adapter, names: Sequence[str | None], parts: Sequence[Any]) -> None:
    """Raise `CheckpointError` if an adapter changes a module that the model lacks or that is of another kind. names:
    `part_names` of the leaves `parts`."""
    modules = [name for name in names if name is not None]
    known = {*modules, *(name.rpartition(".")[0] for name in modules)}  # norms have tensor names
    changed = {*adapter.updates, *adapter.embeddings, *(name.rpartition(".")[0] for name in adapter.replaced)}
    if unknown := sorted(changed - known):
        of_experts = [name for name in unknown if ".experts." in name]
        if of_experts and any(isinstance(part, ExpertLinear) for part in parts):
            raise CheckpointError(f"the adapter changes {of_experts[0]}: adapters of experts are not supported")
        raise CheckpointError(
            f"the adapter changes {len(unknown)} modules that the model does not have, such as {unknown[0]!r}: is it "
            "for another model?"
        )
    named = [(name, part) for name, part in zip(names, parts, strict=True) if name is not None]
    linear = {name for name, part in named if isinstance(part, Linear | Router | LatentLinear)}
    tables = {name for name, part in named if isinstance(part, Embedding)}
    tensors = {f"{name}.weight" if is_marked(part) else name for name, part in named}
    tensors |= {f"{name}.bias" for name, part in named if is_marked(part) and not isinstance(part, Embedding)}
    others = [*(adapter.updates.keys() - linear), *(adapter.embeddings.keys() - tables)]
    if others := sorted([*others, *(adapter.replaced.keys() - tensors)]):
        raise CheckpointError(f"the adapter's update of {others[0]} is for another kind of layer than the model's")


def fitting(name: str, tensor: Tensor, weight: Weight) -> Tensor:
    """A replacement of a weight or bias, checked."""
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight_shape(weight)
    if tuple(tensor.shape) != shape:
        more = tensor.dim() == len(shape) == 2 and tensor.shape[1] == shape[1] and tensor.shape[0] > shape[0]
        advice = ": added tokens require merging it (onward.load(…, merge=adapter))" if more else ""
        raise CheckpointError(f"the adapter's {name} is {list(tensor.shape)}, and the model's {list(shape)}{advice}")
    return tensor


def fitting_update(module: str, update: Update, shape: tuple[int, ...]) -> Update:
    """An update of a weight of this shape, checked."""
    if shape != (update.b.shape[0], update.a.shape[1]):
        raise CheckpointError(
            f"the adapter's update of {module} is {[update.b.shape[0], update.a.shape[1]]}, and the model's weight "
            f"{list(shape)}: it is for another model"
        )
    return update


def fitting_bias(module: str, new: Tensor, bias: Tensor | None) -> Tensor:
    """A replacement of a module's bias, checked."""
    if bias is None:
        raise CheckpointError(f"the adapter has a bias for {module}, and the model has none there")
    return fitting(f"{module}.bias", new, bias)


def merged_model(model: Model, adapter: Adapter) -> Model:
    """A model with an adapter merged into its weights (`merged_params`). It shares the others with the original, unless
    that one is trained.

    Raises:
        RequestError: the model has no architecture.
    """
    architecture = adaptable(model)
    if grown(architecture, adapter) is not architecture:
        raise RequestError(
            "an adapter with added tokens must be merged while the model is loaded: onward.load(…, merge=)"
        )
    model.refresh()
    return model.with_params(merged_params(architecture, model.params, adapter))


def merged_params(architecture: Architecture, params: Any, adapter: Adapter) -> Any:
    """The params with an adapter merged in, in their dtype and layout. The originals are not changed.

    Sums are computed in float32 and rounded once. If the head is tied to an embedding that the adapter changes, the
    head keeps the old weight, as with an unmerged adapter. With added tokens, the params are those of `grown`, and a
    tied head stays tied.

    Raises:
        CheckpointError: the adapter is for another model: a module is missing, or of another kind or shape.
        RequestError: the weights are quantized.
    """
    params, adapter = with_added_tokens(architecture, params, adapter)
    names = part_names(architecture)
    leaves, structure = pytree.tree_flatten(params, is_leaf=is_marked)
    check_modules(adapter, names, leaves)
    merged = [_merged(leaf, name, adapter) for leaf, name in zip(leaves, names, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _merged(leaf: Any, name: str | None, adapter: Adapter) -> Any:
    if isinstance(leaf, Linear | Router):
        return _merged_linear(leaf, str(name), adapter)
    if isinstance(leaf, LatentLinear):
        merged = _merged_linear(Linear(leaf.stock), str(name), adapter).weight
        assert isinstance(merged, Tensor), "stock stays stock"
        new = replace(leaf, weight=merged)
        return new if isinstance(leaf.weight, Tensor) else new.packed()
    if isinstance(leaf, Embedding):
        return _merged_embedding(leaf, str(name), adapter)
    if isinstance(leaf, ShortConv):
        return _merged_conv(leaf, str(name), adapter)
    replaced = None if name is None else adapter.replaced.get(name)
    return leaf if replaced is None else _like(leaf, fitting(str(name), replaced, leaf))


def _merged_linear(part: Linear | Router, module: str, adapter: Adapter) -> Linear | Router:
    weight = _replaced(part.weight, module, adapter)
    if (update := adapter.updates.get(module)) is not None:
        weight = _like(weight, updated(module, _stock(module, weight), update))
    return part._replace(weight=weight, bias=_merged_bias(part.bias, module, adapter))


def _replaced(weight: Any, module: str, adapter: Adapter) -> Any:
    """The weight of a module, or the adapter's replacement."""
    new = adapter.replaced.get(f"{module}.weight")
    return weight if new is None else _like(weight, fitting(f"{module}.weight", new, weight))


def _merged_bias(bias: Tensor | None, module: str, adapter: Adapter) -> Any:
    new = adapter.replaced.get(f"{module}.bias")
    return bias if new is None else _like(bias, fitting_bias(module, new, bias))  # type: ignore[arg-type]


def _merged_conv(part: ShortConv, module: str, adapter: Adapter) -> ShortConv:
    is_new = f"{module}.weight" in adapter.replaced
    weight = _replaced(part.by_tap.T.unsqueeze(1), module, adapter) if is_new else part.weight
    return ShortConv(weight, _merged_bias(part.bias, module, adapter))


def updated(module: str, weight: Tensor, update: Update) -> Tensor:
    """float32 [N, K]: W + B A of a stock weight [N, K]; with magnitudes, rows have these norms."""
    total = weight.to(torch.float32) + fitting_update(module, update, tuple(weight.shape)).product
    return total if update.magnitude is None else total * (update.magnitude / total.norm(dim=1)).unsqueeze(1)


def _merged_embedding(part: Embedding, module: str, adapter: Adapter) -> Embedding:
    weight = _replaced(part.weight, module, adapter)
    if (added := adapter.embeddings.get(module)) is not None:
        stock = _stock(module, weight).to(torch.float32)
        weight = _like(weight, stock + fitting_update(module, added, (stock.shape[1], stock.shape[0])).product.T)
    return Embedding(weight)


def _stock(module: str, weight: Weight) -> Tensor:
    """The float weight [N, K] of a stock or packed one."""
    if isinstance(weight, QuantizedWeight) and weight.format in ROUNDED_FORMATS:
        raise RequestError(
            f"{module} is {weight.format}, and an adapter is merged into float weights: merge it before quantizing "
            "(onward.load(…, merge=adapter, quantize=…))"
        )
    return float_weight(weight)


def _like(old: Weight, new: Tensor) -> Any:
    """A float32 weight in the dtype, device and layout of the old one."""
    if isinstance(old, NativeWeight):
        return pack(new.to(old.data.dtype))
    if isinstance(old, QuantizedWeight):
        if old.format not in ROUNDED_FORMATS:
            return pack(new.to(dtype=old.dtype, device=old.device))
        raise RequestError("an adapter is merged into float weights: merge it before quantizing")
    return new.to(dtype=old.dtype, device=old.device)
