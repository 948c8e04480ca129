"""Gemma 4: sliding and full attention with different head sizes, and in some sizes layers that share the keys and
values of others, per-layer embeddings, or experts in parallel with the dense block.

Only the text part of multimodal checkpoints is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import (
    Attention,
    Decoder,
    DecoderLayer,
    DenseAndExperts,
    ExpertNames,
    Experts,
    LayerNames,
    PerLayerEmbeddings,
    PerLayerInput,
)
from onward.models.blocks.feed_forward import Activation
from onward.models.config import (
    CommonFields,
    attention_biases,
    common_fields,
    every_nth_full,
    layer_types,
    read_text_part,
    ropes_by_type,
    sliding_window,
)
from onward.models.families.gemma import ACTIVATION, DEFAULTS, NAMES
from onward.models.fields import Config, FieldOverlay, flag, json_object, positive_int, softcap, words
from onward.models.rope import rotary_schedule
from onward.ops.experts import ExpertActivation

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULTS = DEFAULTS | {"vocab_size": 262_144, "max_position_embeddings": 131_072}
_ROPES: dict[str, dict[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_EXPERT_ACTIVATIONS: dict[Activation, ExpertActivation] = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
_OTHER_FIELDS = words("""
    vision_config audio_config image_token_id video_token_id audio_token_id boi_token_id eoi_token_id boa_token_id
    eoa_token_id eoa_token_index vision_soft_tokens_per_image
""")
_OTHER_WEIGHTS = words("model.vision_tower. model.embed_vision. model.audio_tower. model.embed_audio.")


def _read_text(config: Config) -> Decoder:
    if (mode := config.get("use_bidirectional_attention")) not in (None, "vision"):
        raise ConfigError(
            f"config.json: 'use_bidirectional_attention' is {mode!r}, but text is decoded left to right: it must be "
            "null or 'vision'"
        )
    ropes = ropes_by_type(config) or _ROPES
    sliding = {"rope_parameters": ropes.get(_SLIDING, {})}
    config = FieldOverlay(sliding, config, _DEFAULTS)
    fields = common_fields(config, **ACTIVATION)
    types = _types(config, fields.num_layers)
    sources = _sources(config, types)
    attentions = _attentions(config, fields, types, ropes)
    width = _layer_embedding_width(config)
    names = replace(NAMES, feed_forward="", feed_forward_norm="") if flag(config, "enable_moe_block") else NAMES
    return fields.decoder(
        (
            _layer(config, fields, replace(attentions[kind], kv_source_layer=source), width, names)
            for kind, source in zip(types, sources, strict=True)
        ),
        norm=fields.norm(after_cast=False),
        embedding_multiplier=fields.hidden_size**0.5,
        rounds_multiplier=True,
        logits_softcap=softcap(config, "final_logit_softcapping"),
        layer_embeddings=_layer_embeddings(config, fields, width),
        # Files have weights for keys and values that these layers share.
        unread=tuple(
            f"model.layers.{index}.self_attn.{part}."
            for index, source in enumerate(sources)
            if source is not None
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        ),
    )


def _layer(config: Config, fields: CommonFields, attention: Attention, width: int, names: LayerNames) -> DecoderLayer:
    norm = fields.norm(after_cast=False)
    wide = flag(config, "use_double_wide_mlp") and attention.kv_source_layer is not None
    dense = fields.feed_forward(intermediate_size=fields.intermediate_size * (2 if wide else 1))
    has_experts = flag(config, "enable_moe_block")
    return DecoderLayer(
        attention,
        DenseAndExperts(dense, _experts(config, fields), norm) if has_experts else dense,
        mixer_norm=norm,
        mixer_post_norm=norm,
        feed_forward_norm=None if has_experts else norm,
        feed_forward_post_norm=norm,
        names=names,
        layer_input=PerLayerInput(fields.hidden_size, width, fields.activation, norm) if width else None,
        scaled=True,
    )


def _experts(config: Config, fields: CommonFields) -> Experts:
    count = positive_int(config, "num_experts")
    return Experts(
        hidden_size=fields.hidden_size,
        intermediate_size=positive_int(config, "moe_intermediate_size"),
        num_experts=count,
        num_chosen=positive_int(config, "top_k_experts", most=count),
        normalize=True,
        activation=_EXPERT_ACTIVATIONS[fields.activation],
        names=ExpertNames(router="router.proj"),
    )


def _types(config: Config, num_layers: int) -> tuple[str, ...]:
    types = layer_types(config, [*every_nth_full(6, num_layers)[:-1], _FULL])
    if types[-1] != _FULL:
        raise ConfigError(
            f"config.json: the last layer of this family must be {_FULL!r}; layer_types has {types[-1]!r}"
        )
    return types


def _attentions(
    config: Config, fields: CommonFields, types: Sequence[str], ropes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Attention]:
    """The attention of each type of layer."""
    shared = flag(config, "attention_k_eq_v")
    full_dim, full_heads = _full_heads(config, fields, types, shared)
    # As in transformers: whole heads by default, and always with the default type.
    rope = ropes.get(_FULL, {})
    partial = None if rope.get("rope_type", "default") == "default" else 1.0
    max_position = fields.max_position_embeddings
    full_rope = rotary_schedule({"rope_parameters": rope}, full_dim, max_position, base=1e6, partial=partial)
    attentions = {}
    for kind, head_dim, kv_heads in ((_SLIDING, fields.head_dim, fields.num_kv_heads), (_FULL, full_dim, full_heads)):
        norm = fields.norm(head_dim, after_cast=False)
        attentions[kind] = fields.attention(
            head_dim=head_dim,
            num_kv_heads=kv_heads,
            rope=fields.rope if kind == _SLIDING else full_rope,
            window=sliding_window(config, default=512) if kind == _SLIDING else None,
            scale=1.0,
            **attention_biases(config),
            q_norm=norm,
            k_norm=norm,
            v_norm=fields.rms_norm_eps,
            k_eq_v=shared and kind == _FULL,
        )
    return attentions


def _full_heads(config: Config, fields: CommonFields, types: Sequence[str], shared: bool) -> tuple[int, int]:
    """head_dim and num_key_value_heads of full layers, which transformers 5 lists by layer."""
    where, own = "config.json", _full_layer_config(config, types)
    head_dim = positive_int(config, "global_head_dim", 512)
    heads = positive_int(config, "num_global_key_value_heads", fields.num_kv_heads)
    if own is not None:
        where = "config.json: per_layer_config"
        head_dim = positive_int(own, "head_dim", fields.head_dim, where=where)
        heads = positive_int(own, "num_key_value_heads", fields.num_kv_heads, where=where)
    elif not shared:
        heads = fields.num_kv_heads
    if head_dim % 2 or fields.num_heads % heads:
        raise ConfigError(
            f"{where}: full layers need an even head_dim, and num_key_value_heads that divides num_attention_heads "
            f"({fields.num_heads}); got {head_dim} and {heads}"
        )
    return head_dim, heads


def _full_layer_config(config: Config, types: Sequence[str]) -> Mapping[str, Any] | None:
    """The entry of every full layer in `per_layer_config`, if any."""
    by_layer = json_object(config, "per_layer_config")
    if not by_layer:
        return None
    full = [index for index, kind in enumerate(types) if kind == _FULL]
    entries = {int(name): json_object(by_layer, name) for name in by_layer if name.isdecimal()}
    own = entries.get(full[0], {})
    is_uniform = sorted(entries) == full and all(layer == own for layer in entries.values())
    if not is_uniform or len(entries) != len(by_layer) or not own.keys() <= {"head_dim", "num_key_value_heads"}:
        raise ConfigError(
            f"config.json: per_layer_config of this family must give the full layers {full} one head_dim and "
            f"num_key_value_heads, and other layers nothing; got {by_layer!r}"
        )
    return own


def _sources(config: Config, types: Sequence[str]) -> list[int | None]:
    """The source layers of the last layers: the last earlier layer of the same type. None: not shared."""
    count = 0 if not config.get("num_kv_shared_layers") else positive_int(config, "num_kv_shared_layers")
    first = len(types) - count
    own = types[: max(0, first)]
    if missing := [kind for kind in types if kind not in own]:
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {count} of {len(types)} layers, and no layer before them is "
            f"{missing[0]!r}, whose keys they could share"
        )
    last = {kind: index for index, kind in enumerate(own)}
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


def _layer_embedding_width(config: Config) -> int:
    """The width of per-layer embeddings; 0: none."""
    name = "hidden_size_per_layer_input"
    if name in config and not config.get(name):
        return 0
    return positive_int(config, name, 256)


def _layer_embeddings(config: Config, fields: CommonFields, width: int) -> PerLayerEmbeddings | None:
    vocab_size = positive_int(config, "vocab_size_per_layer_input", 262_144)
    if not width:
        return None
    if vocab_size < fields.vocab_size:
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input ({vocab_size}) must be at least vocab_size ({fields.vocab_size})"
        )
    norm = fields.norm(width, after_cast=False)
    return PerLayerEmbeddings(vocab_size, fields.hidden_size, fields.num_layers, width, norm)


ARCHITECTURES = {
    "Gemma4ForCausalLM": _read_text,
    "Gemma4ForConditionalGeneration": partial(
        read_text_part, read=_read_text, other_fields=_OTHER_FIELDS, unread=_OTHER_WEIGHTS
    ),
}
