"""A decoder's layer: a mixer of tokens and a feed-forward block, each added to the stream, with norms around them."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from onward import ops
from onward.cache import KVCache, LayerShape, PagedKVCache, StateShape
from onward.models.architecture import WeightScope
from onward.models.blocks.norm import RMSNorm, multiplied
from onward.models.blocks.per_layer_embeddings import PerLayerInput, PerLayerInputParams
from onward.models.blocks.positions import Positions
from onward.models.rope import RotarySchedule


class AttentionAndState(NamedTuple):
    """What a mixer keeps that attends and is recurrent too: of a token, and of a text."""

    attention: LayerShape
    state: StateShape


Cached = LayerShape | StateShape | AttentionAndState


class Mixer(Protocol):
    """A block that mixes what tokens know: attention, say.

    cached: what it keeps of a token, or a recurrent one of a text, or both; None: nothing of its own. rope: how it
    turns queries and keys; None: not at all. reads: whose keys it reads, as a place among the layers with keys; None:
    its own, or none. window: how many positions a token sees; None: all.

    Called with its params, x float [B, T, D], the tokens' positions, the cache and the layer's place in it: that among
    the layers with keys and values, or that among the recurrent ones, or both.
    """

    @property
    def cached(self) -> Cached | None: ...

    @property
    def rope(self) -> RotarySchedule | None: ...

    @property
    def kv_source_layer(self) -> int | None: ...

    @property
    def window(self) -> int | None: ...

    def read(self, scope: WeightScope) -> Any: ...

    def __call__(
        self, params: Any, x_BTD: Tensor, positions: Positions, cache: KVCache | PagedKVCache, index: Any
    ) -> Tensor: ...


class TokenBlock(Protocol):
    """A block that works on each token alone: float [..., D] -> [..., D]."""

    def read(self, scope: WeightScope) -> Any: ...

    def __call__(self, params: Any, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the parts of a layer. The names of norms that a layer has not are not used.

    Llama's post_attention_layernorm is applied after the attention's sum, so it is the norm before the MLP.
    """

    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mixer_post_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward: str = "mlp"
    feed_forward_post_norm: str = ""


class LayerParams(NamedTuple):
    """The weights of a layer, each as its block reads them; None for norms that the layer has not."""

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

    mixer, feed_forward: None in a layer that has but the other one. layer_input: what the layer then does with its own
    embedding of the token. scaled: whether a learned number multiplies the stream at the end.
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
        """What a cache keeps for it."""
        return None if self.mixer is None else self.mixer.cached

    def read(self, scope: WeightScope) -> LayerParams:
        return LayerParams(
            mixer_norm=_read_norm(self.mixer_norm, scope.under(self.names.mixer_norm)),
            mixer=None if self.mixer is None else self.mixer.read(scope.under(self.names.mixer)),
            mixer_post_norm=_read_norm(self.mixer_post_norm, scope.under(self.names.mixer_post_norm)),
            feed_forward_norm=_read_norm(self.feed_forward_norm, scope.under(self.names.feed_forward_norm)),
            feed_forward=self._read_feed_forward(scope.under(self.names.feed_forward)),
            feed_forward_post_norm=_read_norm(
                self.feed_forward_post_norm, scope.under(self.names.feed_forward_post_norm)
            ),
            layer_input=None if self.layer_input is None else self.layer_input.read(scope),
            scalar=scope.take("layer_scalar", 1) if self.scaled else None,
        )

    def _read_feed_forward(self, scope: WeightScope) -> Any:
        return None if self.feed_forward is None else self.feed_forward.read(scope)

    def __call__(
        self,
        params: LayerParams,
        x_BTD: Tensor,
        positions: Positions,
        cache: KVCache | PagedKVCache,
        index: Any,
        given_BTP: Tensor | None = None,
    ) -> Tensor:
        """index: the layer's place in the cache. given_BTP: its own embedding of the tokens."""
        if self.mixer is not None:
            normed = _normed(self.mixer_norm, params.mixer_norm, x_BTD)
            mixed = self.mixer(params.mixer, normed, positions, cache, index)
            x_BTD = self._added(x_BTD, _normed(self.mixer_post_norm, params.mixer_post_norm, mixed))
        if self.feed_forward is not None:
            normed = _normed(self.feed_forward_norm, params.feed_forward_norm, x_BTD)
            fed = self.feed_forward(params.feed_forward, normed)
            x_BTD = self._added(x_BTD, _normed(self.feed_forward_post_norm, params.feed_forward_post_norm, fed))
        if self.layer_input is not None and params.layer_input is not None and given_BTP is not None:
            x_BTD = self.layer_input(params.layer_input, x_BTD, given_BTP)
        return x_BTD if params.scalar is None else x_BTD * params.scalar

    def _added(self, x_BTD: Tensor, branch: Tensor) -> Tensor:
        return ops.add(x_BTD, multiplied(branch, self.residual_multiplier))


def _read_norm(norm: RMSNorm | None, scope: WeightScope) -> Tensor | None:
    return None if norm is None else norm.read(scope)


def _normed(norm: RMSNorm | None, weight: Tensor | None, x: Tensor) -> Tensor:
    return x if norm is None or weight is None else norm(weight, x)
