"""Architectures of config files that name a model_type alone, as transformers' `AutoModelForCausalLM` takes them."""

from collections.abc import Mapping
from typing import Any

_OF_MODEL_TYPES = {
    "bamba": "BambaForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "internlm3": "LlamaForCausalLM",
    "iquestcoder": "LlamaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the architecture that its model_type stands for, where it names none, or the base model alone
    ("LlamaModel"), as files saved without a head do."""
    kind = config.get("model_type")
    architecture = _OF_MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        return dict(config)
    base = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "Model"
    if config.get("architectures") and config["architectures"] != [base]:
        return dict(config)
    return {**config, "architectures": [architecture]}
