"""A decoder: embedding, layers, final norm and head. Most families use it as their forward.

Shapes: B rows, T new tokens, D hidden_size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from onward import ops
from onward.cache import LayerShape, StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.attention import Attention
from onward.models.blocks.feed_forward import PerLayerEmbeddings, PerLayerEmbeddingsParams
from onward.models.blocks.layer import AttentionAndState, Cached, DecoderLayer, LayerCache, LayerParams, Positions
from onward.models.blocks.norm import RMSNorm, rounded
from onward.models.contract import NORM, take_positions
from onward.models.linear import Embedding, Linear
from onward.models.rope import RotarySchedule
from onward.ops.tap import is_asked, tap

# A cached tap is stored in parts of at most this many features, each with its own scale in a format that has scales.
_TAP_HEAD = 128


class DecoderParams(NamedTuple):
    """All weights. A tied head shares the embedding's weight."""

    embed_tokens: Embedding
    layers: tuple[LayerParams, ...]
    norm: Tensor
    lm_head: Linear
    layer_embeddings: PerLayerEmbeddingsParams | None = None


@dataclass(frozen=True)
class DecoderNames:
    """The names of a decoder's parts in a checkpoint."""

    embed_tokens: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer_embeddings: str = "model"


@dataclass(frozen=True)
class MtpNames:
    """The names of a multi-token prediction (MTP) layer's parts in a checkpoint. layer: of the decoder layer within it;
    "" if its parts are beside the others."""

    root: str
    embedding_norm: str = "pre_fc_norm_embedding"
    hidden_norm: str = "pre_fc_norm_hidden"
    projection: str = "fc"
    layer: str = "layers.0"
    norm: str = "norm"


@dataclass(frozen=True)
class Decoder:
    """The configuration of a decoder, and its forward.

    max_position_embeddings: the trained context. max_seq_len: the maximum number of positions; by default the trained
    context. embedding_multiplier, logits_multiplier: factors of the embedded tokens and of the logits.
    rounds_multiplier: the embedding's factor is first rounded to its dtype. logits_softcap: c in c * tanh(logits / c).
    layer_embeddings: a second input of each layer. unread: prefixes of tensor names in the checkpoint that belong to
    other models, such as a vision tower. cached_taps: taps whose values the cache stores for every position, in layers
    after those of attention: names of layers, or "norm". mtp: the names of the MTP layer that checkpoints of the
    family may have.
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
    cached_taps: tuple[str, ...] = ()
    mtp: MtpNames | None = None

    @cached_property
    def cached(self) -> tuple[LayerShape, ...]:
        """The cache shape of each attention layer, then of each cached tap."""
        heads = math.gcd(self.hidden_size, _TAP_HEAD)
        return (*self._attention_shapes, *[LayerShape(self.hidden_size // heads, heads, 0)] * len(self.cached_taps))

    @cached_property
    def tap_layers(self) -> dict[str, int]:
        """The cache index of each cached tap."""
        return {name: len(self._attention_shapes) + number for number, name in enumerate(self.cached_taps)}

    @cached_property
    def _attention_shapes(self) -> tuple[LayerShape, ...]:
        shapes = tuple(shape for layer in self.layers if (shape := _parts(layer.cached)[0]) is not None)
        for mixer in self.sharing:
            source = shapes[mixer.kv_source_layer or 0]
            assert mixer.window == source.window, "a layer has the window of the layer it shares keys with"
        return shapes

    @property
    def sharing(self) -> list[Attention]:
        """The attention of layers that share the keys and values of another."""
        attention = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        return [each for each in attention if each.kv_source_layer is not None]

    @cached_property
    def states(self) -> tuple[StateShape, ...]:
        """The state shape of each recurrent layer."""
        return tuple(shape for layer in self.layers if (shape := _parts(layer.cached)[1]) is not None)

    @property
    def schedules(self) -> tuple[RotarySchedule, ...]:
        """The distinct RoPE schedules of the layers, in order."""
        ropes = (layer.mixer.rope for layer in self.layers if layer.mixer is not None)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def serves_longer_texts(self) -> bool:
        """Whether a schedule extends the context past the trained one."""
        return any(schedule.serves_past(self.max_position_embeddings) for schedule in self.schedules)

    def serving(self, max_seq_len: int) -> "Decoder":
        """The same decoder for up to `max_seq_len` positions."""
        return replace(self, max_seq_len=max_seq_len)

    @property
    def float_tensor(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of a tensor that is never quantized: its dtype is the model's."""
        return f"{self.names.norm}.weight", (self.hidden_size,)

    def read(
        self, scope: WeightScope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer
    ) -> DecoderParams:
        """Read all weights from a checkpoint. each_layer: converts each layer (packs it, say) before the next."""
        embed_tokens = scope.embedding(self.names.embed_tokens, self.vocab_size, self.hidden_size)
        below = scope.under(self.names.layers)
        layers = tuple(each_layer(layer.read(below.under(index))) for index, layer in enumerate(self.layers))
        norm = self.norm.read(scope.under(self.names.norm))
        if self.tie_word_embeddings:
            lm_head = Linear(embed_tokens.weight)
        else:
            lm_head = scope.linear(self.names.lm_head, self.vocab_size, self.hidden_size)
        tables = self.layer_embeddings
        embeddings = None if tables is None else tables.read(scope.under(self.names.layer_embeddings))
        return DecoderParams(embed_tokens, layers, norm, lm_head, embeddings)

    def __call__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        cache: LayerCache,
        params: DecoderParams,
        *,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache]:
        """The forward of `onward.models.model`."""
        return self.logits(params, self.head_input(tokens, offsets, cache, params, logits_at)), cache

    def head_input(
        self, tokens: Tensor, offsets: Tensor, cache: LayerCache, params: DecoderParams, at: Tensor | None = None
    ) -> Tensor:
        """The head's input, float [B, T, D]; [R, N, D] at `at` int64 [R, N], as `logits_at`."""
        x_BTD, positions, embeddings = self.embedded(tokens, offsets, params)
        each = zip(self.layers, params.layers, self.places(), embeddings, strict=True)
        for number, (layer, layer_params, index, own) in enumerate(each):
            name = f"layers.{number}"
            x_BTD = tap(layer(layer_params, x_BTD, positions, cache, index, own), name)
            if name in self.tap_layers:
                cache.store(self.tap_layers[name], x_BTD, offsets)
        if NORM not in self.tap_layers:
            return self.normed(params, x_BTD, at)
        normed = self.normed(params, x_BTD, None)
        cache.store(self.tap_layers[NORM], normed, offsets)
        return normed if at is None else take_positions(normed, at)

    def normed(self, params: DecoderParams, x_BTD: Tensor, logits_at: Tensor | None) -> Tensor:
        """The final norm, float [B, T, D], or [R, N, D] at `logits_at`."""
        if logits_at is not None and not is_asked(NORM):
            x_BTD, logits_at = take_positions(x_BTD, logits_at), None
        normed = tap(self.norm(params.norm, x_BTD), NORM)
        return normed if logits_at is None else take_positions(normed, logits_at)

    def embedded(
        self, tokens: Tensor, offsets: Tensor, params: DecoderParams
    ) -> tuple[Tensor, Positions, Sequence[Tensor | None]]:
        """The first layer's input, float [B, T, D]; the positions; and each layer's own embedding, or None."""
        positions = Positions(tokens, offsets, self.max_seq_len or self.max_position_embeddings)
        x_BTD = params.embed_tokens(tokens)
        if self.embedding_multiplier != 1.0:
            factor = self.embedding_multiplier
            x_BTD = x_BTD * (rounded(factor, x_BTD.dtype) if self.rounds_multiplier else factor)
        x_BTD = tap(x_BTD, "embedding")
        if self.layer_embeddings is None or params.layer_embeddings is None:
            return x_BTD, positions, [None] * len(self.layers)
        return x_BTD, positions, self.layer_embeddings(params.layer_embeddings, tokens, x_BTD).unbind(2)

    def logits(self, params: DecoderParams, normed: Tensor) -> Tensor:
        """float [..., D] after the final norm -> [..., V]."""
        return self.scaled(params.lm_head(normed))

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits, from the products of the head."""
        if self.logits_multiplier != 1.0:
            logits = logits * self.logits_multiplier
        if self.logits_softcap is not None:
            logits = ops.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits

    def places(self) -> Iterator[int | tuple[int, int]]:
        """The cache index of each layer among the attention layers, among the recurrent ones, or both. A layer that
        caches nothing has the index of the layer before it."""
        place = state = -1
        for layer in self.layers:
            attends, is_recurrent = (part is not None for part in _parts(layer.cached))
            place, state = place + attends, state + is_recurrent
            if attends and is_recurrent:
                yield place, state
            else:
                yield state if is_recurrent else place


def _parts(cached: Cached | None) -> tuple[LayerShape | None, StateShape | None]:
    if isinstance(cached, AttentionAndState):
        return cached
    return cached if isinstance(cached, LayerShape) else None, cached if isinstance(cached, StateShape) else None
