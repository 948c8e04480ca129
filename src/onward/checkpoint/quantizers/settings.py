"""The fields of a quantization_config, and rules by which modules have settings of their own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.errors import warn_once

# Settings of one module over those of the checkpoint; empty where it has none.
Overrides = Callable[[str], Mapping[str, Any]]

# Fields of every method: modules without quantized tensors are read as they are stored, whatever these lists say.
OF_ALL_METHODS = {
    *("quant_method", "modules_to_not_convert", "modules_to_convert", "llm_int8_skip_modules", "ignore"),
    *("modules_in_block_to_quantize", "quantization_status", "run_compressed", "dequantize", "backend", "meta"),
}


@dataclass(frozen=True)
class Fields:
    """What Onward does with each field of a method's quantization_config.

    read: fields that decide how tensors are read. refused: fields that would change the weights in ways Onward does not
    have, with the values that change nothing. idle: fields that change nothing here: how the file was made, and how
    other libraries run it.
    """

    read: frozenset[str]
    idle: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for a refused field, and warn of unknown ones. null, false and empty values are absent."""
        for name, harmless in self.refused.items():
            value = settings.get(name)
            if value and value not in harmless:
                raise ValueError(f"{name} is {value!r}, which Onward does not have")
        known = known_fields(self)
        unknown = sorted(name for name, value in settings.items() if value and name not in known and name[:1] != "_")
        if unknown:
            warn_once(
                f"quantization_config has fields that Onward does not know ({', '.join(unknown)}): the weights are "
                "read as if they were not there"
            )


def known_fields(fields: Fields) -> frozenset[str]:
    """All fields that a method knows, those of every method included."""
    return fields.read | fields.idle | fields.refused.keys() | OF_ALL_METHODS


def size(settings: Mapping[str, Any], name: str, default: int) -> int | None:
    """How many inputs share a scale; None for all, which files write as -1."""
    value = settings.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ValueError(f"{name} must be a whole number above 0, or -1 for one group; got {value!r}")
    return None if value == -1 else value


def no_overrides(module: str) -> Mapping[str, Any]:
    """For methods whose settings are those of all modules."""
    return {}


@dataclass(frozen=True)
class DynamicRules:
    """GPTQModel's "dynamic": regular expressions to settings. The first that matches the start of a module's name
    decides; "-:" before one leaves its modules in floats, "+:" or nothing gives them these settings."""

    rules: tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]

    @classmethod
    def read(cls, dynamic: Any) -> "DynamicRules":
        """Raises ValueError for what is no such object."""
        if not isinstance(dynamic, Mapping):
            raise ValueError(f"dynamic must map regular expressions to settings; got {dynamic!r}")
        rules = []
        for text, settings in dynamic.items():
            settings = {} if settings is None or text.startswith("-:") else settings
            if not isinstance(settings, Mapping):
                raise ValueError(f"dynamic: {text!r} must have an object of settings; got {settings!r}")
            rules.append((_pattern("dynamic", text.removeprefix("-:").removeprefix("+:")), settings))
        return cls(tuple(rules))

    def __call__(self, module: str) -> Mapping[str, Any]:
        return next((settings for pattern, settings in self.rules if pattern.match(module)), {})


@dataclass(frozen=True)
class ExtraConfig:
    """AutoRound's "extra_config": settings by a module's name, or else by a regular expression found in it."""

    by_name: Mapping[str, Mapping[str, Any]]
    patterns: tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]

    @classmethod
    def read(cls, extra: Any) -> "ExtraConfig":
        """Raises ValueError for what is no such object."""
        if not isinstance(extra, Mapping) or not all(isinstance(settings, Mapping) for settings in extra.values()):
            raise ValueError(f"extra_config must map names of modules to settings; got {extra!r}")
        special = [(name, settings) for name, settings in extra.items() if re.search(r"[*+?^$()\[\]{}|\\]", name)]
        return cls(extra, tuple((_pattern("extra_config", name), settings) for name, settings in special))

    def __call__(self, module: str) -> Mapping[str, Any]:
        if module in self.by_name:
            return self.by_name[module]
        return next((settings for pattern, settings in self.patterns if pattern.search(module)), {})


def _pattern(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{name}: {text!r} is not a regular expression ({error})") from error
