"""A shard of a tensor-parallel model: some heads and columns of every layer.

A rank holds some rows of each matrix [N, K], which are whole outputs: queries, keys and values of its heads, its part
of the inner features, of the hidden ones, of the vocabulary. So each output is one sum over all K, on one rank, by the
kernel that computes it in one process, and its bits are those of one process, for any number of ranks. Where a matrix
needs all features the ranks gather them. (Megatron-LM, arXiv 1909.08053, cuts every second matrix by its inputs
instead: half as many exchanges, but sums that end in another order for each number of ranks.)
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import KVCache, PagedKVCache
from onward.distributed.gather import gather
from onward.distributed.stage import cuttable
from onward.errors import RequestError
from onward.models import Architecture, Embedding, Scope
from onward.models.blocks import Attention, Decoder, DecoderLayer, FeedForward, LayerParams, Positions
from onward.models.contract import take_positions
from onward.models.linear import Linear
from onward.models.scope import Tensors


class Ranks(NamedTuple):
    """rank: this one. world: how many. key: of their links (`gather`)."""

    rank: int
    world: int
    key: int

    def gathered(self, x: Tensor) -> Tensor:
        return gather(x, self.world, self.key)

    def around(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """A linear layer that takes each rank's features, and gives all of what the ranks have of its outputs."""
        return lambda x: self.gathered(linear(self.gathered(x)))


_ALONE = Ranks(0, 1, 0)


class ShardParams(NamedTuple):
    """embed_tokens: on rank 0 until hidden states take its place. lm_head: None where rank 0 has all of it."""

    embed_tokens: Embedding | None
    layers: tuple[LayerParams, ...]
    norm: Tensor
    lm_head: Linear | None


@dataclass(frozen=True)
class SplitAttention(Attention):
    """The attention of some heads. ranks: those that have the others."""

    ranks: Ranks = _ALONE

    def __call__(
        self, params: Any, x_BTD: Tensor, positions: Positions, cache: KVCache | PagedKVCache, index: int
    ) -> Tensor:
        params = params._replace(o_proj=self.ranks.around(params.o_proj))
        return super().__call__(params, x_BTD, positions, cache, index)


@dataclass(frozen=True)
class SplitFeedForward(FeedForward):
    """Some of the inner features. ranks: those that have the others."""

    ranks: Ranks = _ALONE

    def __call__(self, params: Any, x: Tensor) -> Tensor:
        return super().__call__(params._replace(down_proj=self.ranks.around(params.down_proj)), x)


@dataclass(frozen=True)
class Shard(Decoder):
    """A rank's part of a decoder. Hidden states of the embedding come in as rows of a table that are looked up.

    whole: the decoder of all ranks. ranks: which of them this is.
    """

    whole: Decoder | None = None
    ranks: Ranks = _ALONE

    @property
    def splits_head(self) -> bool:
        """Whether each rank has a part of the vocabulary; else rank 0 has all of it."""
        return self.vocab_size % self.ranks.world == 0

    @property
    def float_tensor(self) -> tuple[str, tuple[int, ...]]:
        assert self.whole is not None
        return self.whole.float_tensor

    def read(self, scope: Scope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer) -> Any:
        assert self.whole is not None
        names, leads = self.names, self.ranks.rank == 0
        embed_tokens = scope.embedding(names.embed_tokens, self.vocab_size, self.hidden_size) if leads else None
        below = Scope(_Rows(scope.tensors, self.ranks), scope.prefix).under(names.layers)
        layers = tuple(each_layer(layer.read(below.under(index))) for index, layer in enumerate(self.whole.layers))
        norm = self.norm.read(scope.under(names.norm))
        lm_head = None
        if self.splits_head or leads:
            tensors = _Rows(scope.tensors, self.ranks) if self.splits_head else scope.tensors
            head = names.embed_tokens if self.tie_word_embeddings else names.lm_head
            lm_head = Scope(tensors, scope.prefix).linear(head, self.vocab_size, self.hidden_size)
        return ShardParams(embed_tokens, layers, norm, lm_head)

    def embed(self, tokens: Tensor, offsets: Tensor, cache: Any, params: ShardParams) -> tuple[Tensor, Any]:
        """What rank 0 sends to all: float [B, T, D]."""
        return self.embedded(tokens, offsets, params)[0], cache  # type: ignore[arg-type]  # it has the embedding

    def body(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: ShardParams, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The forward from the hidden states on. tokens: rows of their table. Where the head is rank 0's alone, the
        others return the hidden states."""
        positions = Positions(tokens, offsets, self.max_seq_len or self.max_position_embeddings)
        assert params.embed_tokens is not None, "a follower's hidden states come before its forward"
        x_BTD = params.embed_tokens(tokens)
        for layer, layer_params, index in zip(self.layers, params.layers, self.places(), strict=True):
            x_BTD = layer(layer_params, x_BTD, positions, cache, index)
        if logits_at is not None:
            x_BTD = take_positions(x_BTD, logits_at)
        normed = self.norm(params.norm, x_BTD)
        if params.lm_head is None:
            return normed, cache
        head = params.lm_head
        return self.logits(_Head(self._gathered_head(head) if self.splits_head else head), normed), cache  # type: ignore[arg-type]  # it has the head

    def _gathered_head(self, head: Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: self.ranks.gathered(head(x))


class _Head(NamedTuple):
    """What `Decoder.logits` needs of the params."""

    lm_head: Callable[[Tensor], Tensor]


class _Rows(NamedTuple):
    """Gives a rank its rows of matrices, biases and scores of heads, and norms whole."""

    tensors: Tensors
    ranks: Ranks

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        tensor = self.tensors.take(name, shape, dtype)
        if len(shape) == 1 and not name.endswith((".bias", ".sinks")):
            return tensor
        rows = len(tensor) // self.ranks.world
        return tensor[self.ranks.rank * rows :][:rows]


def shard_of(architecture: Architecture, ranks: Ranks) -> Shard:
    """The part of a rank.

    Raises:
        RequestError: a family that cannot be cut within its layers, or heads or columns that do not divide.
    """
    decoder = cuttable(architecture, "tensor")
    layers = tuple(_split_layer(layer, ranks) for layer in decoder.layers)
    head_is_here = decoder.vocab_size % ranks.world == 0
    ends = decoder.names
    unread = []
    if ranks.rank > 0:
        tied = decoder.tie_word_embeddings
        unread = [] if tied and head_is_here else [f"{ends.embed_tokens}."]
        unread += [] if head_is_here and not tied else [f"{ends.lm_head}."]
    given = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    given |= {"layers": layers, "unread": (*decoder.unread, *unread)}
    return Shard(**given, whole=decoder, ranks=ranks)


def _split_layer(layer: DecoderLayer, ranks: Ranks) -> DecoderLayer:
    mixer, block, world = layer.mixer, layer.feed_forward, ranks.world
    if type(mixer) is not Attention or type(block) is not FeedForward or layer.layer_input is not None:
        parts = f"{type(mixer).__name__} and {type(block).__name__}"
        raise RequestError(f"tensor= cannot cut layers of {parts} yet, but pipeline= may: it cuts between layers")
    if mixer.fused or block.fused:
        raise RequestError("tensor= cannot cut matrices that hold several projections (Phi-3, GLM) yet: try pipeline=")
    norms = [norm for norm in (mixer.q_norm, mixer.k_norm) if norm is not None]
    if any(norm.width != mixer.head_dim for norm in norms):
        raise RequestError("tensor= cannot cut heads that are normalised together (OLMo 2 and 3): try pipeline=")
    sizes = {
        "attention heads": mixer.num_heads,
        "key/value heads": mixer.num_kv_heads,
        "hidden features": mixer.hidden_size,
        "inner features": block.intermediate_size,
    }
    for name, size in sizes.items():
        if size % world:
            raise RequestError(
                f"tensor={world} must divide the model's {size} {name}: give another number, or pipeline="
            )
    heads = {"num_heads": mixer.num_heads // world, "num_kv_heads": mixer.num_kv_heads // world, "ranks": ranks}
    split_mixer = SplitAttention(**_fields(mixer) | heads)
    inner = {"intermediate_size": block.intermediate_size // world, "ranks": ranks}
    return replace(layer, mixer=split_mixer, feed_forward=SplitFeedForward(**_fields(block) | inner))


def _fields(block: Any) -> dict[str, Any]:
    return {field.name: getattr(block, field.name) for field in fields(block)}
