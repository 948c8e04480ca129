"""AWQ (Lin et al., arXiv 2306.00978), as AutoAWQ's "gemm" stores it.

Tensors of a module: qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales float16 [K / g, N];
the weight is (q - zero) * scale. Outputs are packed in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.quantizers.bits import by_group, unpacked

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
        group = self.group or shape[1]
        codes, zeros = (_in_order(read(name)) for name in ("qweight", "qzeros"))  # [K, N], [K / g, N]
        scales = read("scales").float()
        if codes.shape != (shape[1], shape[0]) or zeros.shape != scales.shape:
            raise ValueError(
                f"qweight is of {list(codes.shape[::-1])}, qzeros {list(zeros.shape)}, scales {list(scales.shape)}"
            )
        offset = by_group(zeros.T.float(), group, shape[1])
        return (codes.T.float() - offset) * by_group(scales.T, group, shape[1])


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
