"""AWQ (Lin et al., arXiv 2306.00978), as AutoAWQ's "gemm" stores it.

Tensors of a module: qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales float16 [K / g, N];
the weight is (q - zero) * scale. Outputs are packed in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats import gptq, repack
from onward.checkpoint.formats.bits import by_group, unpacked
from onward.checkpoint.formats.settings import Fields, Read, Shape, group_size, words
from onward.ops import QuantizedWeight

FIELDS = Fields(
    read=words("bits w_bit group_size q_group_size version format"),
    # qzeros holds the zero points, also for symmetric weights. transformers writes GPTQ's fields too.
    ignored=words("zero_point do_fuse fuse_max_seq_len modules_to_fuse") | (gptq.FIELDS.ignored - {"desc_act"}),
    refused={"desc_act": ()},
)
_TENSORS = {"qweight", "qzeros", "scales"}
# Output c of eight is in the field _FIELDS[c].
_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Awq:
    """group: inputs that share a scale; None for all."""

    group: int | None

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if "qweight" in names else set()

    def weight(self, read: Read, names: set[str], shape: Shape) -> Tensor:
        codes, zeros, scales, group = self._parts(read, shape)
        offset = by_group(zeros.T.float(), group, shape[1])
        return (codes.T.float() - offset) * by_group(scales.T.float(), group, shape[1])

    def as_quantized(self, read: Read, names: set[str], shape: Shape, dtype: torch.dtype) -> QuantizedWeight | None:
        codes, zeros, scales, group = self._parts(read, shape)
        return repack.integers(codes.T, scales.T, zeros.T, group, dtype)

    def _parts(self, read: Read, shape: Shape) -> tuple[Tensor, Tensor, Tensor, int]:
        """Codes [K, N], zeros and scales [K / g, N], and g."""
        group = self.group or shape[1]
        codes, zeros = (_in_order(read(name)) for name in ("qweight", "qzeros"))
        scales = read("scales")
        fits = zeros.shape == scales.shape and len(scales) == -(-shape[1] // group)
        if not fits or codes.shape != (shape[1], shape[0]):
            sizes = f"qzeros {list(zeros.shape)}, scales {list(scales.shape)}"
            raise ValueError(f"the shapes do not match: qweight {list(codes.shape[::-1])}, {sizes}")
        return codes, zeros, scales, group


def _in_order(packed: Tensor) -> Tensor:
    fields = unpacked(packed, 4, 1)
    order = torch.tensor(_FIELDS).repeat(fields.shape[1] // 8) + torch.arange(fields.shape[1]) // 8 * 8
    return fields[:, order]


def read_method(settings: Mapping[str, Any]) -> Awq:
    FIELDS.check(settings)
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if settings.get("backend") == "llm-awq":
        version = "llm-awq"
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ supports 4 bits in version 'gemm'; got bits {bits!r}, version {version!r}")
    return Awq(group_size(settings, "group_size" if settings.get("group_size") is not None else "q_group_size"))
