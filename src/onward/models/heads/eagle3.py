"""EAGLE-3 heads (arXiv 2503.01840), in the layout of their authors and of SpecForge: a Llama layer over the features of
three of the target's layers, whose attention reads the normalised embedding and hidden state side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward import ops
from onward.cache import LayerShape
from onward.errors import CheckpointError, ConfigError, RequestError
from onward.models.architecture import Architecture, WeightScope
from onward.models.blocks import Attention, Decoder, FeedForward, LayerParams, Positions, RMSNorm
from onward.models.blocks.layer import LayerCache
from onward.models.config import attention_biases, common_fields, ignore, only
from onward.models.fields import TrackedFields, flag, json_object, positive_int
from onward.models.heads.head import DraftHead, Find, HeadParams


@dataclass(frozen=True)
class Eagle3Head(DraftHead):
    """Passes on its output before the norm. vocab_size: of its own ids. normed_residual: whether the hidden state is
    normalised before the residual connection."""

    attention: Attention
    feed_forward: FeedForward
    norm: RMSNorm
    vocab_size: int
    normed_residual: bool = False

    @property
    def cached(self) -> LayerShape:
        assert self.attention.cached is not None, "attention with keys of its own"
        return self.attention.cached

    def read(self, scope: WeightScope, find: Find) -> HeadParams:
        layer, size = scope.under("midlayer"), self.target.hidden_size
        return HeadParams(
            layer=LayerParams(
                mixer_norm=None,
                mixer=self.attention.read(layer.under("self_attn")),
                mixer_post_norm=None,
                feed_forward_norm=self.norm.read(layer.under("post_attention_layernorm")),
                feed_forward=self.feed_forward.read(layer.under("mlp")),
                feed_forward_post_norm=None,
            ),
            embedding_norm=self.norm.read(layer.under("input_layernorm")),
            hidden_norm=self.norm.read(layer.under("hidden_norm")),
            projection=scope.linear("fc", size, len(self.taps) * size),
            norm=self.norm.read(scope.under("norm")),
            lm_head=scope.linear("lm_head", self.vocab_size, size),
            ids=self._ids(find("d2t")),
        )

    def _ids(self, d2t: Tensor | None) -> Tensor | None:
        """The target's ids. d2t: int64 [draft vocabulary], each of them less the head's own."""
        if d2t is None and self.vocab_size == self.target.vocab_size:
            return None
        count, of_target = self.vocab_size, self.target.vocab_size
        ids = torch.zeros(0) if d2t is None else d2t.to(torch.int64)
        if ids.shape == (count,):
            ids = ids + torch.arange(count, device=ids.device)
            if len(set(ids.tolist())) == count and int(ids.min()) >= 0 and int(ids.max()) < of_target:
                return ids
        shape = "none" if d2t is None else f"{list(d2t.shape)}"
        raise CheckpointError(
            f"the EAGLE-3 head needs a tensor 'd2t' of shape [{count}] that maps its {count} ids to different ones of "
            f"the model's {of_target}; got {shape}"
        )

    def hidden(
        self, params: HeadParams, embedded: Tensor, features: Tensor, positions: Positions, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        is_of_target = features.shape[-1] != self.target.hidden_size
        x_BTD = params.projection(features) if is_of_target else features
        normed = self.norm(params.hidden_norm, x_BTD)
        pair = torch.cat([self.norm(params.embedding_norm, embedded), normed], -1)
        mixed = self.attention(params.layer.mixer, pair, positions, cache, 0)
        x_BTD = ops.add(normed if self.normed_residual else x_BTD, mixed)
        assert params.layer.feed_forward_norm is not None
        fed = self.feed_forward(params.layer.feed_forward, self.norm(params.layer.feed_forward_norm, x_BTD))
        x_BTD = ops.add(x_BTD, fed)
        return x_BTD, self.norm(params.norm, x_BTD)


def read_eagle3(config: Mapping[str, Any], target: Architecture | None) -> Eagle3Head:
    """Read the config.json of a head, for a target.

    Raises:
        ConfigError: it is of a head for another model, or a field is missing, wrong or unknown.
        RequestError: the target is of no built-in family.
    """
    if not isinstance(target, Decoder):
        raise RequestError("an EAGLE-3 head needs a model of a built-in family, and this one is not")
    tracked = TrackedFields(config)
    only(tracked, num_hidden_layers=1, tie_word_embeddings=False, norm_output=False, fc_norm=False, use_aux_norm=False)
    ignore(tracked, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
    fields = common_fields(tracked)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for name, of_target in {**sizes, "target_hidden_size": target.hidden_size}.items():
        if tracked.get(name, of_target) != of_target:
            raise ConfigError(
                f"the EAGLE-3 head is of another model: its {name} is {tracked[name]}, and the model's "
                f"{name.removeprefix('target_')} is {of_target}"
            )
    head = Eagle3Head(
        target,
        _taps(tracked, len(target.layers)),
        attention=fields.attention(input_size=2 * fields.hidden_size, **attention_biases(tracked)),
        feed_forward=fields.feed_forward(bias=flag(tracked, "mlp_bias")),
        norm=fields.norm(),
        vocab_size=positive_int(tracked, "draft_vocab_size", fields.vocab_size, most=fields.vocab_size),
        normed_residual=flag(tracked, "norm_before_residual"),
    )
    tracked.check_unread("EAGLE-3")
    return head


def _taps(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """The layers whose output the head reads: those of `eagle_config`, or the inputs of the third, the middle and the
    third last layer."""
    settings = json_object(config, "eagle_config")
    only(settings, use_aux_hidden_state=True)
    layers = settings.get("eagle_aux_hidden_state_layer_ids")
    layers = [1, count // 2 - 1, count - 4] if layers is None else layers
    is_valid = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < count for layer in layers)
    if not is_valid or len(set(layers)) < max(2, len(layers)):
        raise ConfigError(
            f"config.json: eagle_aux_hidden_state_layer_ids must be two or more layers of the model, from 0 "
            f"to {count - 1}; got {layers}"
        )
    return tuple(f"layers.{layer}" for layer in layers)
