"""A GGUF file's metadata -> the config.json that the same model has in the Hugging Face layout."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.gguf import layout
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY, WITH_TENSOR
from onward.checkpoint.gguf.family import GgufFamily
from onward.checkpoint.gguf.keys import NUMBERS, OFF_AT_ZERO
from onward.checkpoint.gguf.known_keys import check_unread, unknown_keys
from onward.checkpoint.gguf.metadata import Keys, list_of, number, same_everywhere
from onward.checkpoint.gguf.names import with_fused_experts
from onward.checkpoint.gguf.reader import GgufTensor
from onward.checkpoint.gguf.rope import rope_parameters
from onward.errors import ConfigError, UnsupportedArchitectureError


def family_of(metadata: Mapping[str, Any], tensors: Collection[str], where: object) -> GgufFamily:
    """The line of the table that the file's architecture has, and its keys and tensors.

    Raises:
        ConfigError: it names none. UnsupportedArchitectureError: the table has no such line.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{where}: general.architecture must be a name; got {architecture!r}")
    if architecture not in FAMILIES:
        raise UnsupportedArchitectureError(
            f"{where}: architecture {architecture!r} is not supported in GGUF; supported are {', '.join(FAMILIES)}"
        )
    family = _line(architecture, metadata, tensors)
    if not _has(tensors, ".ffn_gate_up_exps.weight"):
        return family
    return family._replace(names=with_fused_experts(family.names), order=layout.with_fused_experts(family.order))


def _line(architecture: str, metadata: Mapping[str, Any], tensors: Collection[str]) -> GgufFamily:
    keys = Keys(metadata)
    for (name, key), family in WITH_KEY.items():
        value = keys.get(key)
        values = list_of(value) or [value]
        if name == architecture and any(isinstance(each, int | np.integer) and each for each in values):
            return family
    for (name, end), family in WITH_TENSOR.items():
        if name == architecture and _has(tensors, end):
            return family
    return FAMILIES[architecture]


def _has(tensors: Collection[str], end: str) -> bool:
    return any(name.endswith(end) for name in tensors)


def config_of(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: object) -> dict[str, Any]:
    """config.json's fields. What is wrong in them is found where every config.json is read.

    Raises:
        ConfigError: the metadata say something that no field of config.json does.
    """
    return _config_and_keys(metadata, tensors, where)[0]


def unknown_keys_of(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: object) -> list[str]:
    """The names of metadata that are ignored because neither llama.cpp nor Onward knows them."""
    keys = _config_and_keys(metadata, tensors, where)[1]
    return [keys.prefix + key for key in unknown_keys(keys)]


def _config_and_keys(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: object
) -> tuple[dict[str, Any], Keys]:
    family, keys = family_of(metadata, tensors, where), Keys(metadata)
    config: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.config}
    config |= _numbers(keys, family, where)
    head_dim = head_dim_of(config)
    value_length = same_everywhere(keys.get("attention.value_length"), f"{where}: value_length")
    of_one_width = family.numbers.get("head_dim", NUMBERS["head_dim"]) == NUMBERS["head_dim"]
    if of_one_width and value_length is not None and value_length != head_dim:
        raise ConfigError(f"{where}: keys of {head_dim} and values of {value_length} numbers differ")
    if of_one_width and head_dim is not None:
        config["head_dim"] = head_dim
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for field, part in family.parts.items():
        config[field] = _has(tensors, f".{part}") if isinstance(part, str) else part(tensors)
    config["rope_parameters"] = rope_parameters(keys, tensors, head_dim, where)
    try:
        config |= family.said(keys, config)
        check_unread(keys, family, config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {metadata['general.architecture']}: {error}") from error
    return config, keys


def _numbers(keys: Keys, family: GgufFamily, where: object) -> dict[str, Any]:
    """The fields that a key has as they are."""
    numbers = {field: key for field, key in {**NUMBERS, **family.numbers}.items() if key is not None}
    found: dict[str, Any] = {}
    for field, key in numbers.items():
        value = keys.get(key)
        if value is None:
            continue
        some_have_none = key.startswith("expert_")
        value = same_everywhere(value, f"{where}: {keys.prefix}{key}", some_have_none=some_have_none)
        if value == 0 and key in OFF_AT_ZERO:
            found |= {field: None} if key.endswith("softcapping") else {}
        else:
            found[field] = value
    # config.json has defaults for these, and llama.cpp opens no file without them.
    required = {numbers.get("rms_norm_eps")}
    if "expert_used_count" in numbers.values() and number(keys, "expert_count"):
        required.add("expert_used_count")
    for name in required:
        if name is not None and name not in keys:
            raise ConfigError(f"{where}: {keys.prefix}{name} is missing")
    if NUMBERS["num_key_value_heads"] in numbers.values() and "num_attention_heads" in found:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
    ahead, layers = number(keys, "nextn_predict_layers", 0), found.get("num_hidden_layers")
    if ahead and isinstance(layers, int):
        if not isinstance(ahead, int) or not 0 < ahead < layers:
            raise ConfigError(f"{where}: {ahead} of {layers} layers predict further ahead; some must not")
        found["num_hidden_layers"] = layers - ahead
    return found


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """What the config says or implies; None where that makes no sense, which is found where it is read."""
    head_dim, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return head_dim if type(head_dim) is int and head_dim > 0 else None
