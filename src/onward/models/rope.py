"""Rotary position embedding (arXiv 2104.09864): the rotation angles of each position, and context extension methods."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from onward import ops


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
        longest_kept = self.original_max_position / self.high_freq_factor
        shortest_divided = self.original_max_position / self.low_freq_factor
        ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - ramp) * inverse / self.factor + ramp * inverse
        divided = torch.where(wavelength > shortest_divided, inverse / self.factor, blended)
        return torch.where(wavelength < longest_kept, inverse, divided)


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
        low, high = (self._pair_at(turns, dims, base) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return low, high if high != low else high + 0.001

    def _pair_at(self, turns: float, dims: int, base: float) -> float:
        """The pair, as a fraction, that rotates `turns` times within the trained context."""
        return dims * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))


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
