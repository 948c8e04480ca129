"""The table of GGUF's architectures: what config.json and the names of weights would be in the Hugging Face layout. To
read a family from GGUF, add a line; its names, keys and functions are in `names`, `keys`, `fields` and `family`."""

from onward.checkpoint.gguf import family, fields, keys, names
from onward.checkpoint.gguf.family import GgufFamily

# "llama" is Mistral's too: the two differ in a sliding window, which the converter leaves out.
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
        fixed=keys.BY_SOFTMAX,
        numbers=keys.EXPERTS | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
    ),
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM",
        order=family.value_heads,
        names=names.QWEN35,
        numbers=keys.DELTA,
        changes=(family.NORMS_BUT_OF_STATES, family.RATES),
        said=fields.qwen35,
    ),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM",
        fixed=keys.BY_SOFTMAX,
        order=family.value_heads,
        names=names.QWEN35,
        numbers=keys.DELTA_EXPERTS,
        changes=(family.NORMS_BUT_OF_STATES, family.RATES),
        said=fields.qwen35,
    ),
    # Read as Qwen3.5's, the same forward: there the projections that the converter cuts are apart.
    "qwen3next": GgufFamily(
        "Qwen3_5MoeForCausalLM",
        fixed=keys.BY_SOFTMAX,
        order=family.beta_and_decay,
        names=names.QWEN3NEXT,
        numbers=keys.DELTA_EXPERTS,
        changes=(family.NORMS_BUT_OF_STATES, family.RATES),
        said=fields.qwen35,
    ),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        config={"hidden_activation": "gelu_pytorch_tanh"},
        names=names.FOUR_NORMS,
        numbers=keys.WINDOW
        | {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        changes=(family.NORMS,),
        said=fields.gemma2,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        config={"hidden_activation": "gelu_pytorch_tanh"},
        names=names.FOUR_NORMS,
        numbers=keys.WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        changes=(family.NORMS,),
        said=fields.gemma3,
    ),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        fixed=keys.BY_SOFTMAX,
        config={"hidden_activation": "gelu_pytorch_tanh"},
        parts={"attention_k_eq_v": fields.keys_are_values},
        names=names.GEMMA4,
        numbers=keys.GEMMA4,
        said=fields.gemma4,
    ),
    "phi3": GgufFamily("Phi3ForCausalLM", numbers=keys.WINDOW, said=fields.phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", names=names.AFTER_BOTH),
    "exaone4": GgufFamily("Exaone4ForCausalLM", names=names.AFTER_BOTH, numbers=keys.WINDOW, said=fields.exaone4),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        parts={"attention_bias": "attn_q.bias"},
        names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM", fixed=keys.TURNS, order=family.pairs_to_halves, numbers=keys.GRANITE, said=fields.granite
    ),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM",
        fixed=keys.BY_SOFTMAX | keys.TURNS,
        order=family.pairs_to_halves,
        names=names.GRANITE_EXPERTS,
        numbers=keys.GRANITE | keys.EXPERTS | {"num_local_experts": "expert_count"},
        said=fields.granite,
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        fixed=keys.BY_SOFTMAX,
        order=family.pairs_to_halves,
        config={"num_local_experts": 0},
        parts={"attention_bias": "attn_q.bias", "mamba_conv_bias": "ssm_conv1d.bias"},
        names=names.GRANITE_HYBRID,
        numbers=keys.GRANITE_HYBRID,
        changes=(family.RATES,),
        said=fields.granite_hybrid,
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
        names=names.FALCON_H1,
        numbers=keys.MAMBA | {"mamba_d_ssm": "ssm.inner_size"},
        changes=(family.RATES,),
        said=fields.falcon_h1,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GgufFamily(
            "NemotronHForCausalLM",
            config=keys.UNSAID_EXPERTS,
            fixed={"expert_gating_func": keys.SIGMOID},
            order=family.pairs_to_halves,
            parts={"mlp_bias": "ffn_up.bias", "use_conv_bias": "ssm_conv1d.bias"},
            names=names.NEMOTRON_H,
            numbers=keys.NEMOTRON_H,
            changes=(family.RATES,),
            said=fields.nemotron_h,
        ),
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", order=family.pairs_to_halves, config={"no_rope_layer_interval": 4}),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        parts={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"},
        names=names.AFTER_ATTENTION,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        names=names.LFM2,
        numbers={"num_key_value_heads": None, "conv_L_cache": "shortconv.l_cache"},
        said=fields.lfm2,
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        config=keys.UNSAID_EXPERTS | {"first_k_dense_replace": 0},
        fixed={"expert_gating_func": keys.SIGMOID},
        parts={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        names=names.AFTER_ATTENTION,
        numbers=keys.DEEPSEEK_EXPERTS,
        said=fields.without_ahead,
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        config=keys.UNSAID_EXPERTS | {"first_k_dense_replace": 0},
        names=names.LATENT,
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
        said=fields.deepseek,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        fixed={"expert_gating_func": keys.SOFTMAX_OF_CHOSEN},
        names=names.AFTER_ATTENTION,
        numbers=keys.EXPERTS
        | keys.WINDOW
        | {"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
        said=fields.gpt_oss,
    ),
}
# (architecture, a key behind it) -> the family of files in which its value is not 0.
WITH_KEY = {
    ("llama", "expert_count"): GgufFamily(
        "MixtralForCausalLM",
        fixed=keys.BY_SOFTMAX,
        order=family.pairs_to_halves,
        numbers=keys.EXPERTS | {"num_local_experts": "expert_count"},
    ),
    ("granitemoe", "expert_shared_feed_forward_length"): GgufFamily(
        "GraniteMoeSharedForCausalLM",
        fixed=keys.BY_SOFTMAX | keys.TURNS,
        order=family.pairs_to_halves,
        names=names.SHARED_GRANITE,
        numbers=keys.GRANITE_EXPERTS,
        said=fields.granite,
    ),
    ("granitehybrid", "expert_count"): FAMILIES["granitehybrid"]._replace(
        names={**names.GRANITE_HYBRID, **names.SHARED_GRANITE}
    ),
    # Of positions in images. The text part of a model that sees them: RoPE turns halves of heads in llama.cpp then.
    ("glm4", "rope.dimension_sections"): FAMILIES["glm4"]._replace(order=family.halves_to_pairs),
    ("olmo2", "attention.sliding_window"): GgufFamily(
        "Olmo3ForCausalLM", names=names.AFTER_BOTH, numbers=keys.WINDOW, said=fields.olmo3
    ),
}
# (architecture, how the name of a tensor ends) -> the family of files that have such a tensor.
WITH_TENSOR = {
    ("qwen3next", ".ssm_in.weight"): FAMILIES["qwen3next"]._replace(
        order=family.fused_delta, names=names.FUSED_QWEN3NEXT
    ),
    ("deepseek2", ".attn_k_b.weight"): FAMILIES["deepseek2"]._replace(names=names.CUT_LATENT),
}
