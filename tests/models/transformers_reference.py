"""The reference results of every family: `transformers` with small random models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

transformers.utils.logging.disable_progress_bar()

# Logits are made of order 1 below, where float32 resolves 1e-7; the few hundred roundings on the way to one, in
# another order here than there, leave about 3e-6. A wrong angle, mask, norm or bias shifts them by 1e-2 or more.
TOLERANCE = 1e-4
NEW_TOKENS = 64
# Past every window below and past the original length of the RoPE scalings, by 37 already.
PROMPT_LENGTHS = (37, 18, 1)

CONFIGS = {
    "qwen3": Qwen3Config,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5 experts": transformers.Qwen3_5MoeTextConfig,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "phi3": Phi3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "smollm3": transformers.SmolLM3Config,
    "granite": transformers.GraniteConfig,
    "glm": transformers.GlmConfig,
    "glm4": transformers.Glm4Config,
    "seedoss": transformers.SeedOssConfig,
    "exaone4": transformers.Exaone4Config,
    "mixtral": MixtralConfig,
    "qwen3 experts": Qwen3MoeConfig,
    "glm 4.5": Glm4MoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "gemma4": transformers.Gemma4TextConfig,
    "deepseek v3": transformers.DeepseekV3Config,
    "lfm2 experts": transformers.Lfm2MoeConfig,
    "lfm2": transformers.Lfm2Config,
    "mistral4": transformers.Mistral4Config,
    "glm 4.7 flash": transformers.Glm4MoeLiteConfig,
    "deepseek v2": transformers.DeepseekV2Config,
    "granite moe": transformers.GraniteMoeConfig,
    "granite moe shared": transformers.GraniteMoeSharedConfig,
    "granite 4": transformers.GraniteMoeHybridConfig,
    "bamba": transformers.BambaConfig,
    "falcon h1": transformers.FalconH1Config,
    "nemotron h": transformers.NemotronHConfig,
}
MODELS = {
    "qwen3": transformers.Qwen3ForCausalLM,
    "qwen3_next": transformers.Qwen3NextForCausalLM,
    "qwen3_5": transformers.Qwen3_5ForCausalLM,
    "qwen3_5 experts": transformers.Qwen3_5MoeForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "ministral": transformers.MinistralForCausalLM,
    "ministral3": transformers.Ministral3ForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "gemma3": transformers.Gemma3ForCausalLM,
    "olmo2": transformers.Olmo2ForCausalLM,
    "olmo3": transformers.Olmo3ForCausalLM,
    "smollm3": transformers.SmolLM3ForCausalLM,
    "granite": transformers.GraniteForCausalLM,
    "glm": transformers.GlmForCausalLM,
    "glm4": transformers.Glm4ForCausalLM,
    "seedoss": transformers.SeedOssForCausalLM,
    "exaone4": transformers.Exaone4ForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3 experts": transformers.Qwen3MoeForCausalLM,
    "glm 4.5": transformers.Glm4MoeForCausalLM,
    "gpt_oss": transformers.GptOssForCausalLM,
    "gemma4": transformers.Gemma4ForCausalLM,
    "deepseek v3": transformers.DeepseekV3ForCausalLM,
    "lfm2 experts": transformers.Lfm2MoeForCausalLM,
    "lfm2": transformers.Lfm2ForCausalLM,
    "mistral4": transformers.Mistral4ForCausalLM,
    "glm 4.7 flash": transformers.Glm4MoeLiteForCausalLM,
    "deepseek v2": transformers.DeepseekV2ForCausalLM,
    "granite moe": transformers.GraniteMoeForCausalLM,
    "granite moe shared": transformers.GraniteMoeSharedForCausalLM,
    "granite 4": transformers.GraniteMoeHybridForCausalLM,
    "bamba": transformers.BambaForCausalLM,
    "falcon h1": transformers.FalconH1ForCausalLM,
    "nemotron h": transformers.NemotronHForCausalLM,
}
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_hidden_layers": 4,
}
# Families whose configs have ids by default that lie past the small vocabulary.
OTHER_IDS = {
    family: {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    for family in (
        "gemma2",
        "gemma3",
        "gemma4",
        "olmo2",
        "olmo3",
        "smollm3",
        "granite",
        "glm",
        "glm4",
        "seedoss",
        "exaone4",
        "granite moe",
        "granite moe shared",
        "granite 4",
        "nemotron h",
    )
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 4.0, 9.0],
    "partial_rotary_factor": 0.75,
}
NO_SPECIAL_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LOCAL = {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 200.0}}
# Families whose norms multiply with 1 + weight.
ADDED_TO_ONE = ("gemma2", "gemma3")
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}


@dataclass(frozen=True)
class Case:
    """A family and the fields in which its config differs from `SMALL`."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def is_dynamic(self) -> bool:
        return self.fields.get("rope_parameters") == DYNAMIC

    @property
    def is_long(self) -> bool:
        """Whether it has LongRoPE's factors for long texts: tests load models for 128 positions."""
        rope = self.fields.get("rope_parameters", {})
        return rope.get("rope_type") == "longrope" and self.fields["original_max_position_embeddings"] < 128


CASES = {
    # head_dim is not hidden_size / num_attention_heads = 8 in any Qwen3 here.
    "qwen3": Case("qwen3", {"head_dim": 24}),
    "qwen3 tied": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 one kv head": Case("qwen3", {"head_dim": 6, "num_key_value_heads": 1}),
    "qwen3 biases": Case("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 window from layer 1": Case(
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3 window by layer": Case(
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 window not used": Case("qwen3", {"head_dim": 16, "use_sliding_window": False, "sliding_window": 3}),
    "qwen3_next": Case("qwen3_next", DELTA | {"num_experts": 0, "full_attention_interval": 2}),
    "qwen3_next biases, all layers dense": Case(
        "qwen3_next",
        DELTA
        | {
            "attention_bias": True,
            "mlp_only_layers": [0, 1, 2, 3],
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "qwen3_5": Case(
        "qwen3_5",
        DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_5 tied": Case("qwen3_5", DELTA | {"tie_word_embeddings": True, "linear_num_key_heads": 1}),
    "qwen2": Case("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied, one kv head": Case("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 window everywhere": Case("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "llama, every head its own": Case("llama", {"num_key_value_heads": 4}),
    "llama head_dim of its own": Case("llama", {"head_dim": 10, "tie_word_embeddings": True}),
    "llama biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama linear": Case("llama", {"rope_parameters": LINEAR, "max_position_embeddings": 128}),
    "llama llama3": Case("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama dynamic": Case("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama yarn": Case("llama", {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}, "head_dim": 20}),
    "qwen2 yarn, attention factor": Case("qwen2", {"rope_parameters": YARN | {"attention_factor": 0.8}}),
    "qwen3 yarn, mscale, not truncated": Case(
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": YARN | {"beta_fast": 3.0, "truncate": False, "mscale": 1.5, "mscale_all_dim": 0.5},
        },
    ),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral window": Case("mistral", {"sliding_window": 6, "num_key_value_heads": 1}),
    "mistral window of itself": Case("mistral", {"sliding_window": 1, "head_dim": 12}),
    "mistral yarn": Case("mistral", {"rope_parameters": YARN, "sliding_window": None}),
    "ministral": Case("ministral", {"sliding_window": 7, "num_key_value_heads": 1, "head_dim": 12}),
    "ministral window by layer, tied": Case(
        "ministral",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": Case(
        "ministral3", {"head_dim": 12, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}} | NO_SPECIAL_IDS
    ),
    "ministral3 window, tied": Case(
        "ministral3",
        {
            "head_dim": 8,
            "sliding_window": 20,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        }
        | NO_SPECIAL_IDS,
    ),
    "phi3 window, tied": Case("phi3", {"sliding_window": 6, "tie_word_embeddings": True} | NO_SPECIAL_IDS),
    "phi3 longrope, short": Case(
        "phi3",
        {"max_position_embeddings": 256, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE}
        | NO_SPECIAL_IDS,
    ),
    "phi3 longrope, long": Case(
        "phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE} | NO_SPECIAL_IDS
    ),
    "mistral window past the prompt": Case("mistral", {"sliding_window": 60, "tie_word_embeddings": True}),
    "gemma2": Case("gemma2", {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 5, **CAPS}),
    "gemma2 biases, tied, no caps": Case(
        "gemma2",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3": Case(
        "gemma3", {"head_dim": 12, "query_pre_attn_scalar": 5, "sliding_window": 6, "rope_parameters": LOCAL}
    ),
    "gemma3 biases, tied, capped, scaled": Case(
        "gemma3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 2.0,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "olmo2": Case("olmo2"),
    "olmo2 biases, one kv head, tied": Case(
        "olmo2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 12}
    ),
    "olmo3": Case("olmo3", {"num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3 biases, scaled": Case(
        "olmo3",
        {
            "attention_bias": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {"rope_theta": 300.0}},
        },
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3 biases, window": Case(
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.7,
            "head_dim": 12,
        },
    ),
    "granite biases, tied": Case("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm": Case("glm", {"head_dim": 16}),
    "glm whole heads, no biases": Case(
        "glm",
        {
            "head_dim": 10,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4": Case("glm4", {"head_dim": 20, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.3}}),
    "seedoss": Case("seedoss", {"head_dim": 12}),
    "seedoss other biases": Case(
        "seedoss", {"head_dim": 6, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
    ),
    "exaone4": Case("exaone4", {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 12}),
    "exaone4 without windows": Case(
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 10}
CASES |= {
    "mixtral": Case("mixtral", {"num_local_experts": 5}),
    "mixtral window, three of seven": Case(
        "mixtral", {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 6, "head_dim": 10}
    ),
    "mixtral one expert, tied": Case(
        "mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True}
    ),
    "qwen3 experts": Case("qwen3 experts", EXPERTS),
    "qwen3 experts normalized, biases": Case(
        "qwen3 experts", EXPERTS | {"norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 6}
    ),
    "qwen3 experts in every second layer": Case("qwen3 experts", EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3 experts and dense layers, window": Case(
        "qwen3 experts",
        EXPERTS
        | {
            "mlp_only_layers": [0, 2],
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
}

GATED = DELTA | EXPERTS | {"shared_expert_intermediate_size": 12, "full_attention_interval": 2}
CASES |= {
    "qwen3_next experts": Case("qwen3_next", GATED),
    "qwen3_next experts and dense layers, weights as they are": Case(
        "qwen3_next", GATED | {"mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True}
    ),
    "qwen3_next experts in every second layer": Case(
        "qwen3_next", GATED | {"decoder_sparse_step": 2, "num_experts_per_tok": 6, "attention_bias": True}
    ),
    "qwen3_5 experts": Case("qwen3_5 experts", GATED),
    "qwen3_5 experts, one chosen, tied": Case(
        "qwen3_5 experts",
        GATED
        | {
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.6},
        },
    ),
}

GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
CASES |= {
    "glm 4.5": Case("glm 4.5", GLM),
    "glm 4.5 norms, biases, scaled": Case(
        "glm 4.5",
        GLM
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 12,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm 4.5 groups, two dense layers": Case(
        "glm 4.5", GLM | {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 2, "num_key_value_heads": 1}
    ),
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
DEEPSEEK = LATENT | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
CASES |= {
    "deepseek v3": Case("deepseek v3", DEEPSEEK),
    "deepseek v3 groups, biases, two shared": Case(
        "deepseek v3",
        DEEPSEEK
        | {
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.3,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "deepseek v3 without bottleneck, pairs apart, odd sizes": Case(
        "deepseek v3",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "qk_nope_head_dim": 7,
            "v_head_dim": 5,
            "kv_lora_rank": 17,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek v3 yarn, all dense": Case(
        "deepseek v3",
        DEEPSEEK | {"first_k_dense_replace": 3, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.5}},
    ),
}
FLASH = {name: value for name, value in DEEPSEEK.items() if name not in ("first_k_dense_replace", "num_mtp_layers")}
MISTRAL4 = FLASH | NO_SPECIAL_IDS
CASES |= {
    "deepseek v2": Case("deepseek v2", FLASH | {"first_k_dense_replace": 1}),
    "deepseek v2 without bottleneck, yarn, biases": Case(
        "deepseek v2",
        FLASH
        | {
            "q_lora_rank": None,
            "attention_bias": True,
            "routed_scaling_factor": 3.0,
            "n_shared_experts": 1,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v2 groups by their best": Case(
        "deepseek v2",
        FLASH | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    "glm 4.7 flash": Case("glm 4.7 flash", FLASH),
    "glm 4.7 flash layers by type, groups, biases": Case(
        "glm 4.7 flash",
        FLASH
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 2,
            "attention_bias": True,
            "rope_interleave": False,
            "q_lora_rank": None,
            "norm_topk_prob": False,
        },
    ),
    "mistral4": Case("mistral4", MISTRAL4 | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}}),
    "mistral4 groups, a dense layer, mscale": Case(
        "mistral4",
        MISTRAL4
        | {
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "rms_norm_eps": None, "block_auto_adjust_ff_dim": False}
LIQUID = {"norm_eps": 1e-4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES |= {
    "lfm2": Case("lfm2", CONV),
    "lfm2 biases, untied, adjusted": Case(
        "lfm2",
        CONV
        | {
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
            "norm_eps": 1e-3,
            "num_key_value_heads": 1,
        },
    ),
    "lfm2 by index, one tap": Case(
        "lfm2",
        CONV | {"layer_types": None, "full_attn_idxs": [0, 2], "conv_L_cache": 1, "rope_parameters": LLAMA3},
    ),
    "lfm2 experts": Case("lfm2 experts", CONV | LIQUID | {"num_dense_layers": 1}),
    "lfm2 experts without bias, scaled": Case(
        "lfm2 experts",
        CONV
        | LIQUID
        | {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}
        | {"routed_scaling_factor": 1.7, "conv_bias": True, "tie_word_embeddings": True},
    ),
}


OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 10, "sliding_window": 6}
CASES |= {
    "gpt_oss": Case("gpt_oss", OSS | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt_oss clamped, tied": Case(
        "gpt_oss",
        OSS
        | {
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gpt_oss no biases, other types, every expert": Case(
        "gpt_oss",
        OSS
        | {
            "attention_bias": False,
            "num_experts_per_tok": 5,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"rope_theta": 150000.0},
        },
    ),
}


TWO_TYPES = {
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
E_SIZE = TWO_TYPES | {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 101,
    "num_kv_shared_layers": 2,
}
CASES |= {
    "gemma4": Case("gemma4", TWO_TYPES | {"final_logit_softcapping": 2.0}),
    "gemma4 values of keys, other heads": Case(
        "gemma4",
        TWO_TYPES
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu",
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "gemma4 shared keys, embeddings for each layer": Case("gemma4", E_SIZE),
    "gemma4 shared keys, double width": Case(
        "gemma4", E_SIZE | {"use_double_wide_mlp": True, "num_kv_shared_layers": 3, "num_key_value_heads": 1}
    ),
    "gemma4 experts": Case(
        "gemma4",
        TWO_TYPES | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
}


CHOSEN = {"num_local_experts": 5, "num_experts_per_tok": 2}
GRANITE = CHOSEN | {"shared_intermediate_size": 20}
FACTORS = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.7,
}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8}
CASES |= {
    "granite moe": Case("granite moe", CHOSEN | FACTORS | {"attention_bias": True}),
    "granite moe shared, tied": Case("granite moe shared", GRANITE | FACTORS | {"tie_word_embeddings": True}),
    "granite moe shared, nothing shared": Case("granite moe shared", GRANITE | {"shared_intermediate_size": 0}),
    "granite 4": Case(
        "granite 4", GRANITE | FACTORS | MAMBA | {"layer_types": ["mamba", "full_attention", "linear_attention"]}
    ),
    "granite 4 turning, one group, biases, tied": Case(
        "granite 4",
        GRANITE
        | MAMBA
        | {
            "layer_types": ["linear_attention", "attention", "linear_attention"],
            "position_embedding_type": "rope",
            "rope_parameters": LLAMA3,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_expand": 1,
            "mamba_d_head": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 5,
        },
    ),
    "granite 4 dense, limited, no bias, two taps": Case(
        "granite 4",
        GRANITE
        | MAMBA
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "time_step_limit": (0.5, 1.5),
            "num_key_value_heads": 1,
        },
    ),
    "bamba": Case("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "bamba biases, tied, whole heads": Case(
        "bamba",
        MAMBA
        | {
            "attn_layer_indices": [0, 2],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "falcon h1": Case("falcon h1", MAMBA | {"mamba_d_ssm": 24}),
    "falcon h1 factors": Case(
        "falcon h1",
        MAMBA
        | {
            "mamba_d_ssm": 40,
            "lm_head_multiplier": 1.3,
            "embedding_multiplier": 1.7,
            "mlp_multipliers": [0.8, 1.2],
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.4,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
        },
    ),
    "falcon h1 norm before the gate, biases": Case(
        "falcon h1",
        MAMBA
        | {
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
            "rope_parameters": LINEAR,
        },
    ),
    "falcon h1 norm behind the gate, one group, limited, tied": Case(
        "falcon h1",
        MAMBA
        | {
            "mamba_d_ssm": 32,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
        },
    ),
}
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "head_dim": 14,
    "n_routed_experts": 6,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
CASES |= {
    "nemotron h": Case("nemotron h", NEMOTRON | {"hybrid_override_pattern": "M-M*-M"}),
    "nemotron h experts": Case("nemotron h", NEMOTRON | {"hybrid_override_pattern": "ME*EM-"}),
    "nemotron h latent experts, groups, biases": Case(
        "nemotron h",
        NEMOTRON
        | {
            "layers_block_type": ["moe", "full_attention", "linear_attention", "mlp"],
            "moe_latent_size": 12,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.6,
            "time_step_min": 0.6,
            "layer_norm_epsilon": 1e-3,
            "rms_norm_eps": 1e-3,
            "conv_kernel": 3,
            "n_groups": 1,
        },
    ),
}


def build(case: Case) -> PreTrainedModel:
    """The model of a case with random weights, in float32 with the plain attention."""
    return randomized(case.family, config_of(case))


def config_of(case: Case) -> PreTrainedConfig:
    return CONFIGS[case.family](**SMALL | OTHER_IDS.get(case.family, {}) | case.fields)


def randomized(family: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, as `build` makes it."""
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MODELS[family](config).eval()
    # The weights that transformers draws are so small that all logits would be nearly 0.
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        centre = 0 if family in ADDED_TO_ONE else 1
        is_factor = name.endswith(("norm.weight", "norm_f.weight", "scale"))
        weight.data = centre + 0.2 * noise if is_factor else noise * weight.shape[-1] ** -0.5
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn_like(buffer))
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    return model


@dataclass(frozen=True)
class Expected:
    """The results of a model for a prompt: logits [T, V] after each of its ids, and the greedy continuation."""

    prompt: list[int]
    logits: Tensor
    greedy: list[int]


def expect(model: PreTrainedModel, case: Case, length: int, guess: Callable[[list[int]], list[int]]) -> Expected:
    """The expectation for a prompt of `length`, one for which greedy decoding hangs on no rounding.

    Two right implementations may differ by TOLERANCE in each logit, so they are bound to agree on a token only
    where the best logit leads by more than twice that. Prompts are tried until one has such a lead at every step.

    Args:
        guess: the greedy continuation of a prompt that is most likely right. One forward of transformers then judges
            all of its tokens; from the first that is wrong on, it generates them one by one.
    """
    for seed in range(20):
        ids = torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))
        prompt = ids.tolist()
        logits, greedy = [], []
        for row in _next_logits(model, case, prompt, greedy, guess):
            logits.append(row)
            best = row[-1].topk(2).values
            if best[0] - best[1] <= 2 * TOLERANCE:
                break
            greedy.append(int(row[-1].argmax()))
            if len(greedy) == NEW_TOKENS:
                return Expected(prompt, logits[0], greedy)
    raise AssertionError("20 prompts in a row came within the tolerance of a tie: are the logits of order 1?")


@torch.no_grad()
def _next_logits(
    model: PreTrainedModel, case: Case, prompt: list[int], greedy: list[int], guess: Callable[[list[int]], list[int]]
) -> Iterator[Tensor]:
    """Yields logits [T, V] of the prompt, then of the prompt and what the caller has appended to `greedy`."""
    if case.is_dynamic:
        yield from _token_by_token(model, prompt, greedy)
    guessed = guess(prompt)
    logits = _logits(model, case, prompt + guessed)
    for end in range(len(prompt), len(prompt + guessed) + 1):
        yield logits[:end]
        if greedy != guessed[: len(greedy)]:
            break
    while True:
        yield _logits(model, case, prompt + greedy)


def _logits(model: PreTrainedModel, case: Case, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one forward."""
    ids = torch.tensor([tokens])
    if not case.is_long:
        return model(ids, use_cache=False).logits[0]
    # transformers takes the factors by the largest position of a forward, so a second row has that.
    positions = torch.arange(len(tokens))
    rows = torch.stack([positions, positions + 128 - len(tokens)])
    return model(ids.expand(2, -1), position_ids=rows, use_cache=False).logits[0]


def _token_by_token(model: PreTrainedModel, prompt: list[int], greedy: list[int]) -> Iterator[Tensor]:
    """Dynamic RoPE in transformers gives a token the angles of the length fed so far, so tokens are fed alone."""
    cache = transformers.DynamicCache(config=model.config)

    def feed(token: int) -> Tensor:
        return model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0]

    yield torch.cat([feed(token) for token in prompt])
    while True:
        yield feed(greedy[-1])


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
