"""GGUF blocks -> parts of Onward's formats, packed weights, and float32 values that equal ggml's bit for bit. `rows` is
uint8 [N, bytes of a row]; a row is whole blocks. docs/gguf.md lists the types."""

from collections.abc import Callable

import torch
from torch import Tensor

from onward.checkpoint.gguf.reader import BlockType
from onward.errors import CheckpointError
from onward.native import advise_huge_pages
from onward.native.interface import Code, Int, Pointer, Status, kernel
from onward.ops import QuantizedWeight, quantized
from onward.ops import quantized_layout as layout
from onward.ops.operator import usable_library
from onward.ops.quantized_layout import Parts

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def float_rows(type: BlockType, rows: Tensor) -> Tensor | None:
    """[N, K] of a float type, without a copy if aligned; None for other types."""
    dtype = _FLOATS.get(type.name)
    if dtype is None:
        return None
    if rows.data_ptr() % dtype.itemsize:
        rows = rows.clone()
    return rows.view(dtype)


def dequantized(type: BlockType, rows: Tensor) -> Tensor:
    """float32 [N, K], equal to ggml's dequantization."""
    plain = float_rows(type, rows)
    if plain is not None:
        return plain.to(torch.float32)
    return layout.grouped_values(grouped_format(type), read_parts(type, rows))


def _format(type: BlockType) -> str:
    """Onward's format with the numbers of a type. Q4_0 is int4 with bytes in another order."""
    return "int4" if type.name == "Q4_0" else type.name.lower()


def grouped_format(type: BlockType) -> layout.GroupedFormat:
    return layout.GROUPED_FORMATS[_format(type)]


def read_parts(type: BlockType, rows: Tensor) -> Parts:
    blocks = rows.reshape(-1, type.size)
    return _READERS[type.name](blocks).map(lambda part: part.reshape(len(rows), -1))


def scales_are_finite(type: BlockType, parts: Parts) -> bool:
    """Whether all scales are finite. E8M0 has one exponent, 255, for NaN."""
    if grouped_format(type).exponent:
        return not bool((parts.scales == 255).any())
    return all(bool(level.isfinite().all()) for level in (parts.scales, parts.minima) if level is not None)


def _f16(blocks: Tensor, at: int) -> Tensor:
    """float16 [blocks, 1] from byte `at`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, bytes] -> [blocks, 2 * bytes]: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fields(packed: Tensor, bits: int, count: int) -> Tensor:
    """[…, n] -> […, count, n]: field i of each byte, lowest bits first."""
    return torch.stack([packed >> bits * i & (1 << bits) - 1 for i in range(count)], -2)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[:, 2:]), _f16(blocks, 0))


def _fifth_bits(packed: Tensor) -> Tensor:
    """4 bytes of a block -> [blocks, 32]: bit i as bit 4 of code i."""
    return (torch.stack([packed >> i & 1 for i in range(8)], -1) << 4).flatten(1)


def _sub_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits. Four of each are the low bits of the first 8 bytes. The others have
    4 bits in the last bytes, and their upper 2 bits above those of the first."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    return scales, torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)


def _halves_of_32(packed: Tensor) -> Tensor:
    """128 bytes -> 256 nibbles: of every 32 bytes the low halves, then the high ones."""
    return _nibbles(packed.reshape(len(packed), 4, 32)).flatten(1)


def _q5_k(blocks: Tensor) -> Parts:
    fifth = (_fields(blocks[:, 16:48], 1, 8) << 4).flatten(1)
    codes = _halves_of_32(blocks[:, 48:]) | fifth
    return Parts(codes, _f16(blocks, 0), _f16(blocks, 2), *_sub_scales(blocks[:, 4:16]))


def _q6_k(blocks: Tensor) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).flatten(1)
    return Parts(low | high << 4, _f16(blocks, 208), None, blocks[:, 192:208].view(torch.int8))


def _q2_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4).flatten(1)
    levels = _f16(blocks, 80), _f16(blocks, 82)
    return Parts(codes, *levels, blocks[:, :16] & 15, blocks[:, :16] >> 4)


def _q3_k(blocks: Tensor) -> Parts:
    third = (_fields(blocks[:, :32], 1, 8) << 2).flatten(1)
    codes = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).flatten(1) | third
    low, high = _nibbles(blocks[:, 96:104]), _fields(blocks[:, 104:108], 2, 4).flatten(1)
    return Parts(codes, _f16(blocks, 108), None, (low | high << 4).view(torch.int8) - 32)


def _iq4_xs(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> 2 * i & 3 for i in range(4)], -1).flatten(1)
    return Parts(codes, _f16(blocks, 0), None, (low | high << 4).view(torch.int8) - 32)


_READERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": lambda b: Parts(_nibbles(b[:, 4:]), _f16(b, 0), -_f16(b, 2)),
    "Q5_0": lambda b: Parts(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), _f16(b, 0)),
    "Q5_1": lambda b: Parts(_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _f16(b, 0), -_f16(b, 2)),
    "Q8_0": lambda b: Parts(b[:, 2:] ^ 128, _f16(b, 0)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda b: Parts(_halves_of_32(b[:, 16:]), _f16(b, 0), _f16(b, 2), *_sub_scales(b[:, 4:16])),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": lambda b: Parts(_nibbles(b[:, 1:]), b[:, :1]),
}


# Rows packed at a time without the native library, which bounds temporary memory.
_AT_ONCE = 64 * layout.BLOCK


def packed_format(type: BlockType, inputs: int) -> str | None:
    """Onward's format for blocks of a type; None for floats, and for rows longer than the kernels support."""
    return None if type.weights == 1 or inputs > layout.MAX_INPUTS else _format(type)


@kernel
def onward_linear_pack_blocks(
    format: Code, rows: Int, inputs: Int, blocks: Pointer, row_bytes: Int, packed: Pointer
) -> Code: ...


def pack_blocks(type: BlockType, rows: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Pack rows, uint8 [N, bytes of a row] on the CPU. dtype: of the weight that the result represents."""
    shape = len(rows), rows.shape[1] // type.size * type.weights
    format = packed_format(type, shape[1])
    assert format is not None
    library = usable_library()
    if library is None:
        data = torch.cat([_packed(type, rows[at : at + _AT_ONCE]) for at in range(0, shape[0], _AT_ONCE)])
        return QuantizedWeight(data, format, shape, dtype)
    data = torch.empty(layout.data_shape(format, shape), dtype=torch.uint8)
    advise_huge_pages(data.data_ptr(), data.nbytes)
    status = library.onward_linear_pack_blocks(
        quantized.FORMATS[format], *shape, rows.data_ptr(), rows.stride(0), data.data_ptr()
    )
    # The reader of the file checked the other arguments.
    if status == Status.BAD_ARGUMENT:
        raise _broken_scales()
    library.check(status, onward_linear_pack_blocks)
    return QuantizedWeight(data, format, shape, dtype)


def _packed(type: BlockType, rows: Tensor) -> Tensor:
    parts = read_parts(type, rows)
    if not scales_are_finite(type, parts):
        raise _broken_scales()
    return layout.pack_parts(grouped_format(type), parts)


def _broken_scales() -> CheckpointError:
    return CheckpointError("it has scales that are not finite")
