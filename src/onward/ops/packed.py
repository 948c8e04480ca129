"""Weights in the layout of the native kernels: blocks of 16 rows, interleaved (native/README.md draws it).

Shapes: N rows (outputs), K inputs, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library, advise_huge_pages
from onward.native.structs import Format
from onward.ops.operator import DTYPES, Operator, shapes, usable_library

BLOCK = 16
FORMATS = {torch.float32: Format.F32, torch.bfloat16: Format.BF16, torch.float16: Format.F16}
# How many adjacent inputs of a row are stored together.
_NEIGHBOURS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}


class NativeWeight(NamedTuple):
    """A float weight [N, K] in the layout that the native `linear` reads.

    data: [blocks, units, 16, neighbours] in the weight's dtype; the last block and unit are padded with zeros.
    rows: N. inputs: K.
    """

    data: Tensor
    rows: int
    inputs: int

    def unpack(self) -> Tensor:
        """The stock weight [N, K]."""
        return _unpacked(self.data, self.rows, self.inputs)

    def take(self, ids: Tensor) -> Tensor:
        """Look rows up, as for an embedding: int32 or int64 ids [...] -> [..., K] in the weight's dtype."""
        check_id_dtype(ids)
        return _packed_rows(self.data, ids, self.rows, self.inputs)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device


def pack_native(weight: Tensor) -> NativeWeight | None:
    """A float CPU weight [N, K] packed by the native library; None without a library or a packed format."""
    library = usable_library()
    if library is None or weight.device.type != "cpu" or weight.dtype not in FORMATS:
        return None
    rows, inputs = weight.shape
    data = empty_packed((), rows, inputs, weight.dtype)
    assert data.nbytes == library.onward_linear_packed_bytes(FORMATS[weight.dtype], rows, inputs)
    pack_into(library, weight, data)
    return NativeWeight(data, rows, inputs)


def empty_packed(count: tuple[int, ...], rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Memory for packed weights [rows, inputs]: [*count, blocks, units, 16, neighbours]."""
    pair = 1 if dtype == torch.float32 else 2  # half-width units fill a 64-byte line in pairs
    neighbours = _NEIGHBOURS[dtype]
    units = -(-inputs // pair) * pair // neighbours
    data = torch.empty((*count, -(-rows // BLOCK), units, BLOCK, neighbours), dtype=dtype)
    advise_huge_pages(data.data_ptr(), data.nbytes)
    return data


def pack_into(library: Library, weight: Tensor, data: Tensor) -> None:
    """Pack a float weight [N, K] into the memory of `empty_packed`, which counts as a write to `data`."""
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    status = library.onward_linear_pack(
        FORMATS[weight.dtype], *weight.shape, weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0), data.data_ptr()
    )
    library.check(status, "onward_linear_pack")
    increment_version(data)  # torch doesn't see the kernel's writes, and `WeightsVersion` relies on torch


def native_linear(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times the packed weight, plus bias -> [..., N]; x and bias have the weight's dtype."""
    return _packed_linear(x, weight.data, bias, weight.rows, weight.inputs)


def _unpacked(data: Tensor, rows: int, inputs: int) -> Tensor:
    return data.permute(0, 2, 1, 3).reshape(data.shape[0] * BLOCK, -1)[:rows, :inputs]


def _linear_definition(x: Tensor, data: Tensor, bias: Tensor | None, rows: int, inputs: int) -> Tensor:
    return F.linear(x, _unpacked(data, rows, inputs), bias)


def native_product(library: Library, format: Format, x: Tensor, data: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """x [..., K] times a weight packed in any format, plus bias."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    inputs, code = x.shape[-1], DTYPES[x.dtype]
    out = x.new_empty((*x.shape[:-1], rows))
    bias_pointer, bias_code = (None, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])
    status = library.onward_linear(
        format, x.numel() // inputs, rows, inputs, x.data_ptr(), code, inputs, data.data_ptr(), bias_pointer, bias_code,
        out.data_ptr(), code, rows,
    )  # fmt: skip
    library.check(status, "onward_linear")
    return out


def check_id_dtype(ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise RequestError(f"rows of a weight are looked up by int32 or int64 ids; got {shapes(ids=ids)}")


def check_ids(ids: Tensor, rows: int) -> None:
    """Raise for an id outside the table, which would read padding or another row.

    Devices other than the CPU check by themselves: this process would have to wait for the result.
    """
    if ids.device.type != "cpu":
        assert_ids(ids, rows)
    elif ids.numel():
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= rows:
            raise RequestError(f"ids of a table of {rows} rows lie in 0 … {rows - 1}; got {lowest} … {highest}")


def assert_ids(ids: Tensor, rows: int) -> None:
    """`check_ids` on the device, without a read on the host."""
    torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"an id lies outside 0 … {rows - 1}")


def _rows_definition(data: Tensor, ids: Tensor, rows: int, inputs: int) -> Tensor:
    check_ids(ids, rows)
    return data[ids // BLOCK, :, ids % BLOCK].flatten(-2)[..., :inputs]


def native_rows(
    library: Library, format: Format, data: Tensor, ids: Tensor, rows: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    """The rows at `ids`, in `dtype`, of a weight [rows, inputs] packed in any format."""
    check_ids(ids, rows)
    wide = ids.to(torch.int64).contiguous()
    out = torch.empty((*ids.shape, inputs), dtype=dtype)
    status = library.onward_linear_rows(
        format, rows, inputs, data.data_ptr(), wide.data_ptr(), wide.numel(), out.data_ptr(), DTYPES[dtype], inputs
    )
    library.check(status, "onward_linear_rows")
    return out


_packed_linear: Operator[Tensor] = Operator(
    "packed_linear(Tensor x, Tensor data, Tensor? bias, int rows, int inputs) -> Tensor",
    _linear_definition,
    lambda library, x, data, bias, rows, inputs: native_product(library, FORMATS[data.dtype], x, data, bias, rows),
    lambda x, data, bias, rows, inputs: x.new_empty((*x.shape[:-1], rows)),
)
_packed_rows: Operator[Tensor] = Operator(
    "packed_rows(Tensor data, Tensor ids, int rows, int inputs) -> Tensor",
    _rows_definition,
    lambda library, data, ids, rows, inputs: native_rows(
        library, FORMATS[data.dtype], data, ids, rows, inputs, data.dtype
    ),
    lambda data, ids, rows, inputs: data.new_empty((*ids.shape, inputs)),
)
