"""The metadata of a GGUF file -> its family, and the fields of config.json. RoPE is described by the keys
"{architecture}.rope.…" and by tensors of divisors."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onward.checkpoint.gguf.blocks import dequantized
from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY, WITH_TENSOR
from onward.checkpoint.gguf.family import GgufFamily, with_fused_experts
from onward.checkpoint.gguf.keys import LENGTHS, NUMBERS, YARN, ZERO_IS_OFF, check_unread
from onward.checkpoint.gguf.reader import GgufTensor, Keys, list_of, number, same_everywhere
from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models.fields import positive_number
from onward.models.rope import Llama3, Unscaled, yarn_magnitude


def family_of(metadata: Mapping[str, Any], tensors: Collection[str], where: object) -> GgufFamily:
    """The family of a file, by its architecture, keys and tensors."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{where}: general.architecture must be a name; got {architecture!r}")
    if architecture not in FAMILIES:
        raise UnsupportedArchitectureError(
            f"{where}: architecture {architecture!r} is not supported in GGUF; supported are {', '.join(FAMILIES)}"
        )
    keys = Keys(metadata)

    def is_set(key: str) -> bool:
        value = keys.get(key)
        return any(isinstance(each, int | np.integer) and each for each in list_of(value) or [value])

    families = [family for (name, key), family in WITH_KEY.items() if name == architecture and is_set(key)]
    families += [family for (name, end), family in WITH_TENSOR.items() if name == architecture and _has(tensors, end)]
    family = [*families, FAMILIES[architecture]][0]
    return with_fused_experts(family) if _has(tensors, ".ffn_gate_up_exps.weight") else family


def _has(tensors: Collection[str], end: str) -> bool:
    return any(name.endswith(end) for name in tensors)


def config_and_keys(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: object
) -> tuple[dict[str, Any], Keys]:
    """The fields of config.json, and the keys they were read from; `ConfigError` if no field can express them."""
    family, keys = family_of(metadata, tensors, where), Keys(metadata)
    config: dict[str, Any] = {"architectures": [family.architecture], "hidden_act": "silu", **family.config}
    config |= _numbers(keys, family, where)
    head_dim = head_dim_of(config)
    value_length = same_everywhere(keys.get("attention.value_length"), f"{where}: value_length")
    has_one_width = family.numbers.get("head_dim", NUMBERS["head_dim"]) == NUMBERS["head_dim"]
    if has_one_width and value_length is not None and value_length != head_dim:
        raise ConfigError(f"{where}: key length {head_dim} and value length {value_length} must be equal")
    if has_one_width and head_dim is not None:
        config["head_dim"] = head_dim
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for field, part in family.parts.items():
        config[field] = _has(tensors, f".{part}") if isinstance(part, str) else part(tensors)
    config["rope_parameters"] = rope_parameters(keys, tensors, head_dim, where)
    try:
        config |= family.derived(keys, config)
        check_unread(keys, family, config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {metadata['general.architecture']}: {error}") from error
    return config, keys


def _numbers(keys: Keys, family: GgufFamily, where: object) -> dict[str, Any]:
    numbers = {field: key for field, key in {**NUMBERS, **family.numbers}.items() if key is not None}
    fields: dict[str, Any] = {}
    for field, key in numbers.items():
        if (value := keys.get(key)) is None:
            continue
        value = same_everywhere(value, f"{where}: {keys.prefix}{key}", ignore_zeros=key.startswith("expert_"))
        if value == 0 and key in ZERO_IS_OFF:
            fields |= {field: None} if key.endswith("softcapping") else {}
        else:
            fields[field] = value
    # config.json has defaults for these, but llama.cpp requires them.
    required = {numbers.get("rms_norm_eps")}
    if "expert_used_count" in numbers.values() and number(keys, "expert_count"):
        required.add("expert_used_count")
    for name in required:
        if name is not None and name not in keys:
            raise ConfigError(f"{where}: {keys.prefix}{name} is missing")
    if NUMBERS["num_key_value_heads"] in numbers.values() and "num_attention_heads" in fields:
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    ahead, layers = number(keys, "nextn_predict_layers", 0), fields.get("num_hidden_layers")
    if ahead and isinstance(layers, int):
        if not isinstance(ahead, int) or not 0 < ahead < layers:
            raise ConfigError(f"{where}: nextn_predict_layers must be less than the {layers} layers; got {ahead}")
        fields["num_hidden_layers"] = layers - ahead
    return fields


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """The config's head_dim, explicit or implied; None if it is invalid, which the config's reader reports."""
    head_dim, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return head_dim if type(head_dim) is int and head_dim > 0 else None


# ── RoPE ──────────────────────────────────────────────────────────────────────────────────────────────────────

# These are the same in every published model with `rope_freqs` (Llama 3.1 to 3.3); the file does not contain them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# A divisor with which float32 angles are effectively 0.
_UNROTATED = 1e20
# Bounds the memory for divisors: a file may claim any head width.
_MAX_HEAD_DIM = 2**16
# llama.cpp's default.
BASE = 10000.0


def rope_parameters(
    keys: Keys, tensors: Mapping[str, GgufTensor], head_dim: int | None, where: object
) -> dict[str, Any]:
    """Read the parameters like llama.cpp: a factor without a type is linear, `rope.scale_linear` is its old name, and
    `rope.scaling.attn_factor` scales rotated queries and keys for every type."""

    def number(key: str) -> Any:
        return same_everywhere(keys.get(f"rope.{key}"), f"{where}: {keys.prefix}rope.{key}")

    _check_divisors(tensors, where)
    base, kind = number("freq_base"), number("scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": BASE if base is None else base}
    rope |= _share(number("dimension_count"), head_dim, f"{where}: {keys.prefix}rope.dimension_count")
    original = number("scaling.original_context_length") or None  # 0 means the context length, as in llama.cpp
    factors = [number(key) for key in ("scaling.factor", "scale_linear")]
    factor = next((value for value in factors if value is not None), 1)
    factor = 1 if factor == 0 or kind == "none" else factor
    magnitude, mixed = number("scaling.attn_factor"), number("scaling.yarn_ext_factor")
    # Negative means the default: 1 for YaRN, and 0 otherwise.
    if isinstance(mixed, int | float) and mixed >= 0 and mixed != (kind == "yarn"):
        raise ConfigError(
            f"{where}: {keys.prefix}rope.scaling.yarn_ext_factor is {mixed}, and only {int(kind == 'yarn')} is "
            f"supported with rope.scaling.type {kind or 'linear'!r}"
        )
    if kind == "yarn":
        rope |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        rope |= _yarn(number, factor)
    elif kind not in (None, "none", "linear", "longrope") or (kind == "longrope" and not _has_factors(tensors)):
        rope |= {"rope_type": kind, "factor": factor}  # refused when config.json is read
    if _has_factors(tensors):
        return rope | _longrope(tensors, factor, original, magnitude, keys.get("context_length"))
    if "rope_freqs.weight" in tensors:
        if kind not in (None, "none", "linear") or magnitude not in (None, 1):
            raise ConfigError(f"{where}: rope_freqs with {keys.prefix}rope.scaling is not supported")
        divisors = _floats(tensors["rope_freqs.weight"])
        divisors = divisors if factor == 1 else divisors * factor
        base = positive_number(rope, "rope_theta", BASE)
        return rope | (
            _proportional(divisors) or _llama3(divisors, base, head_dim) or _listed(divisors, head_dim, where)
        )
    if kind in (None, "linear") and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": original}
    if kind in (None, "none", "linear") and magnitude not in (None, 1):
        if head_dim is not None and head_dim > _MAX_HEAD_DIM:
            raise ConfigError(f"{where}: head_dim {head_dim} exceeds {_MAX_HEAD_DIM}")
        pairs = int((head_dim or 0) * rope.get("partial_rotary_factor", 1.0)) // 2
        rope |= _uniform_longrope([factor] * pairs, magnitude)
    return rope


def _share(rotated: Any, head_dim: int | None, what: str) -> dict[str, float]:
    """The rotated share of a head, by default all of it."""
    if rotated is not None and type(rotated) is not int:
        raise ConfigError(f"{what} must be an integer; got {rotated!r}")
    if not head_dim or (rotated is not None and rotated < 0):
        return {}
    rotated = head_dim if rotated is None else rotated
    return {"partial_rotary_factor": _at_least(rotated / head_dim, head_dim, rotated)}


def _at_least(share: float, whole: int, part: int) -> float:
    """The share, rounded up if necessary so that share * whole is at least the part."""
    return math.nextafter(share, math.inf) if share * whole < part else share


def _yarn(number: Callable[[str], Any], factor: Any) -> dict[str, Any]:
    """YaRN's other fields. The file has the attention_factor, or a multiple of the one that the factor implies."""
    fields = {name: number(f"scaling.{key}") for name, key in YARN.items()}
    times = number("scaling.attn_factor")
    if fields["attention_factor"] is None and isinstance(times, int | float) and isinstance(factor, int | float):
        fields["attention_factor"] = times * yarn_magnitude(factor) if factor > 0 else times
    return {name: value for name, value in fields.items() if value is not None}


def _has_factors(tensors: Mapping[str, GgufTensor]) -> bool:
    return all(f"rope_factors_{length}.weight" in tensors for length in LENGTHS)


def _check_divisors(tensors: Mapping[str, GgufTensor], where: object) -> None:
    names = [f"rope_factors_{length}.weight" for length in LENGTHS]
    present = [name for name in (*names, "rope_freqs.weight") if name in tensors]
    if present not in ([], names, ["rope_freqs.weight"]):
        raise ConfigError(f"{where}: has {' and '.join(present)}; need {' and '.join(names)}, or rope_freqs.weight")


def _longrope(
    tensors: Mapping[str, GgufTensor], factor: Any, original: Any, magnitude: Any, context: Any
) -> dict[str, Any]:
    """LongRoPE's two lists. A factor further divides every frequency."""
    scale = factor if isinstance(factor, int | float) else 1
    lists = {f"{length}_factor": _floats(tensors[f"rope_factors_{length}.weight"]) * scale for length in LENGTHS}
    rope: dict[str, Any] = {name: values.tolist() for name, values in lists.items()}
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    usual = 1.0
    if isinstance(original, int) and isinstance(context, int) and context > original > 1:
        usual = math.sqrt(1 + math.log(context / original) / math.log(original))
    # The file has a float32, and config.json implies the usual value.
    is_usual = isinstance(magnitude, int | float) and math.isclose(magnitude, usual, rel_tol=2**-20)
    return rope if magnitude is None or is_usual else rope | {"attention_factor": magnitude}


def _uniform_longrope(divisors: list[Any], magnitude: Any) -> dict[str, Any]:
    """A LongRoPE with the same divisors for every length: config.json can express them in no other way."""
    lists = {f"{length}_factor": divisors for length in LENGTHS}
    return {"rope_type": "longrope", "factor": 1.0, "attention_factor": magnitude, **lists}


def _floats(stored: GgufTensor) -> Tensor:
    return dequantized(stored.type, stored.rows).flatten()


def _proportional(divisors: Tensor) -> dict[str, Any]:
    """Gemma 4: the first pairs rotate without divisors, and the others effectively do not rotate."""
    rotated = int((divisors == 1).sum())
    if not rotated or not bool((divisors[:rotated] == 1).all() and (divisors[rotated:] >= _UNROTATED).all()):
        return {}
    share = _at_least(rotated / len(divisors), len(divisors), rotated)
    return {"rope_type": "proportional", "partial_rotary_factor": share}


def _llama3(divisors: Tensor, base: float, head_dim: int | None) -> dict[str, Any]:
    """Llama 3.1's scaling, if it produces these divisors, which the converter rounded to float32."""
    factor = round(float(divisors.max()), 3)
    original = int(_LLAMA3["original_max_position_embeddings"])
    if 2 * len(divisors) == head_dim and factor >= 1:
        at = torch.zeros(1, 1, 1)  # any position
        plain = Unscaled().inverse_frequencies(head_dim, base, at, context=0)
        scaled = Llama3(factor, 1.0, 4.0, original).inverse_frequencies(head_dim, base, at, context=0)
        # Both sides are a few float32 operations, and agree to a few of 24 bits.
        if torch.allclose(plain / divisors, scaled, rtol=2**-18, atol=0.0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {}


def _listed(divisors: Tensor, head_dim: int | None, where: object) -> dict[str, Any]:
    if 2 * len(divisors) != head_dim or not bool(((divisors > 0) & divisors.isfinite()).all()):
        pairs = (head_dim or 0) // 2
        raise ConfigError(f"{where}: rope_freqs.weight must be {pairs} positive numbers; got {len(divisors)}")
    return _uniform_longrope(divisors.tolist(), 1.0)
