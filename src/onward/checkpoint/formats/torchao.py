"""torchao (https://github.com/pytorch/ao), as transformers writes its tensors, flattened, into safetensors.

Tensors of a module:
    Int8Tensor, IntxUnpackedToInt8Tensor    _weight_qdata int8 [N, K]; _weight_scale, and _weight_zero_point int8, both
                                            [N, K / g]: (q - zero) * scale. 4-bit codes take a byte too
    Float8Tensor                            _weight_qdata float8_e4m3fn [N, K]; _weight_scale [N, 1] or [1, 1], or
                                            [⌈N / b⌉, ⌈K / b⌉] for blocks
    Int4Tensor                              _weight_qdata int8 [N, K / 2], signed 4-bit, the first in the low bits;
                                            _weight_scale, _weight_zero_point [K / g, N]: q * scale + zero

Everything else in the file's header follows from shapes and dtypes. Matrices in a kernel's own layout
(Int4TilePackedTo4dTensor, Int4PlainInt32Tensor) or with scaled inputs (_weight_act_pre_scale) are errors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats import repack
from onward.checkpoint.formats.bits import by_block, by_group, nibbles
from onward.checkpoint.formats.settings import Fields, Read, Shape, words
from onward.ops import QuantizedWeight

# The tensors show their own type.
FIELDS = Fields(
    read=frozenset(),
    ignored=words("quant_type quant_type_kwargs include_input_output_embeddings untie_embedding_weights"),
)
_QDATA, _SCALE, _ZERO, _PRE_SCALE = (f"_weight_{name}" for name in ("qdata", "scale", "zero_point", "act_pre_scale"))
_ACTIVATIONS = {"_weight_act_quant_scale", "_weight_act_quant_zero_point"}
_OTHERS = {"_weight_scale_and_zero", "_weight_per_tensor_scale"}  # of GPU tiles, and of NVFP4


class Torchao:
    def parts(self, names: set[str]) -> set[str]:
        return names & {_QDATA, _SCALE, _ZERO, _PRE_SCALE, *_ACTIVATIONS, *_OTHERS} if _QDATA in names else set()

    def weight(self, read: Read, names: set[str], shape: Shape) -> Tensor:
        codes = _codes(read, names, shape)
        if codes.shape[1] != shape[1]:
            signed = _fours(codes).float() - 8
            scale, zero = (_by_rows(read(name)).float() for name in (_SCALE, _ZERO))
            group = _group(scale, shape)
            return signed * by_group(scale, group, shape[1]) + by_group(zero, group, shape[1])
        scale = read(_SCALE).float()
        if codes.dtype == torch.float8_e4m3fn:
            return codes.float() * by_block(scale, _block(scale, shape), shape)
        group = _group(scale, shape)
        zeros = by_group(_zeros(read, names, scale), group, shape[1])
        return (codes.float() - zeros) * by_group(scale, group, shape[1])

    def as_quantized(self, read: Read, names: set[str], shape: Shape, dtype: torch.dtype) -> QuantizedWeight | None:
        codes, scale = _codes(read, names, shape), read(_SCALE)
        if codes.shape[1] != shape[1]:
            if bool((read(_ZERO) != 0).any()):
                return None  # none of Onward's formats combines integer codes with a float zero
            scale = _by_rows(scale)
            return repack.integers(_fours(codes), scale, 8, _group(scale, shape), dtype)
        if codes.dtype == torch.float8_e4m3fn:
            rows, group = _block(scale, shape)
            return repack.e4m3(codes, scale.repeat_interleave(rows, dim=0)[: shape[0]], group, dtype)
        zeros = _zeros(read, names, scale)
        offset = 8 if int(codes.min()) >= -8 and int(codes.max()) < 8 else 128
        return repack.integers(codes.to(torch.int16) + offset, scale, zeros + offset, _group(scale, shape), dtype)


def _codes(read: Read, names: set[str], shape: Shape) -> Tensor:
    codes = read(_QDATA)
    whole = codes.dtype in (torch.int8, torch.float8_e4m3fn) and tuple(codes.shape) == shape
    fours = codes.dtype in (torch.int8, torch.uint8) and tuple(codes.shape) == (shape[0], shape[1] // 2)
    if not (whole or (fours and _ZERO in names)) or names & _OTHERS:
        raise ValueError(
            f"{_QDATA} is {codes.dtype} {list(codes.shape)} with {', '.join(sorted(names - {_QDATA}))}. torchao's "
            "Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor and Int4Tensor are supported, but no layouts of GPU "
            "kernels: save the model in floats, or quantized with Int8WeightOnlyConfig, Float8WeightOnlyConfig or "
            "IntxWeightOnlyConfig"
        )
    if _PRE_SCALE in names:
        raise ValueError(f"{_PRE_SCALE} scales the inputs, which is not supported: save the model without it")
    return codes


def _fours(codes: Tensor) -> Tensor:
    """Packed codes [N, K / 2] -> each plus 8, int64 [N, K]."""
    return nibbles(codes.view(torch.uint8)) ^ 8


def _by_rows(levels: Tensor) -> Tensor:
    """[K / g, N] -> [N, K / g]."""
    if levels.dim() != 2:
        raise ValueError(f"scales and zero points of 4-bit codes must be [K / g, N]; got {list(levels.shape)}")
    return levels.T


def _zeros(read: Read, names: set[str], scale: Tensor) -> Tensor:
    zeros = read(_ZERO).float() if _ZERO in names else torch.zeros_like(scale, dtype=torch.float32)
    if zeros.shape != scale.shape:
        raise ValueError(f"{_ZERO} {list(zeros.shape)} does not match {_SCALE} {list(scale.shape)}")
    return zeros


def _group(scale: Tensor, shape: Shape) -> int:
    """The number of inputs that share one of the scales [N, K / g]."""
    if scale.dim() != 2 or scale.shape[0] != shape[0] or scale.shape[1] == 0 or shape[1] % scale.shape[1]:
        raise ValueError(f"{_SCALE} {list(scale.shape)} does not match a weight {list(shape)}")
    return shape[1] // scale.shape[1]


def _block(scale: Tensor, shape: Shape) -> tuple[int, int]:
    """The rows and inputs that share one of the scales: 128 x 128, unless the sizes divide evenly."""
    if scale.dim() != 2 or 0 in scale.shape:
        raise ValueError(f"{_SCALE} {list(scale.shape)} does not match a weight {list(shape)}")
    rows, inputs = (size // count if size % count == 0 else 128 for size, count in zip(shape, scale.shape, strict=True))
    return rows, inputs


def read_method(settings: Mapping[str, Any]) -> Torchao:
    FIELDS.check(settings)
    return Torchao()
