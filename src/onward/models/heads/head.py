"""A draft head: one decoder layer that predicts the next token from features of the target and the token after them.

At position p a head gets the target's features of position p and the embedding of the token at p + 1, and predicts the
token at p + 2. Where the target has not been, the head's own output takes the place of the features.

Shapes: B rows, T tokens, D hidden_size, W features of a position.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onward.cache import CachePlan, KVCache, KVPool, LayerShape, PagedKVCache
from onward.models.architecture import WeightScope, architecture_of
from onward.models.blocks import Decoder, LayerParams, Positions
from onward.models.contract import take_positions
from onward.models.linear import Embedding, Linear
from onward.models.model import Model
from onward.ops.tap import tap

# The name of a tensor of a checkpoint -> the tensor as it is stored; None if there is none
Find = Callable[[str], Tensor | None]
# The most tokens of a row in one forward.
MAX_TOKENS = 512


class HeadCache(NamedTuple):
    """The cache of a head: keys and values of its layer, and the features float [B, S, W] of the tokens of this
    forward, of which it reads the first T; S is T or more."""

    kv: KVCache | PagedKVCache
    features: Tensor

    @property
    def leaf_dims(self) -> Sequence[tuple[str, ...]]:
        """The names of each tensor's dimensions (`onward.program.NamedDims`)."""
        assert isinstance(self.kv, PagedKVCache), "a head that drafts has a paged cache"
        return [*self.kv.leaf_dims, ("rows", "tokens", "features")]

    def blank(self) -> "HeadCache":
        """An empty cache of the same size with its own memory."""
        assert isinstance(self.kv, PagedKVCache), "a head that drafts has a paged cache"
        return HeadCache(self.kv.blank(), torch.zeros_like(self.features))


class HeadParams(NamedTuple):
    """The weights of a head. embedding_norm, hidden_norm: of the two inputs. projection: to D features. ids: int64
    [draft vocabulary], the target's id of each of the head's; None if they are the same. lm_head: None if it is the
    target's. embed_tokens: the target's, in the params of `head_model`."""

    layer: LayerParams
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Linear
    norm: Tensor
    lm_head: Linear | None = None
    ids: Tensor | None = None
    embed_tokens: Embedding | None = None


@dataclass(frozen=True)
class DraftHead(ABC):
    """A kind of head and its sizes.

    target: the model that it drafts for. taps: the target's taps whose values are its features, side by side.
    has_own_folder: whether its checkpoint is its own, and not its target's.
    """

    target: Decoder
    taps: tuple[str, ...]
    has_own_folder: ClassVar[bool] = True

    @property
    @abstractmethod
    def cached(self) -> LayerShape:
        """The cache shape of its layer."""

    @abstractmethod
    def read(self, scope: WeightScope, find: Find) -> HeadParams:
        """Read the weights from a checkpoint. find: for what only some checkpoints have.

        Raises:
            CheckpointError: a tensor is missing, or has another shape.
        """

    @abstractmethod
    def hidden(
        self, params: HeadParams, embedded: Tensor, features: Tensor, positions: Positions, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """What the head passes on as the features of the next position, and the input of its lm_head, float [B, T, D].

        embedded: the tokens, float [B, T, D]. features: float [B, T, W], or [B, T, D] of the head itself.
        """

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits, from the products of the lm_head."""
        return logits

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: HeadCache, params: HeadParams, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, HeadCache]:
        """The forward of `onward.models.model`; its logits are of the head's own ids. The tap "features" has what it
        passes on."""
        assert params.embed_tokens is not None, "params of `head_model`"
        assert params.lm_head is not None, "params of `head_model`"
        positions = Positions(tokens, offsets, self.target.max_seq_len or self.target.max_position_embeddings)
        features = cache.features[:, : tokens.shape[1]]
        passed_on, x_BTD = self.hidden(params, params.embed_tokens(tokens), features, positions, cache.kv)
        tap(passed_on, "features")
        x_BTD = x_BTD if logits_at is None else take_positions(x_BTD, logits_at)
        return self.scaled(params.lm_head(x_BTD)), cache


def head_model(head: DraftHead, params: HeadParams, target: Model) -> Model:
    """A head as a `Model`, with the embedding of its target, and its lm_head if it has none of its own. Its logits are
    of its own ids."""
    decoder = architecture_of(target)
    assert isinstance(decoder, Decoder), "a head is of a decoder"
    head = replace(head, target=decoder)
    own = target.params.lm_head if params.lm_head is None else params.lm_head
    plan = CachePlan((head.cached,), params.norm.dtype, target.device).up_to(target.max_seq_len)

    def new_cache(batch: int, max_len: int) -> HeadCache:
        width = head.target.hidden_size * len(head.taps)
        features = torch.zeros(batch, MAX_TOKENS, width, dtype=params.norm.dtype, device=target.device)
        return HeadCache(KVCache.of(plan, batch, max_len), features)

    return Model(
        forward=partial(head),
        params=params._replace(lm_head=own, embed_tokens=target.params.embed_tokens),
        new_cache=new_cache,
        vocab_size=target.vocab_size if params.ids is None else len(params.ids),
        max_seq_len=target.max_seq_len,
        device=target.device,
        new_blocks=partial(KVPool, plan),
        weights_lock=target.weights_lock,
    )
