"""The matrix from latents to keys and values, which attention over latents reads from both of its sides."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.ops.expert_weights import NativeExperts, pack_experts


class LatentWeight(NamedTuple):
    """The weight of a `LatentLinear` taken apart. keys: [H, R, K], which takes a head's query to the latent; values:
    [H, V, R], which takes a mixture of latents to a head's output. As `ops.linear_by_head` takes them."""

    keys: Tensor | NativeExperts
    values: Tensor | NativeExperts


@dataclass(frozen=True, eq=False)
class LatentLinear:
    """The linear layer that would make the keys and values of all heads from latents of R features: weight
    [H (K + V), R], of each head first the keys' rows. It is packed, and never quantized. A pytree of its weight.

    weight: stock as the checkpoint has it, or packed in two.
    """

    weight: Tensor | LatentWeight
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def parts(self) -> LatentWeight:
        """The weight taken apart; a stock one is seen through views."""
        if isinstance(self.weight, LatentWeight):
            return self.weight
        by_head = self.weight.view(self.num_heads, self.key_dim + self.value_dim, -1)
        return LatentWeight(by_head[:, : self.key_dim].transpose(1, 2), by_head[:, self.key_dim :])

    @property
    def stock(self) -> Tensor:
        """The weight as a checkpoint has it."""
        if isinstance(self.weight, Tensor):
            return self.weight
        keys, values = (part if isinstance(part, Tensor) else part.unpack() for part in self.weight)
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

    def packed(self) -> "LatentLinear":
        """The same with its parts in the layout that this machine's `ops.linear_by_head` reads."""
        if isinstance(self.weight, LatentWeight):
            return self
        keys, values = (pack_experts(part.contiguous()) for part in self.parts if isinstance(part, Tensor))
        if not isinstance(keys, NativeExperts) or not isinstance(values, NativeExperts):
            return self  # no kernels: the stock weight serves
        return replace(self, weight=LatentWeight(keys, values))


pytree.register_pytree_node(
    LatentLinear,
    lambda part: ([part.weight], (part.num_heads, part.key_dim, part.value_dim)),
    lambda leaves, sizes: LatentLinear(*leaves, *sizes),
    flatten_with_keys_fn=lambda part: (
        [(pytree.GetAttrKey("weight"), part.weight)],
        (part.num_heads, part.key_dim, part.value_dim),
    ),
)
