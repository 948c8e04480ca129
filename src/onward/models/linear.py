"""The marks of weights: packing, quantization, adapters and sharding find the matrices of any params by these types."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.models.latent_linear import LatentLinear
from onward.ops.expert_weights import stack_experts


class Linear(NamedTuple):
    """A linear layer: weight [out, in], stock or packed, and in some families bias [out]."""

    weight: ops.Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """float [..., in] -> [..., out]."""
        return ops.linear(x, self.weight, self.bias)


class Embedding(NamedTuple):
    """A table of rows that are looked up: weight [V, D], stock or packed. A tied head has the same weight."""

    weight: ops.Table

    def __call__(self, ids: Tensor) -> Tensor:
        """int [...] -> float [..., D]."""
        return ops.embedding(ids, self.weight)


class Router(NamedTuple):
    """A linear layer whose outputs choose: weight [out, in], bias [out]. It is packed, and never quantized."""

    weight: ops.Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """float [..., in] -> [..., out]."""
        return ops.linear(x, self.weight, self.bias)


class ExpertLinear(NamedTuple):
    """The linear layers of E experts: weight [E, out, in], in some families bias [E, out].

    weight: stock a matrix for each expert, as the checkpoint has them; or all in one, stacked, packed or quantized.
    """

    weight: ops.ExpertWeights | tuple[ops.Weight, ...]
    bias: Tensor | None = None

    @property
    def matrices(self) -> tuple[ops.Weight, ...]:
        """The weight of each expert, in the layout that it has."""
        if isinstance(self.weight, ops.NativeExperts | ops.QuantizedExperts):
            return tuple(map(self.weight.expert, range(self.weight.shape[0])))
        return tuple(self.weight)

    @property
    def together(self) -> ops.ExpertWeights:
        """All of them as `ops.experts` takes them; stock matrices are stacked."""
        if isinstance(self.weight, Tensor | ops.NativeExperts | ops.QuantizedExperts):
            return self.weight
        return stack_experts(self.weight)

    def sum_of(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        gate: "ExpertLinear | None",
        up: "ExpertLinear",
        **activation: Any,
    ) -> Tensor:
        """`ops.experts` of x float [..., D] with these as the last of each expert's layers; `activation` as there."""
        return ops.experts(
            x, chosen, shares, None if gate is None else gate.together, up.together, self.together,
            gate_bias=None if gate is None else gate.bias, up_bias=up.bias, down_bias=self.bias, **activation,
        )  # fmt: skip


class ShortConv(NamedTuple):
    """A causal convolution of each of C channels with K weights of its own, in some families with bias [C].

    weight: [C, 1, K] as checkpoints have it, or packed, [K, C]. It is never quantized.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def by_tap(self) -> Tensor:
        """[K, C], as `ops.short_conv` takes it."""
        return self.weight.squeeze(1).T if self.weight.dim() == 3 else self.weight


Marked = Linear | Embedding | Router | ExpertLinear | ShortConv | LatentLinear


def is_marked(part: Any) -> bool:
    """Whether a part of some params is a mark with its weight."""
    return isinstance(part, Marked)


def map_marked(convert: Callable[[tuple[Any, ...], Any], Any], params: Any) -> Any:
    """The same params with each marked part replaced by convert(its path in the params, the part)."""
    return pytree.tree_map_with_path(
        lambda path, leaf: convert(path, leaf) if is_marked(leaf) else leaf, params, is_leaf=is_marked
    )


def marked_parts(params: Any) -> list[Any]:
    """All marked parts of some params, in order."""
    return [leaf for leaf in pytree.tree_leaves(params, is_leaf=is_marked) if is_marked(leaf)]
