"""The table of model families: one file per family or group, which lists its architectures and reads their configs; and
the models by the names that people know, for errors and docs/supported-models.md."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models.architecture import Architecture
from onward.models.fields import Config, TrackedFields, words


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


_FAMILIES = words("deepseek gemma gemma4 glm gpt_oss granite hybrids lfm2 llama mistral olmo qwen")  # their files

# An architecture's name in config.json -> the function that reads its config.
FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    name: read for file in _FAMILIES for name, read in import_module(f"{__name__}.{file}").ARCHITECTURES.items()
}


def read_config(config: Config) -> Architecture:
    """Read a checkpoint's config.json.

    Raises:
        ConfigError: a field is missing, wrong or unknown to the family.
        UnsupportedArchitectureError: there is no such family.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json: 'architectures' must name one architecture; got {names!r}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        supported = ", ".join(known.names for known in KNOWN_MODELS)
        raise UnsupportedArchitectureError(f"architecture {names[0]!r} is not supported; supported are {supported}")
    fields = TrackedFields(config)
    architecture = FAMILIES[names[0]](fields)
    fields.check_unread(names[0])
    return architecture


# Class name prefixes whose model_type is not their words in lower case.
_UNLIKE = {
    "GraniteMoe": "granitemoe",
    "GraniteMoeHybrid": "granitemoehybrid",
    "GraniteMoeShared": "granitemoeshared",
    "SmolLM3": "smollm3",
}


def model_type(architecture: str) -> str:
    """transformers' model_type of an architecture."""
    base, _, head = architecture.partition("For")
    kind = _UNLIKE.get(base) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", base).lower()
    is_text_part = head == "CausalLM" and f"{base}ForConditionalGeneration" in FAMILIES
    return f"{kind}_text" if is_text_part else kind


_OF_MODEL_TYPES = dict.fromkeys(("internlm3", "iquestcoder"), "LlamaForCausalLM")
_OF_MODEL_TYPES |= {model_type(name): name for name in FAMILIES}


_CLASSIFIER = "ForSequenceClassification"
# Encoders, by a part of their model_type; some have a causal form.
_ENCODERS = re.compile("bert|electra|mpnet|deberta|luke|funnel|nomic|gte|jina|^new$|^t5|^mt5|^umt5")


def refuse_encoder(config: Config) -> None:
    """Raise `UnsupportedArchitectureError` for a model that attends in both directions: no cache of a prefix serves
    it."""
    name, kind = str((config.get("architectures") or [""])[0]), str(config.get("model_type"))
    is_causal_form = name.endswith(("ForCausalLM", "LMHeadModel")) or config.get("is_decoder") is True
    both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
    if both_ways or (_ENCODERS.search(kind) is not None and not is_causal_form):
        raise UnsupportedArchitectureError(
            f"{name or kind} is an encoder: its tokens attend to later ones, and Onward runs decoders. For embeddings "
            "use a causal model, such as Qwen/Qwen3-Embedding-0.6B, or run this one with sentence-transformers"
        )


def with_architecture(config: Config) -> dict[str, Any]:
    """A config.json with the architecture of its model_type, where it names none, only the base model ("LlamaModel"),
    as files saved without a head do, or a classifier ("LlamaForSequenceClassification")."""
    kind = config.get("model_type")
    architecture = _OF_MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        return dict(config)
    base = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    if config.get("architectures") and config["architectures"] not in ([f"{base}Model"], [f"{base}{_CLASSIFIER}"]):
        return dict(config)
    return {**config, "architectures": [architecture]}
