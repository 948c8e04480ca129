"""The models of each family by the names that people know, for errors and docs/supported-models.md."""

from typing import NamedTuple


class KnownModels(NamedTuple):
    """Models with the same architecture.

    names: of models, for readers. architectures: their names in config.json (`FAMILIES`), the first of the text model.
    gguf: values of `general.architecture` in GGUF files that `onward.checkpoint.gguf` reads.
    """

    names: str
    architectures: tuple[str, ...]
    gguf: tuple[str, ...] = ()


# In alphabetical order. Mistral3ForConditionalGeneration wraps several text models.
KNOWN_MODELS = (
    KnownModels("Bamba", ("BambaForCausalLM",)),
    KnownModels("DeepSeek-V2", ("DeepseekV2ForCausalLM",), ("deepseek2",)),
    KnownModels("DeepSeek-V3, DeepSeek-R1, Kimi K2", ("DeepseekV3ForCausalLM",), ("deepseek2",)),
    KnownModels("EXAONE 4", ("Exaone4ForCausalLM",), ("exaone4",)),
    KnownModels("Falcon-H1", ("FalconH1ForCausalLM",), ("falcon-h1",)),
    KnownModels("Gemma 2", ("Gemma2ForCausalLM",), ("gemma2",)),
    KnownModels("Gemma 3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3",)),
    KnownModels("Gemma 4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), ("gemma4",)),
    KnownModels("GLM-4 (2024)", ("GlmForCausalLM",)),
    KnownModels("GLM-4-0414", ("Glm4ForCausalLM",), ("glm4",)),
    KnownModels("GLM-4.5, GLM-4.6", ("Glm4MoeForCausalLM",), ("glm4moe",)),
    KnownModels("GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), ("deepseek2",)),
    KnownModels("gpt-oss", ("GptOssForCausalLM",), ("gpt-oss",)),
    KnownModels("Granite 3", ("GraniteForCausalLM",), ("granite",)),
    KnownModels("Granite 3 (MoE)", ("GraniteMoeForCausalLM",), ("granitemoe",)),
    KnownModels("Granite 3 (MoE with a shared expert)", ("GraniteMoeSharedForCausalLM",), ("granitemoe",)),
    KnownModels("Granite 4", ("GraniteMoeHybridForCausalLM",), ("granitehybrid", "granite", "granitemoe")),
    KnownModels("LFM2", ("Lfm2ForCausalLM",), ("lfm2",)),
    KnownModels("LFM2 (MoE)", ("Lfm2MoeForCausalLM",)),
    KnownModels("Llama 2, Llama 3", ("LlamaForCausalLM",), ("llama",)),
    KnownModels("Ministral", ("MinistralForCausalLM",)),
    KnownModels("Ministral 3", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")),
    KnownModels("Mistral, Mistral Small", ("MistralForCausalLM", "Mistral3ForConditionalGeneration"), ("llama",)),
    KnownModels("Mistral Small 4", ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration")),
    KnownModels("Mixtral", ("MixtralForCausalLM",), ("llama",)),
    KnownModels("Nemotron-H, Nemotron 3", ("NemotronHForCausalLM",), ("nemotron_h", "nemotron_h_moe")),
    KnownModels("OLMo 2", ("Olmo2ForCausalLM",), ("olmo2",)),
    KnownModels("OLMo 3", ("Olmo3ForCausalLM",), ("olmo2",)),
    KnownModels("Phi-3, Phi-3.5, Phi-4", ("Phi3ForCausalLM",), ("phi3",)),
    KnownModels("Qwen2, Qwen2.5", ("Qwen2ForCausalLM",), ("qwen2",)),
    KnownModels("Qwen3", ("Qwen3ForCausalLM",), ("qwen3",)),
    KnownModels("Qwen3 (MoE), Qwen3-Coder", ("Qwen3MoeForCausalLM",), ("qwen3moe",)),
    KnownModels("Qwen3-Next, Qwen3-Coder-Next", ("Qwen3NextForCausalLM",), ("qwen3next",)),
    KnownModels("Qwen3.5, Qwen3.6", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen35",)),
    KnownModels(
        "Qwen3.5 (MoE), Qwen3.6 (MoE)",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen35moe",),
    ),
    KnownModels("Seed-OSS", ("SeedOssForCausalLM",), ("seed_oss",)),
    KnownModels("SmolLM3", ("SmolLM3ForCausalLM",), ("smollm3",)),
)
