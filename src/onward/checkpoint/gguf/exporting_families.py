"""The table of what is written as GGUF: an architecture of config.json -> a line of the table of what is read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from onward.checkpoint.gguf import exporting_configs as configs
from onward.checkpoint.gguf import exporting_gemma, exporting_mamba
from onward.checkpoint.gguf import exporting_restated as restated
from onward.checkpoint.gguf.exporting_fields import common
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY, WITH_TENSOR
from onward.checkpoint.gguf.family import GgufFamily
from onward.errors import RequestError
from onward.models import Architecture
from onward.models.blocks import Decoder, Experts


class Written(NamedTuple):
    """architecture: GGUF's. family: its line. config: gives a config.json all fields of the family. weights: (the
    checkpoint's config.json, these fields, the weights by stock name) -> the weights as a checkpoint of the line's own
    architecture has them."""

    architecture: str
    family: GgufFamily
    config: configs.Completed = configs.as_it_is
    weights: Callable[[Mapping[str, Any], Mapping[str, Any], restated.Weights], restated.Weights] = restated.as_they_are


def _line(name: str, **changes: Any) -> Written:
    return Written(name, FAMILIES[name], **changes)


def _text_part(line: Written) -> Written:
    """The text part of checkpoints that read images, too."""

    def config(whole: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
        return line.config(configs.text_of(whole), decoder) | {"architectures": [line.family.architecture]}

    def weights(whole: Mapping[str, Any], fields: Mapping[str, Any], named: restated.Weights) -> restated.Weights:
        return line.weights(configs.text_of(whole), fields, restated.text_of(named))

    return line._replace(config=config, weights=weights)


# Lines that turn round by themselves.
_PLAIN = (*("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "exaone4", "granite", "granitemoe", "smollm3", "seed_oss"),)
WRITTEN: dict[str, Written] = {
    **{FAMILIES[name].architecture: _line(name) for name in _PLAIN},
    "MixtralForCausalLM": Written("llama", WITH_KEY["llama", "expert_count"]),
    "Glm4ForCausalLM": _line("glm4", config=common),
    "Glm4MoeForCausalLM": _line("glm4moe", config=configs.glm_experts),
    "Gemma2ForCausalLM": _line("gemma2", config=exporting_gemma.gemma2),
    "Gemma3ForCausalLM": _line("gemma3", config=exporting_gemma.gemma3),
    "Gemma4ForCausalLM": _line("gemma4", config=exporting_gemma.gemma4),
    "Olmo2ForCausalLM": _line("olmo2", config=configs.untied, weights=restated.untied),
    "Olmo3ForCausalLM": Written(
        "olmo2", WITH_KEY["olmo2", "attention.sliding_window"], configs.untied, restated.untied
    ),
    "GptOssForCausalLM": _line("gpt-oss", config=configs.untied, weights=restated.untied),
    "MistralForCausalLM": _line("llama"),
    "Qwen3_5ForCausalLM": _line("qwen35", config=configs.delta),
    "Qwen3_5MoeForCausalLM": _line("qwen35moe", config=configs.delta_experts),
    "Qwen3NextForCausalLM": _line("qwen3next", config=configs.delta_experts, weights=restated.delta_apart),
    "Lfm2ForCausalLM": _line("lfm2", config=configs.short_convolutions),
    "GraniteMoeSharedForCausalLM": Written("granitemoe", WITH_KEY["granitemoe", "expert_shared_feed_forward_length"]),
    "GraniteMoeHybridForCausalLM": Written(
        "granitehybrid", WITH_KEY["granitehybrid", "expert_count"], config=exporting_mamba.granite_hybrid
    ),
    "FalconH1ForCausalLM": _line("falcon-h1", config=exporting_mamba.falcon_h1, weights=exporting_mamba.with_factors),
    "NemotronHForCausalLM": _line("nemotron_h_moe", config=exporting_mamba.nemotron_h),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        Written("deepseek2", WITH_TENSOR["deepseek2", ".attn_k_b.weight"], config=configs.latents),
    ),
}
WRITTEN |= {
    f"{name}ForConditionalGeneration": _text_part(WRITTEN[f"{name}ForCausalLM"])
    for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
}
# What a model without experts has in place of these.
_DENSE = {
    "GraniteMoeHybridForCausalLM": _line("granitehybrid", config=exporting_mamba.granite_hybrid),
    "NemotronHForCausalLM": _line("nemotron_h", config=exporting_mamba.nemotron_h),
}


def written(config: Mapping[str, Any], decoder: Architecture) -> Written:
    """The line of a config.json's architecture.

    Raises:
        RequestError: it has none that is written.
    """
    (architecture,) = config["architectures"]
    if architecture not in WRITTEN:
        raise RequestError(f"{architecture} cannot be written as GGUF; these can: {', '.join(WRITTEN)}")
    if architecture in _DENSE and not any(isinstance(layer.feed_forward, Experts) for layer in decoder.layers):
        return _DENSE[architecture]
    return WRITTEN[architecture]
