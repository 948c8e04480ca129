"""The table of GGUF architectures, with their config.json and weight names in the Hugging Face layout. To support
another family, add an entry; its names, keys and functions are in `family`, `keys` and `fields`."""

from onward.checkpoint.gguf import family, fields, keys
from onward.checkpoint.gguf.family import GgufFamily

_QWEN35 = GgufFamily(
    "Qwen3_5ForCausalLM",
    order=family.value_heads,
    names=family.QWEN35,
    numbers=keys.DELTA,
    transforms=(family.NORMS_EXCEPT_DELTA, family.RATES),
    derived=fields.qwen35,
)
_QWEN35_MOE = _QWEN35._replace(
    architecture="Qwen3_5MoeForCausalLM", fixed=keys.SOFTMAX_ROUTING, numbers=keys.DELTA_EXPERTS
)
_GRANITE = GgufFamily(
    "GraniteForCausalLM",
    fixed=keys.WITH_ROPE,
    order=family.pairs_to_halves,
    numbers=keys.GRANITE,
    derived=fields.granite,
)
_GEMMA2 = GgufFamily(
    "Gemma2ForCausalLM",
    config={"hidden_activation": "gelu_pytorch_tanh"},
    names=family.FOUR_NORMS,
    numbers=keys.WINDOW | {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    transforms=(family.NORMS,),
    derived=fields.gemma2,
)
# "llama" covers Mistral too: they differ only in a sliding window, which the converter omits.
FAMILIES = {
    "llama": GgufFamily(
        "LlamaForCausalLM",
        order=family.pairs_to_halves,
        parts={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        config={"norm_topk_prob": True},
        fixed=keys.SOFTMAX_ROUTING,
        numbers=keys.EXPERTS | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    # Read as Qwen3.5, which has the same forward pass with the projections that the converter splits already apart.
    "qwen3next": _QWEN35_MOE._replace(order=family.beta_and_decay, names=family.QWEN3NEXT),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2._replace(
        architecture="Gemma3ForCausalLM",
        numbers=keys.WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        derived=fields.gemma3,
    ),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        fixed=keys.SOFTMAX_ROUTING,
        config={"hidden_activation": "gelu_pytorch_tanh"},
        parts={"attention_k_eq_v": fields.keys_are_values},
        names=family.GEMMA4,
        numbers=keys.GEMMA4,
        derived=fields.gemma4,
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", numbers=keys.WINDOW, derived=fields.phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", names=family.AFTER_BOTH),
    "exaone4": GgufFamily("Exaone4ForCausalLM", names=family.AFTER_BOTH, numbers=keys.WINDOW, derived=fields.exaone4),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        parts={"attention_bias": "attn_q.bias"},
        names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE._replace(
        architecture="GraniteMoeForCausalLM",
        fixed=keys.SOFTMAX_ROUTING | keys.WITH_ROPE,
        names=family.GRANITE_EXPERTS,
        numbers=keys.GRANITE | keys.EXPERTS | {"num_local_experts": "expert_count"},
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        fixed=keys.SOFTMAX_ROUTING,
        order=family.pairs_to_halves,
        config={"num_local_experts": 0},
        parts={"attention_bias": "attn_q.bias", "mamba_conv_bias": "ssm_conv1d.bias"},
        names=family.GRANITE_HYBRID,
        numbers=keys.GRANITE_HYBRID,
        transforms=(family.RATES,),
        derived=fields.granite_hybrid,
    ),
    "falcon-h1": GgufFamily(
        "FalconH1ForCausalLM",
        config={"mamba_norm_before_gate": False},
        parts={
            "attention_bias": "attn_q.bias",
            "mlp_bias": "ffn_up.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_rms_norm": "ssm_norm.weight",
        },
        names=family.FALCON_H1,
        numbers=keys.MAMBA | {"mamba_d_ssm": "ssm.inner_size"},
        transforms=(family.RATES,),
        derived=fields.falcon_h1,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GgufFamily(
            "NemotronHForCausalLM",
            config=keys.EXPERT_DEFAULTS,
            fixed={"expert_gating_func": keys.SIGMOID},
            order=family.pairs_to_halves,
            parts={"mlp_bias": "ffn_up.bias", "use_conv_bias": "ssm_conv1d.bias"},
            names=family.NEMOTRON_H,
            numbers=keys.NEMOTRON_H,
            transforms=(family.RATES,),
            derived=fields.nemotron_h,
        ),
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", order=family.pairs_to_halves, config={"no_rope_layer_interval": 4}),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        parts={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
        names=family.AFTER_ATTENTION,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        names=family.LFM2,
        numbers={"num_key_value_heads": None, "conv_L_cache": "shortconv.l_cache"},
        derived=fields.lfm2,
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        config=keys.EXPERT_DEFAULTS | {"first_k_dense_replace": 0},
        fixed={"expert_gating_func": keys.SIGMOID},
        parts={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        names=family.AFTER_ATTENTION,
        numbers=keys.DEEPSEEK_EXPERTS,
        derived=fields.without_ahead,
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        config=keys.EXPERT_DEFAULTS | {"first_k_dense_replace": 0},
        names=family.LATENT,
        numbers=keys.DEEPSEEK_EXPERTS
        | {
            "head_dim": None,
            "num_key_value_heads": None,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        derived=fields.deepseek,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        fixed={"expert_gating_func": keys.SOFTMAX_OF_CHOSEN},
        names=family.AFTER_ATTENTION,
        numbers=keys.EXPERTS
        | keys.WINDOW
        | {"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
        derived=fields.gpt_oss,
    ),
}
# (architecture, a key below it) -> the family of files in which the key is not 0.
WITH_KEY = {
    ("llama", "expert_count"): GgufFamily(
        "MixtralForCausalLM",
        fixed=keys.SOFTMAX_ROUTING,
        order=family.pairs_to_halves,
        numbers=keys.EXPERTS | {"num_local_experts": "expert_count"},
    ),
    ("granitemoe", "expert_shared_feed_forward_length"): FAMILIES["granitemoe"]._replace(
        architecture="GraniteMoeSharedForCausalLM", names=family.SHARED_GRANITE, numbers=keys.GRANITE_EXPERTS
    ),
    ("granitehybrid", "expert_count"): FAMILIES["granitehybrid"]._replace(
        names={**family.GRANITE_HYBRID, **family.SHARED_GRANITE}
    ),
    # Image positions, in the text part of a multimodal model: llama.cpp then rotates halves of heads.
    ("glm4", "rope.dimension_sections"): FAMILIES["glm4"]._replace(order=family.halves_to_pairs),
    ("olmo2", "attention.sliding_window"): GgufFamily(
        "Olmo3ForCausalLM", names=family.AFTER_BOTH, numbers=keys.WINDOW, derived=fields.olmo3
    ),
}
# (architecture, the end of a tensor's name) -> the family of files with such a tensor.
WITH_TENSOR = {
    ("qwen3next", ".ssm_in.weight"): FAMILIES["qwen3next"]._replace(
        order=family.fused_delta, names=family.FUSED_QWEN3NEXT
    ),
    ("deepseek2", ".attn_k_b.weight"): FAMILIES["deepseek2"]._replace(names=family.CUT_LATENT),
}
