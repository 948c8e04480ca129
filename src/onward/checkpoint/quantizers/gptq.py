"""GPTQ (Frantar et al., arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Tensors of a module: qweight int32 [K * b / 32, N], the first input in the lowest bits; qzeros int32 [K / g, N * b /
32], which hold zero - 1 (in the format "gptq_v2" zero); scales [K / g, N]; g_idx int32 [K], the group of each input,
where inputs were ordered by activation. The weight is (q - zero) * scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.quantizers import held
from onward.checkpoint.quantizers.bits import unpacked
from onward.ops import QuantizedWeight

_TENSORS = {"qweight", "qzeros", "scales", "g_idx"}


@dataclass(frozen=True)
class Gptq:
    """bits: 2, 4 or 8. group: inputs that share a scale; None: all. zero_offset: what is added to the stored zeros."""

    bits: int
    group: int | None
    zero_offset: int

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if "qweight" in names else set()

    def weight(self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales, groups = self._parts(read, names, shape)
        return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).T

    def held(
        self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        codes, zeros, scales, groups = self._parts(read, names, shape)
        return held.integers_of_groups(codes.T, scales.T, zeros.T, groups, dtype)

    def _parts(
        self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes [K, N], zeros and scales [K / g, N], and the group of each input, int64 [K]."""
        codes = unpacked(read("qweight"), self.bits, 0)
        zeros = unpacked(read("qzeros"), self.bits, 1) + self.zero_offset
        scales = read("scales")
        in_order = torch.arange(shape[1]) // (self.group or shape[1])
        groups = read("g_idx").long() if "g_idx" in names else in_order
        fits = codes.shape == (shape[1], shape[0]) and zeros.shape == scales.shape and groups.shape == (shape[1],)
        if not fits or int(groups.max()) >= len(scales) or int(groups.min()) < 0:
            raise ValueError(
                f"qweight is of {list(codes.shape[::-1])}, qzeros {list(zeros.shape)}, scales {list(scales.shape)}, "
                f"groups {list(groups.shape)} up to {int(groups.max())}"
            )
        return codes, zeros, scales, groups


def read_method(settings: Mapping[str, Any]) -> Gptq:
    bits = settings.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ValueError(f"GPTQ of 2, 4 or 8 bits can be read; got {bits!r}")
    group = settings.get("group_size", 128)
    version = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ in the formats 'gptq' and 'gptq_v2' can be read; got {version!r}")
    return Gptq(bits, None if group == -1 else int(group), 1 if version == "gptq" else 0)
