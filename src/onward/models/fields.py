"""Fields of a config.json by kind: a value of another kind raises an error that names the field."""

from collections.abc import Mapping
from typing import Any

import torch

from onward.errors import ConfigError

_REQUIRED = object()
# Positions and token ids are int32.
LARGEST = 2**31 - 1
_FLOAT = torch.finfo(torch.float32)


def positive_int(
    fields: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, where: str = "config.json", most: int = LARGEST
) -> int:
    """A required (or defaulted) whole number from 1 to `most`. null counts as absent."""
    value = _value_or_default(fields, name, default, where)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ConfigError(f"{where}: {name!r} must be a whole number from 1 to {most}; got {value!r}")
    return value


def positive_number(
    fields: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, where: str = "config.json"
) -> float:
    """A required (or defaulted) number above zero within the range of float32. null counts as absent."""
    value = _value_or_default(fields, name, default, where)
    if not isinstance(value, int | float) or isinstance(value, bool) or not _FLOAT.tiny <= value <= _FLOAT.max:
        raise ConfigError(
            f"{where}: {name!r} must be a positive number within the range of float32 ({_FLOAT.tiny:.3g} to "
            f"{_FLOAT.max:.3g}); got {value!r}"
        )
    return float(value)


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """true or false; null and absent mean false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {name!r} must be true or false; got {value!r}")
    return bool(value)


def json_object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; null and absent mean an empty one."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name!r} must be an object; got {value!r}")
    return dict(value or {})


def _value_or_default(fields: Mapping[str, Any], name: str, default: Any, where: str) -> Any:
    value = fields.get(name)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise ConfigError(f"{where}: {name!r} is missing")
    return default
