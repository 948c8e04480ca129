"""Types that mark weights, by which packing, quantization, adapters and sharding find the matrices in params; and
packing into the layouts that the kernels read, once, while loading."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.ops.expert_weights import NativeExperts, pack_experts, stack_experts
from onward.ops.linear import stock_weight
from onward.ops.quantized import register_tensors


class LatentWeight(NamedTuple):
    """The split weight of a `LatentLinear`, for `ops.linear_by_head`. keys: [H, R, K], from a head's query to the
    latent. values: [H, V, R], from mixed latents to a head's output."""

    keys: Tensor | NativeExperts
    values: Tensor | NativeExperts


@dataclass(frozen=True, eq=False)
class LatentLinear:
    """The linear layer from latents of R features to the keys and values of all heads: weight [H (K + V), R], with each
    head's key rows first. It is packed but never quantized. A pytree of its weight.

    weight: stock as in the checkpoint, or packed in two parts.
    """

    weight: Tensor | LatentWeight
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def parts(self) -> LatentWeight:
        """The split weight; views of a stock one."""
        if isinstance(self.weight, LatentWeight):
            return self.weight
        by_head = self.weight.view(self.num_heads, self.key_dim + self.value_dim, -1)
        return LatentWeight(by_head[:, : self.key_dim].transpose(1, 2), by_head[:, self.key_dim :])

    @property
    def stock(self) -> Tensor:
        """The weight as in the checkpoint."""
        if isinstance(self.weight, Tensor):
            return self.weight
        keys, values = (part if isinstance(part, Tensor) else part.unpack() for part in self.weight)
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

    def packed(self) -> "LatentLinear":
        """The same layer in this machine's layout for `ops.linear_by_head`."""
        if isinstance(self.weight, LatentWeight):
            return self
        keys, values = (pack_experts(part.contiguous()) for part in self.parts if isinstance(part, Tensor))
        if not isinstance(keys, NativeExperts) or not isinstance(values, NativeExperts):
            return self  # no kernels: keep the stock weight
        return replace(self, weight=LatentWeight(keys, values))


register_tensors(LatentLinear, "weight")


class Linear(NamedTuple):
    """A linear layer: weight [out, in], stock or packed, and optional bias [out]."""

    weight: ops.Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(NamedTuple):
    """A lookup table: weight [V, D], stock or packed. A tied head shares the weight."""

    weight: ops.Table

    def __call__(self, ids: Tensor) -> Tensor:
        """int [...] -> float [..., D]."""
        return ops.embedding(ids, self.weight)


class Router(NamedTuple):
    """A linear layer that chooses experts: weight [out, in], bias [out]. It is packed but never quantized."""

    weight: ops.Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class ExpertLinear(NamedTuple):
    """The linear layers of E experts: weight [E, out, in], optional bias [E, out]. weight: one stock matrix per expert,
    as in the checkpoint; or stacked, packed or quantized in one."""

    weight: ops.ExpertWeights | tuple[ops.Weight, ...]
    bias: Tensor | None = None

    @property
    def matrices(self) -> tuple[ops.Weight, ...]:
        """The weight of each expert, in its current layout."""
        if isinstance(self.weight, ops.NativeExperts | ops.QuantizedExperts):
            return tuple(map(self.weight.expert, range(self.weight.shape[0])))
        return tuple(self.weight)

    @property
    def together(self) -> ops.ExpertWeights:
        """All weights for `ops.experts`; stock matrices are stacked."""
        if isinstance(self.weight, Tensor | ops.NativeExperts | ops.QuantizedExperts):
            return self.weight
        return stack_experts(self.weight)

    def sum_of(
        self, x: Tensor, chosen: Tensor, shares: Tensor, gate: "ExpertLinear | None", up: "ExpertLinear",
        **activation: Any,
    ) -> Tensor:  # fmt: skip
        """`ops.experts` of x float [..., D] with this as the down projection; `activation` as there."""
        return ops.experts(
            x, chosen, shares, None if gate is None else gate.together, up.together, self.together,
            gate_bias=None if gate is None else gate.bias, up_bias=up.bias, down_bias=self.bias, **activation,
        )  # fmt: skip


class ShortConv(NamedTuple):
    """A causal convolution of each of C channels with K weights, and optional bias [C]. weight: [C, 1, K] as in
    checkpoints, or packed, [K, C]. It is never quantized."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def by_tap(self) -> Tensor:
        """[K, C], for `ops.short_conv`."""
        return self.weight.squeeze(1).T if self.weight.dim() == 3 else self.weight


Marked = Linear | Embedding | Router | ExpertLinear | ShortConv | LatentLinear


def is_marked(part: Any) -> bool:
    return isinstance(part, Marked)


def parameter_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf of the params, such as "layers.3.mixer.q_proj.weight"."""
    return pytree.keystr(path).replace("[", ".").replace("]", "").removeprefix(".")


def map_marked(convert: Callable[[tuple[Any, ...], Any], Any], params: Any) -> Any:
    """The params with each marked part replaced by convert(its path in the params, the part)."""
    return pytree.tree_map_with_path(
        lambda path, leaf: convert(path, leaf) if is_marked(leaf) else leaf, params, is_leaf=is_marked
    )


def marked_parts(params: Any) -> list[Any]:
    """All marked parts of params, in order."""
    return [leaf for leaf in pytree.tree_leaves(params, is_leaf=is_marked) if is_marked(leaf)]


def pack_params(params: Any, release: Callable[[], None] = lambda: None) -> Any:
    """The params with every matrix packed.

    A tied pair stays one weight. An untied embedding is not packed, since its rows are looked up one by one. `release`
    is called after each layer and at the end, when stock weights are no longer needed.

    Args:
        params: with a tuple `layers`; `Linear` and `Embedding` mark the matrices.
    """
    layers = []
    for layer in params.layers:
        layers.append(pack_layer(layer))
        release()
    rest = params._replace(layers=())
    packed: dict[int, ops.Weight] = {}

    def pack_linear(path: tuple[Any, ...], part: Any) -> Any:
        if not isinstance(part, Linear):
            return part
        weight = packed[id(part.weight)] = ops.pack(part.weight)
        return part._replace(weight=weight)

    def share_tied(path: tuple[Any, ...], part: Any) -> Any:
        return Embedding(packed.get(id(part.weight), part.weight)) if isinstance(part, Embedding) else part

    rest = map_marked(share_tied, map_marked(pack_linear, rest))
    release()
    return rest._replace(layers=tuple(layers))


def pack_layer(layer: Any) -> Any:
    """The layer with every matrix packed."""
    mixed = _mixed_experts(layer)

    def convert(path: tuple[Any, ...], part: Any) -> Any:
        return _packed(part._replace(weight=tuple(map(float_weight, part.matrices))) if path[:-1] in mixed else part)

    return map_marked(convert, layer)


def _mixed_experts(layer: Any) -> set[tuple[Any, ...]]:
    """The paths of experts whose gate, up and down matrices differ in format, which no kernel supports."""
    formats: dict[tuple[Any, ...], set[Any]] = {}

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, ExpertLinear) and isinstance(part.weight, tuple):
            formats.setdefault(path[:-1], set()).update(_format(weight) for weight in part.matrices)
        return part

    map_marked(collect, layer)
    return {path for path, found in formats.items() if found != {None} and (len(found) > 1 or "ordered" in found)}


def _format(weight: ops.Weight) -> str | None:
    """The format of an expert's matrix; None for floats; "ordered" for reordered inputs."""
    if not isinstance(weight, ops.QuantizedWeight):
        return None
    return weight.format if weight.order is None else "ordered"


def float_weight(weight: ops.Weight) -> Tensor:
    """[N, K]: a stock weight, or the values of a packed or quantized one."""
    return weight.dequantize() if isinstance(weight, ops.QuantizedWeight) else stock_weight(weight)


def stack_params(params: Any) -> Any:
    """The params with stacked expert weights, for the reference ops where there are no kernels."""
    return map_marked(
        lambda path, part: part._replace(weight=part.together) if isinstance(part, ExpertLinear) else part, params
    )


def _packed(part: Any) -> Any:
    if isinstance(part, Linear | Router):
        return part._replace(weight=ops.pack(part.weight))
    if isinstance(part, ShortConv):
        return part._replace(weight=part.by_tap.contiguous())
    if isinstance(part, LatentLinear):
        return part.packed()
    return part._replace(weight=ops.pack_experts(part.weight)) if isinstance(part, ExpertLinear) else part
