"""The fields of config.json and generation_config.json that keys of a GGUF file's metadata say."""

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
# Numbers of which 0 means that there is none, as in llama.cpp.
OFF_AT_ZERO = {
    *("attn_logit_softcapping", "final_logit_softcapping", "expert_weights_scale"),
    *("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
}
# A field of generation_config.json -> the key behind "general.sampling.".
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# A field of config.json's YaRN -> the key behind "rope.scaling.".
YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
# LongRoPE's two lists of divisors, "rope_factors_short.weight" and "…_long.weight".
LENGTHS = "short", "long"
# llama.cpp's numbers of the functions that choose experts.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
# Keys of families that choose experts in one way.
BY_SOFTMAX: dict[str, object] = {"expert_gating_func": SOFTMAX, "expert_weights_norm": True}
# Granite's, which has no RoPE where this is false.
TURNS: dict[str, object] = {"rope.scaling.finetuned": True}
# What llama.cpp takes where the file does not say it; config.json has other defaults.
UNSAID_EXPERTS: dict[str, object] = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}
EXPERTS = {"num_experts_per_tok": "expert_used_count"}
DELTA = {
    "num_hidden_layers": None,
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
DELTA_EXPERTS = {
    **DELTA,
    **EXPERTS,
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GRANITE_EXPERTS = {
    **GRANITE,
    **EXPERTS,
    "num_local_experts": "expert_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
GRANITE_HYBRID = {**GRANITE_EXPERTS, **MAMBA, "num_key_value_heads": None}
DEEPSEEK_EXPERTS = EXPERTS | {
    "num_hidden_layers": None,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
NEMOTRON_H = {
    **EXPERTS,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_key_value_heads": None,
    "rms_norm_eps": None,
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
GEMMA4 = {
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "head_dim": "attention.key_length_swa",
    "global_head_dim": "attention.key_length",
    "intermediate_size": None,
    "num_key_value_heads": None,
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
