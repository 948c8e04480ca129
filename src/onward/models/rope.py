"""Rotary position embedding (arXiv 2104.09864): the rotation angles of each position, context extension methods, and
their fields in config.json, checked for consistency."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onward import ops
from onward.errors import ConfigError
from onward.models.fields import REQUIRED, Config, flag, json_object, positive_int, positive_number


class Scaling:
    """A rule for the inverse frequencies of a schedule. kind: the rope_type in config.json. factor: of the context
    length. original_max_position: the trained context. magnitude: a factor of cos and sin."""

    kind: ClassVar[str]
    factor: float
    original_max_position: int
    magnitude: float

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        """float32 [dims / 2], or [B, T, dims / 2]: radians per position, at positions float32 [B, T, 1]. context: the
        model's max_seq_len."""
        return plain_frequencies(dims, base, at)


def wavelengths(dims: int, base: Tensor) -> Tensor:
    """float32 [dims / 2]: unscaled positions per radian, base ** (2i / dims)."""
    return base ** (torch.arange(0, dims, 2, device=base.device, dtype=torch.float32) / dims)


def plain_frequencies(dims: int, base: float, at: Tensor) -> Tensor:
    """float32 [dims / 2]: unscaled radians per position, on the device of `at`."""
    return 1.0 / wavelengths(dims, torch.full((), base, device=at.device))


@dataclass(frozen=True)
class Unscaled(Scaling):
    """Unchanged angles."""

    kind = "default"
    factor = 1.0
    magnitude = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class Linear(Scaling):
    """Positions divided by a factor (arXiv 2306.15595)."""

    kind = "linear"
    magnitude = 1.0
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        return plain_frequencies(dims, base, at) / self.factor


@dataclass(frozen=True)
class Proportional(Scaling):
    """The first `share` of all pairs rotate, with frequencies spread over the whole head; the rest do not (Gemma 4)."""

    kind = "proportional"
    magnitude = 1.0
    share: float
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        pairs = torch.arange(dims // 2, device=at.device)
        return torch.where(pairs < int(self.share * dims // 2), plain_frequencies(dims, base, at) / self.factor, 0.0)


@dataclass(frozen=True)
class Dynamic(Scaling):
    """Dynamic NTK: past the trained context the base grows with the length.

    Other libraries take the length from the current forward pass, so a text's angles depend on how its prompt is cut
    into chunks. Here the length at a token is its own position + 1: every chunking gives the same angles, and other
    libraries agree when they process one token at a time (docs/decisions/0003-dynamic-rope.md).
    """

    kind = "dynamic"
    magnitude = 1.0
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        length = (at + 1).clamp(min=float(self.original_max_position))
        stretch = self.factor * length / self.original_max_position - (self.factor - 1)
        return 1.0 / wavelengths(dims, base * stretch ** (dims / (dims - 2)))


@dataclass(frozen=True)
class Llama3(Scaling):
    """Low frequencies are divided by `factor`, high ones unchanged, with a ramp between (arXiv 2407.21783). Wavelengths
    are compared with the trained context."""

    kind = "llama3"
    magnitude = 1.0
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        inverse = plain_frequencies(dims, base, at)
        wavelength = 2 * math.pi / inverse
        longest_unscaled = self.original_max_position / self.high_freq_factor
        shortest_scaled = self.original_max_position / self.low_freq_factor
        ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - ramp) * inverse / self.factor + ramp * inverse
        divided = torch.where(wavelength > shortest_scaled, inverse / self.factor, blended)
        return torch.where(wavelength < longest_unscaled, inverse, divided)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1: YaRN's factor of queries and keys when the context is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN (arXiv 2309.00071): pairs that rotate often within the trained context keep their frequency, pairs that
    rotate rarely are divided by `factor`, with a ramp between.

    fast, slow: the rotations within the trained context at both ends of the ramp ("beta_fast" and "beta_slow").
    truncate: whether the ramp begins and ends at whole pairs. mscale_all_dim: of the config, for multi-head latent
    attention.
    """

    kind = "yarn"
    factor: float
    original_max_position: int
    magnitude: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        inverse = plain_frequencies(dims, base, at)
        low, high = self._ramp(dims, base)
        pairs = torch.arange(dims // 2, device=at.device, dtype=torch.float32)
        divided = ((pairs - low) / (high - low)).clamp(0, 1)
        return inverse / self.factor * divided + inverse * (1 - divided)

    def _ramp(self, dims: int, base: float) -> tuple[float, float]:
        """The pairs between which frequencies change from unchanged to divided."""
        # A pair, as a fraction, that rotates so often within the trained context.
        turns = (self.original_max_position / (each * 2 * math.pi) for each in (self.fast, self.slow))
        low, high = (dims * math.log(each) / (2 * math.log(base)) for each in turns)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return low, high if high != low else high + 0.001


@dataclass(frozen=True)
class LongRope(Scaling):
    """LongRoPE (arXiv 2402.13753): each pair's frequency divided by its own factor, from one of two lists.

    short, long: the factors for models that serve up to the trained context, and for longer ones. The choice is made
    per model, not per token: keys rotated with one list do not match queries rotated with the other
    (docs/decisions/0003-dynamic-rope.md).
    """

    kind = "longrope"
    factor: float
    original_max_position: int
    magnitude: float
    short: tuple[float, ...]
    long: tuple[float, ...]

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        factors = self.long if context > self.original_max_position else self.short
        # Not torch.tensor, which would copy from the host in every forward pass.
        divisors = torch.stack([torch.full((), factor, device=at.device) for factor in factors])
        return plain_frequencies(dims, base, at) / divisors


@dataclass(frozen=True)
class RotarySchedule:
    """position -> cos and sin for every rotated pair.

    dims: the number of rotated features of a head, the first ones. base: of the inverse frequencies
    base ** (-2i / dims). scaling: their change for longer texts. interleaved: pairs are (2i, 2i + 1); else
    (i, i + dims / 2).
    """

    dims: int
    base: float
    scaling: Scaling
    interleaved: bool = False

    def angles(self, positions: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin for `ops.rotate`, float32 [B, T, dims]. positions: int [B, T], absolute. context: the model's
        max_seq_len, which `LongRope` depends on."""
        at = positions.to(torch.float32).unsqueeze(-1)
        inverse = self.scaling.inverse_frequencies(self.dims, self.base, at, context)
        return ops.rotary_angles(at * inverse, magnitude=self.scaling.magnitude)

    def serves_past(self, context: int) -> bool:
        """Whether it extends the context past the config's max_position_embeddings."""
        scaling = self.scaling
        if isinstance(scaling, Yarn):
            return scaling.factor * scaling.original_max_position > context
        return isinstance(scaling, Dynamic)


# Older files have these fields outside the RoPE object.
_EITHER_PLACE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
# Fields without effect on texts: how a scaling was found, and sections of image positions.
_NO_SAY = {"finetuned", "max_position_embeddings", "mrope_section", "mrope_interleaved"}


def rotary_schedule(
    config: Config,
    head_dim: int,
    max_position: int,
    *,
    base: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    also: Sequence[str] = (),
) -> RotarySchedule:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before) of a config.json.

    Args:
        max_position: the trained context, with its scaling.
        base, partial: defaults of `rope_theta`, and of `partial_rotary_factor`, the rotated part of a head; partial is
            None in families that rotate whole heads.
        interleaved: how features are paired, which no config field says.
        also: fields of the RoPE object that the family reads itself.

    Raises:
        ConfigError: a field is missing, wrong, unknown, or contradicts another.
    """
    fields = rope_fields(config)
    kind = fields.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(f"config.json: RoPE type {kind!r} is not supported; supported are {', '.join(_SCALINGS)}")
    share = positive_number(fields, "partial_rotary_factor", partial or 1.0)
    if partial is None and share != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported in this family; it must be 1")
    dims = head_dim if kind == "proportional" and share <= 1 else _rotated_dims(head_dim, share)
    base = positive_number(fields, "rope_theta", base)
    original = positive_int(fields, "original_max_position_embeddings", max_position)
    read, names = _SCALINGS[kind]
    scaling = read(_RopeFields(fields, f"config.json: {kind} RoPE scaling", dims, base, share, original, max_position))
    known = {*names, *_EITHER_PLACE, *also, *_NO_SAY}
    if unknown := [name for name, value in fields.items() if name not in known and value is not None]:
        raise ConfigError(
            f"config.json: {kind} RoPE has no field {unknown[0]!r}: remove it, or set the RoPE type that has it"
        )
    return RotarySchedule(dims, base, scaling, interleaved)


def rope_fields(config: Config) -> dict[str, Any]:
    """All RoPE fields of a config, wherever they are; null counts as absent."""
    places = {name: json_object(config, name) for name in ("rope_parameters", "rope_scaling")}
    places["config.json itself"] = {name: config.get(name) for name in _EITHER_PLACE}
    found: dict[str, tuple[str, Any]] = {}
    for place, fields in places.items():
        for name, value in fields.items():
            name = "rope_type" if name == "type" else name
            value = "longrope" if name == "rope_type" and value == "su" else value  # its former name
            if value is None and name != "truncate":  # a null truncate means false; its default is true
                continue
            first, other = found.setdefault(name, (place, value))
            if other is not value and other != value:  # nan is not even itself
                raise ConfigError(f"config.json: {name} is {other!r} in {first} and {value!r} in {place}: keep one")
    return {name: value for name, (_, value) in found.items()}


def _rotated_dims(head_dim: int, share: float) -> int:
    dims = int(head_dim * share)
    if not 0 < dims <= head_dim or dims % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} is {dims} features; RoPE needs an even "
            f"number from 2 to {head_dim}"
        )
    return dims


# ── fields of scalings ────────────────────────────────────────────────────────────────────────────────────────


class _RopeFields(NamedTuple):
    """The fields of a RoPE object and the values read before its scaling. where: the start of error messages."""

    fields: Mapping[str, Any]
    where: str
    dims: int
    base: float
    share: float
    original: int
    max_position: int

    def number(self, name: str, default: Any = REQUIRED) -> float:
        return positive_number(self.fields, name, default, where=self.where)

    def number_or_zero(self, name: str) -> float:
        """A positive number; 0 and absent mean 0."""
        value = self.fields.get(name)
        return 0.0 if value is None or (value == 0 and value is not False) else self.number(name)

    def factors(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers, one per rotated pair."""
        values, pairs = self.fields.get(name), self.dims // 2
        if not isinstance(values, list) or len(values) != pairs:
            got = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
            raise ConfigError(
                f"{self.where}: {name!r} must be a list of {pairs} numbers, one per rotated pair; got {got}"
            )
        return tuple(positive_number({name: value}, name, where=self.where) for value in values)


def _dynamic(rope: _RopeFields) -> Scaling:
    if rope.dims == 2:
        raise ConfigError(
            "config.json: dynamic RoPE scaling needs a head_dim above 2: a single pair does not depend on the base"
        )
    return Dynamic(rope.number("factor"), rope.max_position)


def _llama3(rope: _RopeFields) -> Scaling:
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ConfigError(
            f"config.json: llama3 RoPE needs low_freq_factor below high_freq_factor; got {low} and {high}"
        )
    return Llama3(factor, low, high, rope.original)


def _yarn(rope: _RopeFields) -> Scaling:
    factor = rope.number("factor", rope.max_position / rope.original)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if slow > fast:
        raise ConfigError(f"{rope.where} needs beta_slow <= beta_fast; got {slow:g} and {fast:g}")
    if rope.base <= 1:
        raise ConfigError(f"{rope.where} needs a rope_theta above 1; got {rope.base:g}")
    mscale, mscale_all_dim = rope.number_or_zero("mscale"), rope.number_or_zero("mscale_all_dim")
    both = bool(mscale and mscale_all_dim)
    inferred = (
        yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim) if both else yarn_magnitude(factor)
    )
    magnitude = rope.number("attention_factor", inferred)
    if both and not math.isclose(magnitude, inferred, rel_tol=1e-4):
        raise ConfigError(
            f"{rope.where}: attention_factor is {magnitude:g}, but mscale {mscale:g} and mscale_all_dim "
            f"{mscale_all_dim:g} mean {inferred:g}: remove one or the other"
        )
    truncate = flag(rope.fields, "truncate", default=True)
    return Yarn(factor, rope.original, magnitude, fast, slow, truncate, mscale_all_dim)


def _longrope(rope: _RopeFields) -> Scaling:
    short, long = rope.factors("short_factor"), rope.factors("long_factor")
    factor = rope.number("factor", rope.max_position / rope.original)
    inferred = 1.0
    if factor > 1 and "attention_factor" not in rope.fields:
        if rope.original == 1:
            raise ConfigError(f"{rope.where} needs original_max_position_embeddings above 1, or an attention_factor")
        inferred = math.sqrt(1 + math.log(factor) / math.log(rope.original))
    return LongRope(factor, rope.original, rope.number("attention_factor", inferred), short, long)


# rope_type in config.json -> its reader and its fields.
_SCALINGS: dict[str, tuple[Callable[[_RopeFields], Scaling], tuple[str, ...]]] = {
    "default": (lambda rope: Unscaled(rope.original), ()),
    "linear": (lambda rope: Linear(rope.number("factor"), rope.original), ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": (_yarn, ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (_longrope, ("factor", "attention_factor", "short_factor", "long_factor")),
    "proportional": (lambda rope: Proportional(rope.share, rope.number("factor", 1.0), rope.original), ("factor",)),
}
