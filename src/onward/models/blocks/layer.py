"""A decoder layer: a token mixer and a feed-forward block with residual connections and norms."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onward import ops
from onward.cache import KVCache, LayerShape, PagedKVCache, StateShape, WholeTexts
from onward.models.architecture import WeightScope
from onward.models.blocks.feed_forward import PerLayerInput, PerLayerInputParams
from onward.models.blocks.norm import RMSNorm, multiplied, read_norm
from onward.models.rope import RotarySchedule


@dataclass(frozen=True)
class AttentionTemperature:
    """A factor of queries by position: 1 + beta * ln(1 + floor(position / length)). It comes from Llama 4 and keeps
    attention sharp in long texts (`llama_4_scaling_beta` in config.json)."""

    beta: float
    length: int


class Positions:
    """The positions of one forward pass, and the RoPE angles, computed once per schedule. offsets: int32 [B], of each
    row's first token. every: int32 [B, T], of every token. context: the model's max_seq_len."""

    def __init__(self, tokens: Tensor, offsets: Tensor, context: int) -> None:
        self.offsets = offsets
        self.context = context
        self.every = offsets.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        self._angles: dict[RotarySchedule, tuple[Tensor, Tensor]] = {}
        self._factors: dict[AttentionTemperature, Tensor] = {}

    def angles(self, schedule: RotarySchedule) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops.rotate` takes them, float32 [B, T, 2R]."""
        if schedule not in self._angles:
            self._angles[schedule] = schedule.angles(self.every, self.context)
        return self._angles[schedule]

    def scaled_by_position(self, q_BHTE: Tensor, growth: AttentionTemperature) -> Tensor:
        """Queries float [B, H, T, E], each multiplied by the factor of its position."""
        if growth not in self._factors:
            lengths = (self.every // growth.length).to(torch.float32)
            self._factors[growth] = (1.0 + growth.beta * ops.log(1.0 + lengths)).unsqueeze(1).unsqueeze(-1)
        return q_BHTE * self._factors[growth].to(q_BHTE.dtype)


class AttentionAndState(NamedTuple):
    """The cache of a mixer with both attention and a recurrent state."""

    attention: LayerShape
    state: StateShape


Cached = LayerShape | StateShape | AttentionAndState
LayerCache = KVCache | PagedKVCache | WholeTexts


class Mixer(Protocol):
    """A block that mixes tokens, such as attention.

    cached: what the cache stores for the layer; None: nothing. rope: its RoPE schedule, if any.

    Called with its params, x float [B, T, D], the tokens' positions, the cache and the layer's index in it: among the
    attention layers, among the recurrent layers, or a pair of both.
    """

    @property
    def cached(self) -> Cached | None: ...

    @property
    def rope(self) -> RotarySchedule | None: ...

    def read(self, scope: WeightScope) -> Any: ...

    def __call__(self, params: Any, x_BTD: Tensor, positions: Positions, cache: LayerCache, index: Any) -> Tensor: ...


class TokenBlock(Protocol):
    """A block that processes each token separately: float [..., D] -> [..., D]."""

    def read(self, scope: WeightScope) -> Any: ...

    def __call__(self, params: Any, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer's parts in a checkpoint; those of absent norms are unused. Llama's post_attention_layernorm
    follows the residual sum, so it is the norm before the MLP."""

    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mixer_post_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"
    feed_forward_post_norm: str = ""


class LayerParams(NamedTuple):
    """The weights of a layer, each as its block reads them; None for absent norms."""

    mixer_norm: Tensor | None
    mixer: Any
    mixer_post_norm: Tensor | None
    feed_forward_norm: Tensor | None
    feed_forward: Any
    feed_forward_post_norm: Tensor | None
    layer_input: PerLayerInputParams | None = None
    scalar: Tensor | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """x + m * post_norm(mixer(norm(x))), then the same with the feed-forward block; m is `residual_multiplier`.

    mixer, feed_forward: one of them may be None. layer_input: adds the layer's own embedding of the tokens. scaled:
    a learned scalar multiplies the output.
    """

    mixer: Mixer | None
    feed_forward: TokenBlock | None
    mixer_norm: RMSNorm | None = None
    mixer_post_norm: RMSNorm | None = None
    feed_forward_norm: RMSNorm | None = None
    feed_forward_post_norm: RMSNorm | None = None
    residual_multiplier: float = 1.0
    names: LayerNames = LayerNames()
    layer_input: PerLayerInput | None = None
    scaled: bool = False

    @property
    def cached(self) -> Cached | None:
        return None if self.mixer is None else self.mixer.cached

    def read(self, scope: WeightScope) -> LayerParams:
        names, block = self.names, self.feed_forward
        return LayerParams(
            mixer_norm=read_norm(self.mixer_norm, scope.under(names.mixer_norm)),
            mixer=None if self.mixer is None else self.mixer.read(scope.under(names.mixer)),
            mixer_post_norm=read_norm(self.mixer_post_norm, scope.under(names.mixer_post_norm)),
            feed_forward_norm=read_norm(self.feed_forward_norm, scope.under(names.feed_forward_norm)),
            feed_forward=None if block is None else block.read(scope.under(names.feed_forward)),
            feed_forward_post_norm=read_norm(self.feed_forward_post_norm, scope.under(names.feed_forward_post_norm)),
            layer_input=None if self.layer_input is None else self.layer_input.read(scope),
            scalar=scope.take("layer_scalar", 1) if self.scaled else None,
        )

    def __call__(
        self,
        params: LayerParams,
        x_BTD: Tensor,
        positions: Positions,
        cache: LayerCache,
        index: Any,
        layer_embedding_BTP: Tensor | None = None,
    ) -> Tensor:
        if self.mixer is not None:
            normed = _normed(self.mixer_norm, params.mixer_norm, x_BTD)
            mixed = self.mixer(params.mixer, normed, positions, cache, index)
            x_BTD = self._added(x_BTD, _normed(self.mixer_post_norm, params.mixer_post_norm, mixed))
        if self.feed_forward is not None:
            normed = _normed(self.feed_forward_norm, params.feed_forward_norm, x_BTD)
            fed = self.feed_forward(params.feed_forward, normed)
            x_BTD = self._added(x_BTD, _normed(self.feed_forward_post_norm, params.feed_forward_post_norm, fed))
        if self.layer_input is not None and params.layer_input is not None and layer_embedding_BTP is not None:
            x_BTD = self.layer_input(params.layer_input, x_BTD, layer_embedding_BTP)
        return x_BTD if params.scalar is None else x_BTD * params.scalar

    def _added(self, x_BTD: Tensor, branch: Tensor) -> Tensor:
        return ops.add(x_BTD, multiplied(branch, self.residual_multiplier))


def _normed(norm: RMSNorm | None, weight: Tensor | None, x: Tensor) -> Tensor:
    return x if norm is None or weight is None else norm(weight, x)
