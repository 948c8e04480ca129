"""A decoder: embedding, layers, a last norm and the head. This is the forward of most families, as a pure function.

Shapes: B rows, T new tokens, D hidden_size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from onward.cache import KVCache, LayerShape, PagedKVCache, StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.layer import AttentionAndState, Cached, DecoderLayer, LayerParams
from onward.models.blocks.norm import RMSNorm, rounded
from onward.models.blocks.per_layer_embeddings import PerLayerEmbeddings, PerLayerEmbeddingsParams
from onward.models.blocks.positions import Positions
from onward.models.contract import take_positions
from onward.models.linear import Embedding, Linear
from onward.models.rope import RotarySchedule


class DecoderParams(NamedTuple):
    """All weights. A tied head is the embedding itself: one weight under two names."""

    embed_tokens: Embedding
    layers: tuple[LayerParams, ...]
    norm: Tensor
    lm_head: Linear
    layer_embeddings: PerLayerEmbeddingsParams | None = None


@dataclass(frozen=True)
class DecoderNames:
    """What a checkpoint calls the parts of a decoder."""

    embed_tokens: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer_embeddings: str = "model"


@dataclass(frozen=True)
class Decoder:
    """The numbers of a decoder, and its forward.

    max_position_embeddings: the context that it was trained for. max_seq_len: the most positions that it serves; by
    default that context. embedding_multiplier, logits_multiplier: factors of the embedded tokens and of the logits.
    rounds_multiplier: whether that of the embedding is rounded to its dtype first. logits_softcap: c in c * tanh(logits
    / c); None for none. layer_embeddings: what layers are given beside the stream. unread: what the names of tensors
    begin with that a checkpoint has beside the model, of a vision tower, say.
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    max_seq_len: int | None = None
    names: DecoderNames = DecoderNames()
    unread: tuple[str, ...] = ()
    layer_embeddings: PerLayerEmbeddings | None = None

    @cached_property
    def cached(self) -> tuple[LayerShape, ...]:
        """What a cache keeps of a token, for each of its layers."""
        shapes = tuple(shape for layer in self.layers if (shape := _attention_part(layer.cached)) is not None)
        for mixer in (layer.mixer for layer in self.layers):
            if mixer is not None and (reads := mixer.kv_source_layer) is not None:
                assert mixer.window == shapes[reads].window, "a layer sees as far as the one whose keys it reads"
        return shapes

    @cached_property
    def states(self) -> tuple[StateShape, ...]:
        """What a cache keeps of a text, for each of its recurrent layers."""
        return tuple(shape for layer in self.layers if (shape := _state_part(layer.cached)) is not None)

    @property
    def schedules(self) -> tuple[RotarySchedule, ...]:
        """The RoPE schedules of its layers, each once, in order."""
        ropes = (layer.mixer.rope for layer in self.layers if layer.mixer is not None)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def serves_longer_texts(self) -> bool:
        """Whether a schedule is made for lengths past the trained one."""
        return any(schedule.serves_past(self.max_position_embeddings) for schedule in self.schedules)

    def serving(self, max_seq_len: int) -> "Decoder":
        """The same for texts of up to `max_seq_len` positions."""
        return replace(self, max_seq_len=max_seq_len)

    @property
    def float_tensor(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of a tensor that quantization leaves in floats: its dtype is the model's."""
        return f"{self.names.norm}.weight", (self.hidden_size,)

    def read(
        self, scope: WeightScope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer
    ) -> DecoderParams:
        """Take every weight from a checkpoint. each_layer: converts each layer (packs it, say) before the next."""
        embed_tokens = scope.embedding(self.names.embed_tokens, self.vocab_size, self.hidden_size)
        below = scope.under(self.names.layers)
        layers = tuple(each_layer(layer.read(below.under(index))) for index, layer in enumerate(self.layers))
        norm = self.norm.read(scope.under(self.names.norm))
        if self.tie_word_embeddings:
            lm_head = Linear(embed_tokens.weight)
        else:
            lm_head = scope.linear(self.names.lm_head, self.vocab_size, self.hidden_size)
        tables = self.layer_embeddings
        given = None if tables is None else tables.read(scope.under(self.names.layer_embeddings))
        return DecoderParams(embed_tokens, layers, norm, lm_head, given)

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: KVCache | PagedKVCache,
        params: DecoderParams,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | PagedKVCache]:
        """The forward of `onward.models.model`."""
        x_BTD, positions, given = self.embedded(tokens, offsets, params)
        for layer, layer_params, index, own in zip(self.layers, params.layers, self.places(), given, strict=True):
            x_BTD = layer(layer_params, x_BTD, positions, cache, index, own)
        if logits_at is not None:
            x_BTD = take_positions(x_BTD, logits_at)
        return self.logits(params, self.norm(params.norm, x_BTD)), cache

    def embedded(
        self, tokens: Tensor, offsets: Tensor, params: DecoderParams
    ) -> tuple[Tensor, Positions, Sequence[Tensor | None]]:
        """What the first layer gets, float [B, T, D]; where the tokens stand; and what each layer is given beside."""
        positions = Positions(tokens, offsets, self.max_seq_len or self.max_position_embeddings)
        x_BTD = params.embed_tokens(tokens)
        if self.embedding_multiplier != 1.0:
            x_BTD = x_BTD * self._multiplier(x_BTD.dtype)
        if self.layer_embeddings is None or params.layer_embeddings is None:
            return x_BTD, positions, [None] * len(self.layers)
        return x_BTD, positions, self.layer_embeddings(params.layer_embeddings, tokens, x_BTD).unbind(2)

    def logits(self, params: DecoderParams, normed: Tensor) -> Tensor:
        """The head: float [..., D] after the last norm -> [..., V]."""
        logits = params.lm_head(normed)
        if self.logits_multiplier != 1.0:
            logits = logits * self.logits_multiplier
        if self.logits_softcap is not None:
            logits = torch.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits

    def _multiplier(self, dtype: torch.dtype) -> float:
        return rounded(self.embedding_multiplier, dtype) if self.rounds_multiplier else self.embedding_multiplier

    def places(self) -> Iterator[int | tuple[int, int]]:
        """The place of each layer in the cache, among those that keep keys and values or among the recurrent ones, or
        both: a layer that keeps nothing reads that of the layer before it."""
        place = state = -1
        for layer in self.layers:
            attends, is_recurrent = (part(layer.cached) is not None for part in (_attention_part, _state_part))
            place, state = place + attends, state + is_recurrent
            if attends and is_recurrent:
                yield place, state
            else:
                yield state if is_recurrent else place


def _attention_part(cached: Cached | None) -> LayerShape | None:
    if isinstance(cached, AttentionAndState):
        return cached.attention
    return cached if isinstance(cached, LayerShape) else None


def _state_part(cached: Cached | None) -> StateShape | None:
    if isinstance(cached, AttentionAndState):
        return cached.state
    return cached if isinstance(cached, StateShape) else None
