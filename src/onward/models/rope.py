"""Rotary position embedding: from a checkpoint's RoPE fields to the angles of every position.

Schedules: `default`; `linear` (positions divided by a factor); `llama3` (low frequencies divided, high ones
kept, a ramp between); `dynamic` (the NTK rule: past the trained length the base grows with the length).

The dynamic rule depends on "the length". Other libraries take it from the forward that happens to run, so that the
same text gets other angles when its prompt is cut into chunks. Here the length at a token is its own position + 1.
Other libraries agree when they are fed token by token, and every chunking gives the same
(docs/decisions/0003-dynamic-rope.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward import ops
from onward.errors import ConfigError
from onward.models.fields import json_object, positive_int, positive_number

_EITHER_PLACE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_SCALED = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


@dataclass(frozen=True)
class RotarySchedule:
    """The angles of one model: position -> cos and sin for every rotated pair.

    `dims` features of a head turn, the first ones. Pairs are (i, i + dims/2), or with `interleaved` (2i, 2i + 1).
    `original_max_position` is the trained length. `dynamic` lets the base grow past it; `llama3` compares wavelengths
    with it.
    """

    dims: int
    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    interleaved: bool = False

    def inverse_frequencies(self, device: torch.device | None = None) -> Tensor:
        """float32 [dims / 2]: radians per position. `dynamic` has others past its trained length."""
        inverse = self._powers(torch.full((), self.base, device=device))
        if self.kind == "linear":
            return inverse / self.factor
        return self._llama3(inverse) if self.kind == "llama3" else inverse

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int [B, T] absolute positions -> cos and sin as `ops.rotate` takes them, float32 [B, T, dims]."""
        at = positions.to(torch.float32).unsqueeze(-1)
        if self.kind == "dynamic":
            inverse = self._powers(self._dynamic_base(at))
        else:
            inverse = self.inverse_frequencies(positions.device)
        return ops.rotary_angles(at * inverse)

    def _powers(self, base: Tensor) -> Tensor:
        exponents = torch.arange(0, self.dims, 2, device=base.device, dtype=torch.float32) / self.dims
        return 1.0 / base**exponents

    def _dynamic_base(self, at: Tensor) -> Tensor:
        length = (at + 1).clamp(min=float(self.original_max_position))
        stretch = self.factor * length / self.original_max_position - (self.factor - 1)
        return self.base * stretch ** (self.dims / (self.dims - 2))

    def _llama3(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        longest_kept = self.original_max_position / self.high_freq_factor
        shortest_divided = self.original_max_position / self.low_freq_factor
        ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - ramp) * inverse / self.factor + ramp * inverse
        divided = torch.where(wavelength > shortest_divided, inverse / self.factor, blended)
        return torch.where(wavelength < longest_kept, inverse, divided)


def rotary_schedule(
    config: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    base: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
) -> RotarySchedule:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before) of a config.json.

    Args:
        base: of a config without `rope_theta`.
        partial: of a config without `partial_rotary_factor`, the part of a head that turns; None in families whose
            heads turn as a whole.
        interleaved: which features of a head make a pair; no field of a config says it.
    """
    fields = _rope_fields(config)
    kind = fields.get("rope_type") or "default"
    if not isinstance(kind, str) or (kind != "default" and kind not in _SCALED):
        supported = ", ".join(["default", *_SCALED])
        raise ConfigError(f"config.json: RoPE type {kind!r} is not supported; supported are {supported}")
    dims = _turning(fields, head_dim, partial)
    base = positive_number(fields, "rope_theta", base)
    where = f"config.json: {kind} RoPE scaling"
    numbers = {name: positive_number(fields, name, where=where) for name in _SCALED.get(kind, ())}
    original = positive_int(fields, "original_max_position_embeddings", max_position)
    if kind == "dynamic":
        original = max_position
        if dims == 2:
            raise ConfigError(
                "config.json: dynamic RoPE scaling needs a head_dim above 2: one pair has no base to grow"
            )
    schedule = RotarySchedule(dims, base, kind, original_max_position=original, interleaved=interleaved, **numbers)
    if kind == "llama3" and schedule.low_freq_factor >= schedule.high_freq_factor:
        raise ConfigError(
            f"config.json: llama3 RoPE needs low_freq_factor below high_freq_factor; "
            f"got {schedule.low_freq_factor} and {schedule.high_freq_factor}"
        )
    return schedule


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All RoPE fields of a config, from wherever they stand; null is as good as absent."""
    places = {"rope_parameters": json_object(config, "rope_parameters")}
    places["rope_scaling"] = json_object(config, "rope_scaling")
    # Older files have some fields beside the RoPE object and not in it.
    places["config.json itself"] = {name: config.get(name) for name in _EITHER_PLACE}
    found: dict[str, tuple[str, Any]] = {}
    for place, fields in places.items():
        for name, value in fields.items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            first, other = found.setdefault(name, (place, value))
            if first != place and other != value:
                raise ConfigError(f"config.json: {name} is {other!r} in {first} and {value!r} in {place}: keep one")
    return {name: value for name, (_, value) in found.items()}


def _turning(fields: Mapping[str, Any], head_dim: int, partial: float | None) -> int:
    """How many features of a head turn."""
    share = positive_number(fields, "partial_rotary_factor", partial or 1.0)
    if partial is None and share != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported in this family; it must be 1")
    dims = int(head_dim * share)
    if not 0 < dims <= head_dim or dims % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} is {dims} features, which RoPE cannot "
            f"rotate: it wants an even number from 2 to {head_dim}"
        )
    return dims
