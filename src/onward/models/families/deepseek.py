"""DeepSeek-V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), and Kimi K2: multi-head latent attention, and experts
chosen by softmax in V2, later by sigmoids."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Decoder, DecoderLayer, Experts, LatentAttention
from onward.models.blocks.layer import Mixer
from onward.models.config import CommonFields, common_fields, only
from onward.models.family_fields import grouped_experts, layers_ahead, num_dense_layers, routed_experts
from onward.models.fields import Config, FieldOverlay, flag, positive_int, positive_number
from onward.models.rope import Yarn, rope_fields, yarn_magnitude

_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def _read_v2(config: Config) -> Decoder:
    """V2-Lite has no expert groups."""
    only(config, scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False, mlp_bias=False)
    only(config, topk_method=("greedy", "group_limited_greedy"))
    fields, attention = latent_attention(config, _LATENT)
    if config.get("topk_method") != "group_limited_greedy":
        config = FieldOverlay({"n_group": 1, "topk_group": 1}, config)
    experts = deepseek_experts(
        config, fields, count=64, inner=1407, scale=1.0, chosen=6, shared=2,
        score="softmax", choice_bias=False, normalize=False, group_best=1,
    )  # fmt: skip
    return fields.decoder(dense_then_sparse(config, fields, attention, experts, 0))


def _read_v3(config: Config) -> Decoder:
    only(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    fields, attention = latent_attention(config, _LATENT)
    experts = deepseek_experts(config, fields, count=256, inner=2048, scale=2.5, groups=(8, 4))
    layers = dense_then_sparse(config, fields, attention, experts, 3)
    return fields.decoder(layers, **layers_ahead(config, fields.num_layers))


def latent_attention(
    config: Config, defaults: Mapping[str, Any], **options: Any
) -> tuple[CommonFields, LatentAttention]:
    """The fields of a config with multi-head latent attention, and that attention. defaults: of the size fields. A
    `q_lora_rank` of null means no bottleneck. options: of `common_fields`."""
    sizes = {name: positive_int(config, name, defaults[name]) for name in defaults if name != "q_lora_rank"}
    content, rotary = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    rank = config.get("q_lora_rank", defaults["q_lora_rank"])
    if rotary % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim must be even, since RoPE rotates pairs; got {rotary}")
    if (total := positive_int(config, "qk_head_dim", content + rotary)) != content + rotary:
        raise ConfigError(
            f"config.json: qk_head_dim is {total}, but qk_nope_head_dim {content} and qk_rope_head_dim {rotary} make "
            f"{content + rotary}"
        )
    # partial_rotary_factor, if present, is relative to the whole head.
    whole = rope_fields(config).get("partial_rotary_factor") not in (None, 1, 1.0)
    head_dim = {"head_dim": content + rotary if whole else rotary}
    interleaved = flag(config, "rope_interleave", default=True)
    fields = common_fields(FieldOverlay(head_dim, config), **options, interleaved=interleaved, partial=1.0)
    if fields.rope.dims != rotary:
        raise ConfigError(
            f"config.json: partial_rotary_factor rotates {fields.rope.dims} features of a head, but qk_rope_head_dim "
            f"is {rotary}"
        )
    if fields.num_kv_heads != fields.num_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads ({fields.num_kv_heads}) must equal num_attention_heads "
            f"({fields.num_heads}) in this family, whose heads share one latent"
        )
    scale, scaling = (content + rotary) ** -0.5, fields.rope.scaling
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim:
        # In this family YaRN's magnitude is not in cos and sin alone.
        scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return fields, LatentAttention(
        hidden_size=fields.hidden_size,
        num_heads=fields.num_heads,
        query_rank=None if rank is None else positive_int(config, "q_lora_rank", rank),
        latent_dim=sizes["kv_lora_rank"],
        content_dim=content,
        rotary_dim=rotary,
        value_dim=sizes["v_head_dim"],
        rope=fields.rope,
        scale=scale,
        bias=flag(config, "attention_bias"),
    )


def deepseek_experts(
    config: Config,
    fields: CommonFields,
    *,
    count: int,
    inner: int,
    scale: float,
    chosen: int = 8,
    shared: int = 1,
    groups: tuple[int, int] = (1, 1),
    **changes: Any,
) -> Experts:
    """The experts of this family and related ones.

    Args:
        count, inner, scale, chosen, shared, groups: defaults of the number of experts, their inner width, the scale of
            their weights, the number of chosen and of shared experts per token, and the number of groups, in all and
            per token.
        changes: other fields of `Experts`.
    """
    count, inner = positive_int(config, "n_routed_experts", count), positive_int(config, "moe_intermediate_size", inner)
    experts = routed_experts(
        config, fields, count, chosen, intermediate_size=inner, score="sigmoid",
        normalize=flag(config, "norm_topk_prob", default=True),
        scale=positive_number(config, "routed_scaling_factor", scale), choice_bias=True, float32_router=True,
        shared=fields.feed_forward(intermediate_size=inner * positive_int(config, "n_shared_experts", shared)),
    )  # fmt: skip
    return replace(grouped_experts(config, experts, groups), **changes)


def dense_then_sparse(
    config: Config, fields: CommonFields, mixer: Mixer, experts: Experts, first: int
) -> list[DecoderLayer]:
    """All layers, the leading ones without experts. first: the default number of these."""
    first, dense = num_dense_layers(config, first), fields.feed_forward()
    return [fields.layer(mixer, dense if i < first else experts) for i in range(fields.num_layers)]


ARCHITECTURES = {"DeepseekV2ForCausalLM": _read_v2, "DeepseekV3ForCausalLM": _read_v3}
