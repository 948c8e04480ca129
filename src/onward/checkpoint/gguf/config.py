"""A GGUF file's metadata -> the config.json that the same model has in the Hugging Face layout."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.gguf import layout
from onward.checkpoint.gguf.blocks import dequantized
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY, WITH_TENSOR
from onward.checkpoint.gguf.family import GgufFamily
from onward.checkpoint.gguf.keys import LENGTHS, NUMBERS, YARN
from onward.checkpoint.gguf.names import with_fused_experts
from onward.checkpoint.gguf.reader import GgufTensor
from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models.fields import positive_number
from onward.models.rope import Llama3, Unscaled, yarn_magnitude

# The three numbers of every published model whose file has `rope_freqs` (Llama 3.1 to 3.3): the file does not say them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# A divisor with which a pair turns by no angle that a float32 tells from none.
_NEVER = 1e20


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
    for (name, key), family in WITH_KEY.items():
        value = metadata.get(f"{name}.{key}")
        if name == architecture and isinstance(value, int) and value:
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
    family, prefix = family_of(metadata, tensors, where), f"{metadata['general.architecture']}."
    config: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.config}
    for field, key in {**NUMBERS, **family.numbers}.items():
        if key is not None and prefix + key in metadata:
            config[field] = _same_everywhere(metadata[prefix + key], f"{where}: {prefix}{key}")
    head_dim = head_dim_of(config)
    value_length = _same_everywhere(metadata.get(prefix + "attention.value_length"), f"{where}: value_length")
    of_one_width = family.numbers.get("head_dim", NUMBERS["head_dim"]) == NUMBERS["head_dim"]
    if of_one_width and value_length is not None and value_length != head_dim:
        raise ConfigError(f"{where}: keys of {head_dim} and values of {value_length} numbers differ")
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for field, part in family.parts.items():
        config[field] = _has(tensors, f".{part}") if isinstance(part, str) else part(tensors)
    config["rope_parameters"] = _rope(metadata, prefix, tensors, head_dim, where)
    behind = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        return config | dict(family.said.read(behind, config))
    except ConfigError as error:
        raise ConfigError(f"{where}: {metadata['general.architecture']}: {error}") from error


def _same_everywhere(value: Any, what: str) -> Any:
    """A number for all layers; some files list it for each."""
    if isinstance(value, np.ndarray):
        numbers = set(value.tolist())
        if len(numbers) != 1:
            raise ConfigError(f"{what} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
        return numbers.pop()
    return value


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """What the config says or implies; None where that makes no sense, which is found where it is read."""
    head_dim, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return head_dim if type(head_dim) is int and head_dim > 0 else None


def _rope(
    metadata: Mapping[str, Any],
    prefix: str,
    tensors: Mapping[str, GgufTensor],
    head_dim: int | None,
    where: object,
) -> dict[str, Any]:
    """The `rope_parameters` of config.json."""

    def said(key: str) -> Any:
        return _same_everywhere(metadata.get(f"{prefix}rope.{key}"), f"{where}: {prefix}rope.{key}")

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": said("freq_base")}
    rotated = said("dimension_count")
    if type(rotated) is int and head_dim and rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = said("scaling.type")
    if kind not in (None, "none"):
        rope |= {"rope_type": kind, "factor": said("scaling.factor")}
        rope |= {"original_max_position_embeddings": said("scaling.original_context_length")}
    if kind == "yarn":
        mixed = said("scaling.yarn_ext_factor")
        if isinstance(mixed, int | float) and 0 <= mixed != 1:  # below 0 is the default, 1
            raise ConfigError(f"{where}: {prefix}rope.scaling.yarn_ext_factor is {mixed}, and only 1 is supported")
        rope |= _yarn(said)
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        rope |= {f"{length}_factor": _numbers(tensors[f"rope_factors_{length}.weight"]).tolist() for length in LENGTHS}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": said("scaling.original_context_length")}
    if "rope_freqs.weight" in tensors:
        divisors = _numbers(tensors["rope_freqs.weight"])
        rope |= _proportional(divisors) or _llama3(
            divisors, positive_number(rope, "rope_theta", 10000.0), head_dim, where
        )
    return rope


def _yarn(said: Callable[[str], Any]) -> dict[str, Any]:
    """What a file says of YaRN beside its factor: the attention_factor of the model's config.json, where it had one; or
    a number by which llama.cpp multiplies the one that the factor means."""
    named = {name: said(f"scaling.{key}") for name, key in YARN.items()}
    times, factor = said("scaling.attn_factor"), said("scaling.factor")
    if named["attention_factor"] is None and isinstance(times, float) and isinstance(factor, float) and factor > 0:
        named["attention_factor"] = times * yarn_magnitude(factor)
    return {name: value for name, value in named.items() if value is not None}


def _numbers(stored: GgufTensor) -> Tensor:
    return dequantized(stored.type, stored.rows).flatten()


def _proportional(divisors: Tensor) -> dict[str, Any]:
    """Where the first pairs turn as they do without divisors, and the others have such that they do not (Gemma 4)."""
    turning = int((divisors == 1).sum())
    if not turning or not bool((divisors[:turning] == 1).all() and (divisors[turning:] >= _NEVER).all()):
        return {}
    share = turning / len(divisors)
    if share * len(divisors) < turning:  # which would make one pair fewer turn
        share = math.nextafter(share, 1.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


def _llama3(divisors: Tensor, base: float, head_dim: int | None, where: object) -> dict[str, Any]:
    """The scaling whose frequencies these divisors make; they were rounded to float32 by the converter."""
    factor = round(float(divisors.max()), 3)
    original = int(_LLAMA3["original_max_position_embeddings"])
    if 2 * len(divisors) == head_dim and factor >= 1:
        at = torch.zeros(1, 1, 1)  # any position
        plain = Unscaled().inverse_frequencies(head_dim, base, at, context=0)
        scaled = Llama3(factor, 1.0, 4.0, original).inverse_frequencies(head_dim, base, at, context=0)
        # Both sides are a few float32 operations: they agree to some units in the last of 24 bits.
        if torch.allclose(plain / divisors, scaled, rtol=2**-18, atol=0.0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise ConfigError(f"{where}: rope_freqs is of another scaling than Llama 3.1's, which is not supported")
