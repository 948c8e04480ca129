"""Where a block finds its weights in a checkpoint: names below a prefix."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onward import ops
from onward.models.linear import Embedding, ExpertLinear, LatentLinear, Linear, Router, ShortConv


class Tensors(Protocol):
    """The weights of a checkpoint by their stock names; raises `CheckpointError` for one it cannot give.

    dtype: for one that does not follow the dtype of the model.
    """

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any: ...


class Scope(NamedTuple):
    """The weights whose names begin with a prefix. prefix: "" or one that ends with a dot."""

    tensors: Tensors
    prefix: str = ""

    def under(self, name: str | int) -> "Scope":
        """The weights below a module, such as "self_attn"; "" is this scope itself."""
        return self if name == "" else Scope(self.tensors, f"{self.prefix}{name}.")

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape, in floats."""
        weight = self.matrix(name, *shape)
        return weight.dequantize() if isinstance(weight, ops.QuantizedWeight) else weight

    def matrix(self, name: str, *shape: int) -> Any:
        """The same as the checkpoint gives it: in floats, or packed in few bits."""
        return self.tensors.take(self.prefix + name, shape)

    def take_float32(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name and shape in float32, whatever the dtype of the model."""
        tensor: Tensor = self.tensors.take(self.prefix + name, shape, torch.float32)
        return tensor

    def linear(self, name: str, out: int, into: int, bias: bool = False) -> Linear:
        """The linear layer `name`: weight [out, into], and bias [out] if it has one."""
        below = self.under(name)
        return Linear(below.matrix("weight", out, into), below.take("bias", out) if bias else None)

    def router(self, name: str, out: int, into: int, bias: bool = False) -> Router:
        """The router `name`: weight [out, into], and bias [out] if it has one."""
        below = self.under(name)
        return Router(below.take("weight", out, into), below.take("bias", out) if bias else None)

    def short_conv(self, name: str, channels: int, taps: int, bias: bool = False) -> ShortConv:
        """The convolution `name`: weight [channels, 1, taps], and bias [channels] if it has one."""
        below = self.under(name)
        return ShortConv(below.take("weight", channels, 1, taps), below.take("bias", channels) if bias else None)

    def experts(self, name: str, count: int, out: int, into: int, bias: bool = False) -> ExpertLinear:
        """The linear layers `0.name` … of `count` experts: a weight [out, into] each, and `name`.bias [count, out]."""
        weights = tuple(self.under(i).under(name).matrix("weight", out, into) for i in range(count))
        return ExpertLinear(weights, self.under(name).take("bias", count, out) if bias else None)

    def latent(self, name: str, num_heads: int, key_dim: int, value_dim: int, rank: int) -> LatentLinear:
        """The linear layer `name`, which makes keys and values of latents: weight [H (K + V), R]."""
        weight = self.under(name).take("weight", num_heads * (key_dim + value_dim), rank)
        return LatentLinear(weight, num_heads, key_dim, value_dim)

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        """The table `name`: weight [rows, width]."""
        return Embedding(self.under(name).matrix("weight", rows, width))
