"""A cache for forwards over whole texts, which keeps nothing between calls: for training, with gradients."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from onward import ops
from onward.cache.dense import AttentionOptions
from onward.cache.plan import RecurrentState
from onward.errors import RequestError


class WholeTexts:
    """The cache of one forward over whole texts, from their first id on. A token gets the bits that it gets with a KV
    cache, and autograd follows keys and values.

    lengths: None for texts as rows, padded at the end: tokens [B, T] with offsets of 0. Otherwise the number of ids of
        each text, for texts one after the other without padding: tokens [N, 1], where each id is a row of its own, and
        offsets [N] with the position of each id in its text.
    """

    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        self._lengths = None if lengths is None else list(lengths)
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}  # for layers that share them

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """Attend with q [B, H, T, D] to k and v [B, G, T, D] of the same tokens; arguments as in `KVCache.attend`."""
        value_dim = options.get("value_dim")
        rest: dict[str, Any] = {name: option for name, option in options.items() if name != "value_dim"}
        if k is not None:
            self._stored[layer] = k, k[..., :value_dim] if v is None else v
        keys, values = self._stored[layer]
        if self._lengths is None:
            return ops.scaled_dot_product_attention(q, keys, values, causal=True, **rest)
        texts = zip(*(self._texts(x) for x in (q, keys, values)), strict=True)
        mixed = [ops.scaled_dot_product_attention(*text, causal=True, **rest) for text in texts]
        return torch.cat([text.squeeze(0).transpose(0, 1) for text in mixed]).unsqueeze(2)

    def store(self, layer: int, x: Tensor, offsets: Tensor) -> None:
        """Nothing: no later forward reads the values of a tap."""

    def _texts(self, x: Tensor) -> list[Tensor]:
        """[N, H, 1, D] -> [1, H, T, D] of each text."""
        assert self._lengths is not None, "each id is a row"
        # A split has one backward for all texts; a slice of each would fill as many tensors with zeros.
        return [text.squeeze(2).transpose(0, 1).unsqueeze(0) for text in torch.split(x, self._lengths)]

    def state(self, layer: int) -> RecurrentState:
        raise RequestError(
            "a model with recurrent layers has no forward over whole texts: its recurrence overwrites its state token "
            "by token, so it has no gradient"
        )
