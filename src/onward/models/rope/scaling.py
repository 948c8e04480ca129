"""How the angles of RoPE are changed for texts longer than those of the training: the shorter rules."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


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
