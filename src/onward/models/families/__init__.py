"""The table of model families: one file per family or group, which lists its architectures and reads their configs."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models.architecture import Architecture
from onward.models.families.catalog import KNOWN_MODELS
from onward.models.fields import Config, TrackedFields, words

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


def _model_type(architecture: str) -> str:
    base, _, head = architecture.partition("For")
    kind = _UNLIKE.get(base) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", base).lower()
    is_text_part = head == "CausalLM" and f"{base}ForConditionalGeneration" in FAMILIES
    return f"{kind}_text" if is_text_part else kind


_OF_MODEL_TYPES = dict.fromkeys(("internlm3", "iquestcoder"), "LlamaForCausalLM")
_OF_MODEL_TYPES |= {_model_type(name): name for name in FAMILIES}


def with_architecture(config: Config) -> dict[str, Any]:
    """A config.json with the architecture of its model_type, where it names none or only the base model
    ("LlamaModel"), as files saved without a head do."""
    kind = config.get("model_type")
    architecture = _OF_MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        return dict(config)
    base = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "Model"
    if config.get("architectures") and config["architectures"] != [base]:
        return dict(config)
    return {**config, "architectures": [architecture]}
