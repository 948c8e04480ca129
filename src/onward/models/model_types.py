"""Architectures of config files that name a model_type alone, as transformers' `AutoModelForCausalLM` takes them."""

import re
from collections.abc import Mapping
from typing import Any

from onward.models.families import FAMILIES

# Bases of names whose model_type is not their words in lower case.
_UNLIKE = {
    "GraniteMoe": "granitemoe",
    "GraniteMoeHybrid": "granitemoehybrid",
    "GraniteMoeShared": "granitemoeshared",
    "SmolLM3": "smollm3",
}


def _model_type(architecture: str) -> str:
    base, _, head = architecture.partition("For")
    kind = _UNLIKE.get(base) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", base).lower()
    is_text_part = head == "CausalLM" and f"{base}ForConditionalGeneration" in FAMILIES
    return f"{kind}_text" if is_text_part else kind


_OF_MODEL_TYPES = dict.fromkeys(("internlm3", "iquestcoder"), "LlamaForCausalLM")
_OF_MODEL_TYPES |= {_model_type(name): name for name in FAMILIES}


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
