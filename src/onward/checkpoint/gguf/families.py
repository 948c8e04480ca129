"""The table of GGUF's architectures: what config.json and the names of weights would be in the Hugging Face layout.

A family that Onward reads from folders is read from GGUF by a line here. What its files say in a way of their own a
function of its line turns into fields of config.json; such functions are below the table's fields.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Makes fields of config.json out of (the metadata behind "{architecture}.", the fields that were read already).
Fields = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class Order(NamedTuple):
    """Where the stock rows and columns of a weight lie among the stored ones: int64 [N], int64 [K]; None: as stored."""

    rows: Tensor | None = None
    columns: Tensor | None = None


# (a stock name, the fields of config.json, how many rows the weight has) -> its order.
Orders = Callable[[str, Mapping[str, Any], int], Order]


class GgufFamily(NamedTuple):
    """architecture: the one of config.json. order: of weights that the converter reordered. config: fields that files
    leave unsaid. parts: fields that say whether there are biases or norms, and a tensor that is there then. names,
    numbers: lines of `WHOLE`, `LAYER` and `NUMBERS` of its own; None: a field that `fields` reads. values: (a stock
    name, floats of the file) -> the stock checkpoint's, where the converter computed others. fields: see `Fields`."""

    architecture: str
    order: Orders = lambda name, config, rows: Order()
    config: Mapping[str, object] = {}
    parts: Mapping[str, str] = {}
    names: Mapping[str, str] = {}
    numbers: Mapping[str, str | None] = {}
    values: Callable[[str, Tensor], Tensor] = lambda name, values: values
    fields: Fields = lambda metadata, config: {}


# A field of config.json -> the key behind "{architecture}.".
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_EXPERTS = {"num_experts_per_tok": "expert_used_count"}
_DELTA = {
    "num_hidden_layers": None,
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_DEEPSEEK_EXPERTS = _EXPERTS | {
    "num_hidden_layers": None,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}

# A weight's stock name without "model." and ".weight" -> that of GGUF, with its end where that is another;
# `model.layers.3.` is `blk.3.`. The matrices of all experts are one tensor.
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_LFM2 = {
    "embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_AFTER_BOTH = {**_AFTER_ATTENTION, "post_feedforward_layernorm": "post_ffw_norm"}
_FOUR_NORMS = {**_AFTER_BOTH, "pre_feedforward_layernorm": "ffn_norm"}


# ── what the converter reorders ────────────────────────────────────────────────────────────────────────────────


def _pairs_to_halves(name: str, config: Mapping[str, Any], rows: int) -> Order:
    """The two halves of each head of queries and keys, which RoPE rotates with each other, lie row by row together, as
    the converter's LlamaModel puts them and all that derive from it."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return Order()
    return Order(torch.arange(rows).view(-1, config["head_dim"] // 2, 2).transpose(1, 2).flatten())


def _value_heads(name: str, config: Mapping[str, Any], rows: int) -> Order:
    """Of the value heads that share a key head the first of all groups come first, then the second, and so on."""
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if not part:
        return Order()
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if groups == heads:
        return Order()
    of_heads = torch.arange(heads).view(heads // groups, groups).T.flatten()
    width = config["linear_value_head_dim"]
    of_features = (of_heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return Order(of_heads)
    if part == "out_proj":
        return Order(None, of_features)
    if part == "norm":
        return Order()
    others = rows - heads * width  # queries and keys come first, where there are some
    return Order(torch.cat((torch.arange(others), others + of_features)))


# ── what the converter computes ───────────────────────────────────────────────────────────────────────────────


def _norms_less_one(name: str, values: Tensor) -> Tensor:
    """Weights of norms without the 1 that the family's forward adds, and the converter too."""
    return values.to(torch.float32) - 1 if name.endswith("norm.weight") else values


def _qwen35_values(name: str, values: Tensor) -> Tensor:
    """The same but for the norm of Gated DeltaNet, and rates as the logarithms that they were."""
    if name.endswith(".A_log"):
        return (-values.to(torch.float32)).log()
    return values if name.endswith(".linear_attn.norm.weight") else _norms_less_one(name, values)


# ── what some files say in a way of their own ───────────────────────────────────────────────────────────────────


def _number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number of the metadata; the default where it is none."""
    value = metadata.get(key, default)
    return value if isinstance(value, int | float) else default


def _list(value: Any) -> list[Any] | None:
    """The values of an array; None for what is none."""
    return list(value) if isinstance(value, np.ndarray | list) else None


def _layer_types(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where the file says it for each."""
    slides = _list(metadata.get("attention.sliding_window_pattern"))
    if slides is None:
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _gemma_scale(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The scale of scores, which no key has: that of a head but in the models of 27B, whose width makes it."""
    of_27b = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
    hidden, heads, layers = (config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if layers in of_27b.values() and isinstance(hidden, int) and isinstance(heads, int) and heads:
        return {"query_pre_attn_scalar": hidden // heads}
    return {"query_pre_attn_scalar": config.get("head_dim")}


def _gemma3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": _number(metadata, "rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return {**_gemma_scale(metadata, config), "rope_parameters": ropes}


def _olmo3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
    return {**_layer_types(metadata, config), "rope_parameters": ropes}


def _phi3(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 is none."""
    return {"sliding_window": config.get("sliding_window") or None}


def _lfm2(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are convolutions."""
    heads = metadata.get("attention.head_count_kv")
    counts = _list(heads)
    if counts is not None:
        heads = max((int(count) for count in counts if isinstance(count, np.integer)), default=None)
    return {
        "num_key_value_heads": heads,
        "layer_types": None if counts is None else ["full_attention" if count else "conv" for count in counts],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _without_ahead(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that look further ahead come behind the others, and are counted with them."""
    layers, ahead = _number(metadata, "block_count"), _number(metadata, "nextn_predict_layers", 0)
    if isinstance(layers, int) and isinstance(ahead, int):
        layers -= ahead
    return {"num_hidden_layers": layers, "num_nextn_predict_layers": ahead}


def _deepseek(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """V2 where experts are chosen by softmax, else V3, which GLM-4.7-Flash and Kimi K2 are too. The widths of heads are
    those before the keys and values are computed of the latent."""
    rotary = _number(metadata, "rope.dimension_count")
    keys = _number(metadata, "attention.key_length_mla", _number(metadata, "attention.key_length"))
    content = keys - rotary if isinstance(keys, int) and isinstance(rotary, int) else None
    rope = {name: value for name, value in config["rope_parameters"].items() if name != "partial_rotary_factor"}
    multiplier = _number(metadata, "rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, float):
        rope |= {"mscale": round(10 * multiplier, 6), "mscale_all_dim": round(10 * multiplier, 6)}
    by_softmax = _number(metadata, "expert_gating_func", _BY_SOFTMAX) == _BY_SOFTMAX
    groups = config.get("n_group", 1)
    of_v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"} if by_softmax else {}
    return {
        **_without_ahead(metadata, config),
        "architectures": ["DeepseekV2ForCausalLM" if by_softmax else "DeepseekV3ForCausalLM"],
        "num_key_value_heads": config.get("num_attention_heads"),
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": content,
        "v_head_dim": _number(metadata, "attention.value_length_mla", _number(metadata, "attention.value_length")),
        "n_group": groups,
        "topk_group": config.get("topk_group", 1),
        "rope_parameters": rope,
        **of_v2,
    }


def _qwen35(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    heads, features = _number(metadata, "ssm.time_step_rank"), _number(metadata, "ssm.inner_size")
    width = features // heads if isinstance(features, int) and isinstance(heads, int) and heads else None
    return {
        **_without_ahead(metadata, config),
        "num_nextn_predict_layers": None,
        "linear_value_head_dim": width,
        "full_attention_interval": _number(metadata, "full_attention_interval", 4),
    }


def _gpt_oss(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": _number(metadata, "expert_feed_forward_length", config.get("intermediate_size")),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


# llama.cpp's number of softmax among the functions that choose experts.
_BY_SOFTMAX = 1

# "llama" is Mistral's too: the two differ in a sliding window, which the converter leaves out.
FAMILIES = {
    "llama": GgufFamily(
        "LlamaForCausalLM",
        order=_pairs_to_halves,
        parts={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        config={"norm_topk_prob": True},
        numbers=_EXPERTS | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
    ),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM",
        order=_value_heads,
        names=_QWEN35,
        numbers=_DELTA,
        values=_qwen35_values,
        fields=_qwen35,
    ),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM",
        order=_value_heads,
        names=_QWEN35,
        numbers=_DELTA
        | _EXPERTS
        | {
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        values=_qwen35_values,
        fields=_qwen35,
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        config={"hidden_activation": "gelu_pytorch_tanh"},
        names=_FOUR_NORMS,
        numbers=_WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        values=_norms_less_one,
        fields=_gemma_scale,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        config={"hidden_activation": "gelu_pytorch_tanh"},
        names=_FOUR_NORMS,
        numbers=_WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        values=_norms_less_one,
        fields=_gemma3,
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", numbers=_WINDOW, fields=_phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", names=_AFTER_BOTH),
    "exaone4": GgufFamily("Exaone4ForCausalLM", names=_AFTER_BOTH, numbers=_WINDOW, fields=_layer_types),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        parts={"attention_bias": "blk.0.attn_q.bias"},
        names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "granite": GgufFamily("GraniteForCausalLM", order=_pairs_to_halves, numbers=_GRANITE),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM",
        order=_pairs_to_halves,
        names=_GRANITE_EXPERTS,
        numbers=_GRANITE | _EXPERTS | {"num_local_experts": "expert_count"},
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", order=_pairs_to_halves, config={"no_rope_layer_interval": 4}),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        parts={"attention_bias": "blk.0.attn_q.bias", "attention_out_bias": "blk.0.attn_output.bias"},
        names=_AFTER_ATTENTION,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        names=_LFM2,
        numbers={"num_key_value_heads": None, "conv_L_cache": "shortconv.l_cache"},
        fields=_lfm2,
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        parts={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        names=_AFTER_ATTENTION,
        numbers=_DEEPSEEK_EXPERTS,
        fields=_without_ahead,
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        names=_LATENT,
        numbers=_DEEPSEEK_EXPERTS
        | {
            "head_dim": None,
            "num_key_value_heads": None,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        fields=_deepseek,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        names=_AFTER_ATTENTION,
        numbers=_EXPERTS | _WINDOW | {"num_local_experts": "expert_count"},
        fields=_gpt_oss,
    ),
}
# (architecture, a key behind it) -> the family of files that have such a key.
WITH_KEY = {
    ("llama", "expert_count"): GgufFamily(
        "MixtralForCausalLM", order=_pairs_to_halves, numbers=_EXPERTS | {"num_local_experts": "expert_count"}
    ),
    ("olmo2", "attention.sliding_window"): GgufFamily(
        "Olmo3ForCausalLM", names=_AFTER_BOTH, numbers=_WINDOW, fields=_olmo3
    ),
}

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


class GgufName(NamedTuple):
    """A tensor, and which of the matrices that it stacks is meant; None: all of it."""

    tensor: str
    expert: int | None = None


def gguf_name(name: str, family: GgufFamily) -> GgufName:
    """Where the weight of a stock name lies; under the stock name itself where the table has none."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, "weight"
    stem = stem.removeprefix("model.")
    whole = family.names.get(stem, WHOLE.get(stem))
    if whole is not None:
        return GgufName(f"{whole}.{kind}")
    layers, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    match = _EXPERT.fullmatch(part)
    part = part if match is None else f"{match[1]}.{match[3]}"
    own = family.names.get(part, LAYER.get(part))
    if layers != "layers" or own is None:
        return GgufName(name)
    end = "" if own.endswith(".bias") or own == "ssm_a" else f".{kind}"
    return GgufName(f"blk.{number}.{own}{end}", None if match is None else int(match[2]))
