"""RoPE of a config.json -> the keys "{architecture}.rope.…" of a GGUF file, and its tensors of divisors."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.keys import LENGTHS, YARN
from onward.checkpoint.gguf.writer import Stored
from onward.models.fields import positive_number
from onward.models.rope import Llama3, Unscaled, rope_fields, rotary_schedule, yarn_magnitude


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_parameters of a config.json, of either spelling; those of full layers where layers have their own."""
    given = config.get("rope_parameters") or {}
    rope = rope_fields({**config, "rope_parameters": given.get("full_attention", given)})
    return {"rope_theta": 10000.0, "rope_type": "default"} | rope


def rope_metadata(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The keys behind "rope."."""
    rope = rope_of(config)
    metadata = {
        "freq_base": float(positive_number(rope, "rope_theta", 10000.0)),
        "dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    of_windows = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    if "rope_theta" in of_windows:
        metadata["freq_base_swa"] = float(of_windows["rope_theta"])
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        metadata |= {"scaling.type": kind, "scaling.factor": float(rope["factor"])}
    if kind in ("linear", "yarn", "longrope") and original is not None:
        metadata["scaling.original_context_length"] = original
    if kind == "longrope":
        schedule = rotary_schedule({"rope_parameters": rope}, head_dim, config["max_position_embeddings"], partial=1.0)
        metadata["scaling.attn_factor"] = schedule.scaling.magnitude
    return metadata | (_yarn_metadata(rope) if kind == "yarn" else {})


def rope_tensors(config: Mapping[str, Any], head_dim: int) -> dict[str, Stored]:
    """The tensors that say what no key does."""
    rope = rope_of(config)
    divisors: dict[str, Tensor] = {}
    if rope["rope_type"] == "llama3":
        divisors["rope_freqs.weight"] = _llama3_divisors(rope, head_dim)
    if rope["rope_type"] == "longrope":
        for length in LENGTHS:
            divisors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
    return {name: Stored("F32", tuple(values.shape), values) for name, values in divisors.items()}


def _yarn_metadata(rope: Mapping[str, Any]) -> dict[str, float]:
    metadata = {f"scaling.{key}": float(rope[field]) for field, key in YARN.items() if rope.get(field) is not None}
    # llama.cpp reads another key than the attention_factor's: by how much that is more than what the factor means.
    usual = yarn_magnitude(float(rope["factor"]))
    times = float(rope.get("attention_factor") or usual) / usual
    return metadata if math.isclose(times, 1.0, rel_tol=2**-20) else metadata | {"scaling.attn_factor": times}


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    at, base = torch.zeros(1, 1, 1), float(rope["rope_theta"])  # any position
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    scaled = Llama3(float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"]))
    plain = Unscaled().inverse_frequencies(head_dim, base, at, context=0)
    return (plain / scaled.inverse_frequencies(head_dim, base, at, context=0)).flatten().to(torch.float32)
