"""Weights by the stock names of one architecture -> those of another that computes the same, which GGUF files have."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onward.checkpoint.gguf.layout import fused_delta
from onward.checkpoint.gguf.writer import Stored

# By stock name; blocks as they will be stored.
Weights = Mapping[str, Tensor | Stored]


def as_they_are(config: Mapping[str, Any], fields: Mapping[str, Any], weights: Weights) -> Weights:
    return weights


def text_of(weights: Weights) -> Weights:
    """Of a checkpoint that reads images, too, those of its text part as a model of text alone calls them."""
    return {name.replace("model.language_model.", "model.", 1): weight for name, weight in weights.items()}


def untied(config: Mapping[str, Any], fields: Mapping[str, Any], weights: Weights) -> Weights:
    """With a head of its own, which is the embedding."""
    return {**weights, "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}


def delta_apart(config: Mapping[str, Any], fields: Mapping[str, Any], weights: Weights) -> Weights:
    """Qwen3-Next's projections, in which the parts of a key head lie together, as Qwen3.5 has them."""
    parts = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
    apart: dict[str, Tensor | Stored] = {}
    for name, weight in weights.items():
        mixer, _, part = name.removesuffix(".weight").rpartition(".")
        for new in parts.get(part, ()):
            rows = fused_delta(f"{mixer}.{new}.weight", fields, 0).rows
            assert rows is not None
            apart[f"{mixer}.{new}.weight"] = rows_of(weight, rows)
        apart |= {} if part in parts else {name: weight}
    return apart


def rows_of(weight: Tensor | Stored, rows: Tensor) -> Tensor | Stored:
    if isinstance(weight, Tensor):
        return weight[rows]
    return weight._replace(shape=(len(rows), *weight.shape[1:]), data=weight.data[rows])
