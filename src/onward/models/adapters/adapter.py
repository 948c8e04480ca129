"""An adapter: low-rank updates of weights, by their module names in the checkpoint.

Shapes: R rank, K inputs, N outputs of a linear layer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


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
