"""The table of families: one file a family, which names its architectures and reads their config.json."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models.architecture import Architecture
from onward.models.fields import ReadFields

_FAMILIES = (  # the names of their files
    "bamba",
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granite_moe",
    "granite_moe_hybrid",
    "lfm2",
    "lfm2_moe",
    "llama",
    "ministral",
    "mistral",
    "mistral3",
    "mistral4",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
)

# An architecture's name in config.json -> the function that reads its config.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: family.read_config
    for family in (import_module(f"{__name__}.{file}") for file in _FAMILIES)
    for name in family.ARCHITECTURES
}


def read_config(config: Mapping[str, Any]) -> Architecture:
    """A checkpoint's config.json -> the numbers of its model and its forward.

    Raises:
        ConfigError: a field is missing or wrong, or the family does not know it. UnsupportedArchitectureError: there is
        no such family.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json: 'architectures' must name one architecture; got {names!r}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise UnsupportedArchitectureError(
            f"architecture {names[0]!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    fields = ReadFields(config)
    architecture = FAMILIES[names[0]](fields)
    fields.check_unread(names[0])
    return architecture
