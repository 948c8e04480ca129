"""What metadata of DeepSeek and its kin say in a way of their own (`onward.checkpoint.gguf.fields`)."""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.fields import without_ahead
from onward.checkpoint.gguf.keys import SIGMOID, SOFTMAX
from onward.checkpoint.gguf.metadata import number
from onward.errors import ConfigError


def deepseek(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """V2 where experts are chosen by softmax, else V3, which GLM-4.7-Flash and Kimi K2 are too. The widths of heads are
    those before the keys and values are computed of the latent."""
    rotary = number(metadata, "rope.dimension_count")
    keys = number(metadata, "attention.key_length_mla", number(metadata, "attention.key_length"))
    content = keys - rotary if isinstance(keys, int) and isinstance(rotary, int) else None
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    multiplier = number(metadata, "rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, int | float) and multiplier:
        rope |= {"mscale": round(10 * multiplier, 6), "mscale_all_dim": round(10 * multiplier, 6)}
    # It multiplies scores, too, which no field of config.json does.
    times = number(metadata, "rope.scaling.attn_factor", 1)
    if times != 1:
        raise ConfigError(f"rope.scaling.attn_factor is {times}, and only 1 is supported in this family")
    by_softmax = _chooses_by(metadata, config) == SOFTMAX
    groups = config.get("n_group", 1)
    of_v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"} if by_softmax else {}
    return {
        **without_ahead(metadata, config),
        "architectures": ["DeepseekV2ForCausalLM" if by_softmax else "DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.get("num_attention_heads"),
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": content,
        "v_head_dim": number(metadata, "attention.value_length_mla", number(metadata, "attention.value_length")),
        "n_group": groups,
        "topk_group": config.get("topk_group", 1),
        "rope_parameters": rope,
        **of_v2,
    }


def _chooses_by(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Softmax where the file does not say it, as in those of V2, but for GLM-4.7-Flash."""
    given = number(metadata, "expert_gating_func", 0)
    if given not in (0, SOFTMAX, SIGMOID):
        raise ConfigError(
            f"expert_gating_func is {given}, and {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are supported"
        )
    is_glm = number(metadata, "block_count") in (47, 48) and config.get("vocab_size") == 154_880
    return given or (SIGMOID if is_glm else SOFTMAX)
