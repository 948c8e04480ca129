"""Rotary position embedding (arXiv 2104.09864): the angles of every position, and how they change for texts longer than
those of the training."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from onward import ops


class Scaling(Protocol):
    """A rule for the inverse frequencies of a schedule.

    kind: its name in config.json. factor: how much longer texts get. original_max_position: the trained length.
    magnitude: a factor of cos and sin.
    """

    @property
    def kind(self) -> str: ...

    @property
    def factor(self) -> float: ...

    @property
    def original_max_position(self) -> int: ...

    @property
    def magnitude(self) -> float: ...

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        """float32 [dims / 2], or [B, T, dims / 2]: radians per position, at positions float32 [B, T, 1].

        context: the most positions that the model serves.
        """
        ...


def wavelengths(dims: int, base: Tensor) -> Tensor:
    """float32 [dims / 2]: positions per radian, base ** (2i / dims), with nothing scaled."""
    exponents = torch.arange(0, dims, 2, device=base.device, dtype=torch.float32) / dims
    return base**exponents


def plain_frequencies(dims: int, base: float, at: Tensor) -> Tensor:
    """float32 [dims / 2]: radians per position with nothing scaled, on the device of `at`."""
    return 1.0 / wavelengths(dims, torch.full((), base, device=at.device))


@dataclass(frozen=True)
class Unscaled:
    """The angles as they are."""

    kind: ClassVar[str] = "default"
    factor: ClassVar[float] = 1.0
    magnitude: ClassVar[float] = 1.0
    original_max_position: int = 0

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        return plain_frequencies(dims, base, at)


@dataclass(frozen=True)
class Linear:
    """Positions divided by a factor (arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"
    magnitude: ClassVar[float] = 1.0
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        return plain_frequencies(dims, base, at) / self.factor


@dataclass(frozen=True)
class Proportional:
    """The first `share` of all pairs turn, with frequencies spread over the whole head; the others stay (Gemma 4)."""

    kind: ClassVar[str] = "proportional"
    magnitude: ClassVar[float] = 1.0
    share: float
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        turning = int(self.share * dims // 2)
        pairs = torch.arange(dims // 2, device=at.device)
        return torch.where(pairs < turning, plain_frequencies(dims, base, at) / self.factor, 0.0)


@dataclass(frozen=True)
class Dynamic:
    """The NTK rule: past the trained length the base grows with the length.

    Other libraries take the length from the forward that happens to run, so that the same text gets other angles when
    its prompt is cut into chunks. Here the length at a token is its own position + 1. Other libraries agree when they
    are fed token by token, and every chunking gives the same (docs/decisions/0003-dynamic-rope.md).
    """

    kind: ClassVar[str] = "dynamic"
    magnitude: ClassVar[float] = 1.0
    factor: float
    original_max_position: int

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        length = (at + 1).clamp(min=float(self.original_max_position))
        stretch = self.factor * length / self.original_max_position - (self.factor - 1)
        return 1.0 / wavelengths(dims, base * stretch ** (dims / (dims - 2)))


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided, high ones kept, a ramp between (arXiv 2407.21783).

    Wavelengths are compared with the trained length.
    """

    kind: ClassVar[str] = "llama3"
    magnitude: ClassVar[float] = 1.0
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
    """0.1 * mscale * ln(factor) + 1: what YaRN multiplies queries and keys by in texts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): pairs that turn often within the trained length keep their frequency, those that turn
    seldom are divided by `factor`, with a ramp between.

    fast, slow: the turns within the trained length where the ramp begins and where it ends ("beta_fast" and
    "beta_slow"). truncate: whether the ramp begins and ends at whole pairs. mscale_all_dim: of the config, which
    multi-head latent attention reads.
    """

    kind: ClassVar[str] = "yarn"
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
        """The pairs between which frequencies go over from kept to divided."""
        low, high = (self._pair_that_turns(turns, dims, base) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        return low, high if high != low else high + 0.001

    def _pair_that_turns(self, turns: float, dims: int, base: float) -> float:
        """The pair, as a fraction, that turns so often within the trained length."""
        return dims * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): each pair's frequency divided by a factor of its own, of which checkpoints have two
    lists.

    short, long: the factors of models that serve texts up to the trained length, and of those that serve longer ones.
    The choice belongs to the model and not to a token: keys that were turned by one list do not fit queries that were
    turned by the other (docs/decisions/0003-dynamic-rope.md).
    """

    kind: ClassVar[str] = "longrope"
    factor: float
    original_max_position: int
    magnitude: float
    short: tuple[float, ...]
    long: tuple[float, ...]

    def inverse_frequencies(self, dims: int, base: float, at: Tensor, context: int) -> Tensor:
        factors = self.long if context > self.original_max_position else self.short
        # Not torch.tensor: it would copy from the host in every forward.
        divisors = torch.stack([torch.full((), factor, device=at.device) for factor in factors])
        return plain_frequencies(dims, base, at) / divisors


@dataclass(frozen=True)
class RotarySchedule:
    """The angles of some layers: position -> cos and sin for every rotated pair.

    dims: how many features of a head turn, the first ones. base: of the inverse frequencies base ** (-2i / dims).
    scaling: what is done to these for longer texts. interleaved: pairs are (2i, 2i + 1); else (i, i + dims / 2).
    """

    dims: int
    base: float
    scaling: Scaling
    interleaved: bool = False

    def angles(self, positions: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin as `ops.rotate` takes them, float32 [B, T, dims].

        positions: int [B, T], absolute. context: the most positions that the model serves; `LongRope` depends on it.
        """
        at = positions.to(torch.float32).unsqueeze(-1)
        inverse = self.scaling.inverse_frequencies(self.dims, self.base, at, context)
        return ops.rotary_angles(at * inverse, magnitude=self.scaling.magnitude)

    def serves_past(self, context: int) -> bool:
        """Whether it is made for texts longer than `context`, the length that a config gives."""
        scaling = self.scaling
        if isinstance(scaling, Yarn):
            return scaling.factor * scaling.original_max_position > context
        return isinstance(scaling, Dynamic)
