"""AWQ (Lin et al., arXiv 2306.00978), as AutoAWQ's "gemm" stores it.

Tensors of a module: qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales float16 [K / g, N];
the weight is (q - zero) * scale. Outputs are packed in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.quantizers import held
from onward.checkpoint.quantizers.bits import by_group, unpacked
from onward.ops import QuantizedWeight

_TENSORS = {"qweight", "qzeros", "scales"}
# Output c of eight is in the field _FIELDS[c].
_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Awq:
    """group: inputs that share a scale; None: all."""

    group: int | None

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if "qweight" in names else set()

    def weight(self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int]) -> Tensor:
        codes, zeros, scales, group = self._parts(read, shape)
        offset = by_group(zeros.T.float(), group, shape[1])
        return (codes.T.float() - offset) * by_group(scales.T.float(), group, shape[1])

    def held(
        self, read: Callable[[str], Tensor], names: set[str], shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        codes, zeros, scales, group = self._parts(read, shape)
        return held.integers(codes.T, scales.T, zeros.T, group, dtype)

    def _parts(self, read: Callable[[str], Tensor], shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, int]:
        """Codes [K, N], zeros and scales [K / g, N], and g."""
        group = self.group or shape[1]
        codes, zeros = (_in_order(read(name)) for name in ("qweight", "qzeros"))
        scales = read("scales")
        fits = zeros.shape == scales.shape and len(scales) == -(-shape[1] // group)
        if not fits or codes.shape != (shape[1], shape[0]):
            raise ValueError(
                f"qweight is of {list(codes.shape[::-1])}, qzeros {list(zeros.shape)}, scales {list(scales.shape)}"
            )
        return codes, zeros, scales, group


def _in_order(packed: Tensor) -> Tensor:
    fields = unpacked(packed, 4, 1)
    order = torch.tensor(_FIELDS).repeat(fields.shape[1] // 8) + torch.arange(fields.shape[1]) // 8 * 8
    return fields[:, order]


def read_method(settings: Mapping[str, Any]) -> Awq:
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ of 4 bits in version 'gemm' can be read; got {bits} bits, version {version!r}")
    group = settings.get("group_size", settings.get("q_group_size", 128))
    return Awq(None if group == -1 else int(group))
