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

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, QuantizationMethod, Read, words
from onward.checkpoint.formats.stored import (
    Float8,
    Floats,
    Integers,
    Shape,
    StoredWeight,
    by_group,
    nibbles,
    rows_of_blocks,
)

# The tensors show their own type.
FIELDS = Fields(
    read=frozenset(),
    ignored=words("quant_type quant_type_kwargs include_input_output_embeddings untie_embedding_weights"),
)
_QDATA, _SCALE, _ZERO, _PRE_SCALE = (f"_weight_{name}" for name in ("qdata", "scale", "zero_point", "act_pre_scale"))
_ACTIVATIONS = {"_weight_act_quant_scale", "_weight_act_quant_zero_point"}
_OTHERS = {"_weight_scale_and_zero", "_weight_per_tensor_scale"}  # of GPU tiles, and of NVFP4


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    return QuantizationMethod({_QDATA, _SCALE, _ZERO, _PRE_SCALE, *_ACTIVATIONS, *_OTHERS}, {_QDATA}, _decode)


def _decode(read: Read, names: Set[str], shape: Shape) -> StoredWeight:
    codes, scale = _codes(read, names, shape), read(_SCALE)
    if codes.shape[1] != shape[1]:
        shifted, scale, zero = nibbles(codes.view(torch.uint8)) ^ 8, _by_rows(scale), _by_rows(read(_ZERO))
        group = _group(scale, shape)
        if not bool((zero != 0).any()):
            return Integers(shifted, scale, 8, group)
        # None of Onward's formats combines integer codes with a float zero.
        scaled = (shifted.float() - 8) * by_group(scale.float(), group, shape[1])
        return Floats(scaled + by_group(zero.float(), group, shape[1]))
    if codes.dtype == torch.float8_e4m3fn:
        block = _block(scale, shape)
        return Float8(codes, rows_of_blocks(scale.float(), block, shape), block[1])
    zeros = torch.zeros_like(scale, dtype=torch.float32) if _ZERO not in names else read(_ZERO).float()
    if zeros.shape != scale.shape:
        raise ValueError(f"{_ZERO} {list(zeros.shape)} does not match {_SCALE} {list(scale.shape)}")
    offset = 8 if int(codes.min()) >= -8 and int(codes.max()) < 8 else 128
    return Integers(codes.to(torch.int16) + offset, scale, zeros + offset, _group(scale, shape))


def _codes(read: Read, names: Set[str], shape: Shape) -> Tensor:
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


def _by_rows(levels: Tensor) -> Tensor:
    """[K / g, N] -> [N, K / g]."""
    if levels.dim() != 2:
        raise ValueError(f"scales and zero points of 4-bit codes must be [K / g, N]; got {list(levels.shape)}")
    return levels.T


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
