"""Weights in the layout of the native kernels: blocks of 16 rows, interleaved (native/README.md draws it).

Shapes: N rows (outputs), K inputs, T tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library, advise_huge_pages
from onward.native.interface import Code, Format, Int, Pointer, Structure, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Backward, Gradients, Operator, shapes, usable_library

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


@kernel
def onward_linear_packed_bytes(format: Code, rows: Int, inputs: Int) -> Int: ...
@kernel
def onward_linear_pack(
    format: Code, rows: Int, inputs: Int, w: Pointer, w_dtype: Code, w_stride: Int, packed: Pointer
) -> Code: ...


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
    data = torch.empty((*count, *packed_shape(rows, inputs, dtype)), dtype=dtype)
    advise_huge_pages(data.data_ptr(), data.nbytes)
    return data


def packed_shape(rows: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """[blocks, units, 16, neighbours]: the shape of a packed weight [rows, inputs]."""
    pair = 1 if dtype == torch.float32 else 2  # half-width units fill a 64-byte line in pairs
    neighbours = _NEIGHBOURS[dtype]
    return -(-rows // BLOCK), -(-inputs // pair) * pair // neighbours, BLOCK, neighbours


def pack_into(library: Library, weight: Tensor, data: Tensor) -> None:
    """Pack a float weight [N, K] into the memory of `empty_packed`, in its dtype, which counts as a write to `data`."""
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    status = library.onward_linear_pack(
        FORMATS[data.dtype], *weight.shape, weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0), data.data_ptr()
    )
    library.check(status, onward_linear_pack)
    increment_version(data)  # torch doesn't see the kernel's writes, and `WeightsVersion` relies on torch


def store(stock: Sequence[Tensor], data: Tensor) -> None:
    """Copy weights into `data`, which then holds what it would if it had been made from them: packed or in rows, in its
    dtype, stacked if there are several."""
    for part, into in ((stock[0], data),) if len(stock) == 1 else zip(stock, data, strict=True):
        if into.dim() == part.dim():
            into.copy_(part)
            continue
        library = usable_library()
        assert library is not None, "nothing is packed without kernels"
        for matrix, packed in ((part, into),) if part.dim() == 2 else zip(part, into, strict=True):
            pack_into(library, matrix, packed)


def native_linear(x: Tensor, weight: NativeWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times the packed weight, plus bias -> [..., N]; x and bias have the weight's dtype."""
    return _packed_linear(x, weight.data, bias, weight.rows, weight.inputs)


def _unpacked(data: Tensor, rows: int, inputs: int) -> Tensor:
    """[…, blocks, units, 16, neighbours] -> […, N, K]."""
    return data.transpose(-2, -3).flatten(-4, -3).flatten(-2)[..., :rows, :inputs]


def packed_view(weight: Tensor) -> Tensor:
    """Stock weights [..., N, K] in the shape of packed ones, over the memory of the stock ones where nothing has to be
    padded: of a gradient, whose layout makes no difference."""
    pair = 1 if weight.dtype == torch.float32 else 2
    neighbours, (rows, inputs) = _NEIGHBOURS[weight.dtype], weight.shape[-2:]
    if rows % BLOCK or inputs % pair:
        weight = F.pad(weight, (0, -inputs % pair, 0, -rows % BLOCK))
    *leading, padded_rows, padded_inputs = weight.shape
    blocks = weight.view(*leading, padded_rows // BLOCK, BLOCK, padded_inputs // neighbours, neighbours)
    return blocks.transpose(-2, -3)


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, *stock: Tensor) -> Tensor:
        ctx.dtype, ctx.size, ctx.count = stock[0].dtype, stock[0].shape[-2:], len(stock)
        ctx.is_packed = data.dim() > stock[0].dim() + (len(stock) > 1)
        ctx.set_materialize_grads(False)
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * (1 + ctx.count)
        grad = (_unpacked(grad, *ctx.size) if ctx.is_packed else grad).to(ctx.dtype)
        return (None, grad) if ctx.count == 1 else (None, *grad.unbind())


def in_graph_of(data: Tensor, *stock: Tensor) -> Tensor:
    """`data` with a gradient that autograd passes on to `stock`: the weights that it holds a copy of, packed or in
    another dtype; several, if it stacks them. It shares the memory of `data`."""
    stored: Tensor = _Stored.apply(data, *stock)  # type: ignore[no-untyped-call]
    return stored


def _linear_definition(x: Tensor, data: Tensor, bias: Tensor | None, rows: int, inputs: int) -> Tensor:
    return F.linear(x, _unpacked(data, rows, inputs), bias)


def _linear_gradient(
    backward: Backward, x: Tensor, data: Tensor, bias: Tensor | None, rows: int, inputs: int
) -> Gradients:
    grad = backward.grad.reshape(-1, rows)
    to_x = to_data = to_bias = None
    if backward.needs[0]:
        to_x = (grad @ _unpacked(data, rows, inputs)).view(x.shape)
    if backward.needs[1]:
        to_data = packed_view(grad.T @ x.reshape(-1, inputs))
    if backward.needs[2]:
        to_bias = grad.sum(0)
    return to_x, to_data, to_bias


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


def _rows_gradient(backward: Backward, data: Tensor, ids: Tensor, rows: int, inputs: int) -> Gradients:
    return (packed_view(torch.ops.aten.embedding_dense_backward(backward.grad, ids.long(), rows, -1, False)),)


class LinearArguments(Structure):
    """OnwardLinear of native/src/linear/linear.cpp: one packed matrix [n, k] and its output."""

    _fields_ = (
        ("n", Int),
        *((name, Pointer) for name in ("packed", "bias", "out")),
        ("out_stride", Int),
        *((name, Code) for name in ("bias_dtype", "out_dtype")),
    )


@kernel
def onward_linear_many(
    products: LinearArguments, count: Int, format: Code, t: Int, k: Int, x: Pointer, x_dtype: Code, x_stride: Int
) -> Code: ...


class Product(NamedTuple):
    """A product of a call: the result [..., N], the data of its weight and the bias."""

    out: Operand
    data: Operand
    bias: Operand | None


def call_linear(k: KernelCalls, x: Operand, format: Format, products: Sequence[Product]) -> None:
    """One call for the products of one x with weights of one format."""
    x, rows, inputs, stride = k.rows(x)
    structs = [_struct(k, product) for product in products]
    k.call(onward_linear_many, k.array(structs), len(structs), format, rows, inputs, k.address(x), k.code(x), stride)


def _struct(k: KernelCalls, product: Product) -> Any:
    out, data, bias = product
    outputs, bias_dtype = out.shape[-1], 0 if bias is None else k.code(bias)
    return k.struct(
        LinearArguments, n=outputs, packed=k.optional(data), bias=k.optional(bias), out=k.address(out),
        out_stride=outputs, bias_dtype=bias_dtype, out_dtype=k.code(out),
    )  # fmt: skip


# ids: int64, or None for all rows
@kernel
def onward_linear_rows(
    format: Code, rows: Int, inputs: Int, packed: Pointer, ids: Pointer, count: Int, out: Pointer, out_dtype: Code,
    out_stride: Int,
) -> Code: ...  # fmt: skip


def call_rows(
    k: KernelCalls, out: Operand, format: Format, data: Operand, ids: Operand, rows: int, inputs: int
) -> None:
    """The rows at `ids` of a weight [rows, inputs] packed in any format."""
    ids, data = k.cast(ids, torch.int64), k.contiguous(data)
    k.call(
        onward_linear_rows, format, rows, inputs, k.address(data), k.address(ids), math.prod(ids.shape), k.address(out),
        k.code(out), inputs,
    )  # fmt: skip


_packed_linear: Operator[Tensor] = Operator(
    "packed_linear(Tensor x, Tensor data, Tensor? bias, int rows, int inputs) -> Tensor",
    _linear_definition,
    lambda k, out, x, data, bias, *_: call_linear(k, x, FORMATS[data.dtype], [Product(out, data, bias)]),
    lambda x, data, bias, rows, inputs: x.new_empty((*x.shape[:-1], rows)),
    gradient=_linear_gradient,
)
_packed_rows: Operator[Tensor] = Operator(
    "packed_rows(Tensor data, Tensor ids, int rows, int inputs) -> Tensor",
    _rows_definition,
    lambda k, out, data, *rest: call_rows(k, out, FORMATS[data.dtype], data, *rest),
    lambda data, ids, rows, inputs: data.new_empty((*ids.shape, inputs)),
    check=lambda data, ids, rows, inputs: check_ids(ids, rows),
    gradient=_rows_gradient,
)
