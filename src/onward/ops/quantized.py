"""Quantized weights: the product with them, and their rows as an embedding.

Shapes: N rows (outputs), K inputs, T tokens.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from onward.errors import RequestError
from onward.native.interface import Format
from onward.ops import quantized_layout as layout
from onward.ops.kernel_calls import DTYPES
from onward.ops.operator import Backward, Gradients, Operator, may_be_followed, shapes
from onward.ops.packed import Product, call_linear, call_rows, check_id_dtype, check_ids

# The formats that Onward quantizes to, and all formats, those of quantized checkpoints included.
ROUNDED_FORMATS = {"int8": Format.INT8, "int4": Format.INT4, "iq4_nl": Format.IQ4_NL}
FORMATS = ROUNDED_FORMATS | {name: Format[name.upper()] for name in layout.GROUPED_FORMATS}
_SCALE_DTYPES = {"int8": torch.float32, "int4": torch.float16, "iq4_nl": torch.float16}


def rounded_formats() -> str:
    """The names in `ROUNDED_FORMATS`, for messages."""
    *names, last = map(repr, ROUNDED_FORMATS)
    return f"{', '.join(names)} or {last}"


class PackedTensors:
    """Base class of quantized weights: tensors, and the dtype of the original weights."""

    data: Tensor
    dtype: torch.dtype
    order: Tensor | None = None

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same numbers on another device, with another dtype for its values."""
        changes: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if device is not None:
            changes |= {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **changes)  # type: ignore[type-var]

    def tensors(self) -> dict[str, Tensor]:
        return {"data": self.data} | ({} if self.order is None else {"order": self.order})

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(frozen=True, eq=False)
class QuantizedWeight(PackedTensors):
    """A quantized weight [N, K], packed. A pytree of its tensors.

    data: uint8, in the layout of `quantized_layout`; contiguous. The kernels are fast if it is 64-byte aligned.
    format: "int8", or one of `onward.ops.quantized_layout`: "int4", "iq4_nl", and those of quantized checkpoints.
    shape: (N, K).
    dtype: of the original weight, and of the values of `rows` and `dequantize`.
    order: int64 [K], a permutation: packed column j multiplies input order[j]. None: input j.
    """

    data: Tensor
    format: str
    shape: tuple[int, int]
    dtype: torch.dtype
    order: Tensor | None = None

    @classmethod
    def pack(cls, format: str, q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> "QuantizedWeight":
        """Pack int8 q [N, K] and scales [N, groups], which are float32 for int8 and else float16.

        q are the integers of int8 and int4, and for iq4_nl indices 0 … 15 in `quantized_layout.IQ4`. They are not
        checked to be in the format's range.

        Raises:
            RequestError: an unknown format, or shapes and dtypes that don't match it.
        """
        rows, inputs = q.shape if q.dim() == 2 else (0, 0)
        if format not in ROUNDED_FORMATS:
            raise RequestError(f"a weight is packed as {rounded_formats()}; got {format!r}")
        if not 1 <= inputs <= layout.MAX_INPUTS or rows < 1 or q.dtype != torch.int8:
            raise RequestError(
                f"the integers of a weight must be int8 [N, K] with 1 … {layout.MAX_INPUTS} inputs; got {shapes(q=q)}"
            )
        groups, scale_dtype = layout.num_groups(format, inputs), _SCALE_DTYPES[format]
        if scales.shape != (rows, groups) or scales.dtype != scale_dtype:
            raise RequestError(
                f"{format} integers {[rows, inputs]} expect scales {scale_dtype} {[rows, groups]}; "
                f"got {shapes(scales=scales)}"
            )
        return cls(layout.pack(format, q.contiguous(), scales.contiguous()), format, (rows, inputs), dtype)

    def in_order(self, order: Tensor | None) -> "QuantizedWeight":
        """The same bytes, with another order of the inputs."""
        return replace(self, order=order)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The integers and scales, as `pack` takes them; a `RequestError` for other formats than `pack` supports."""
        if self.format not in ROUNDED_FORMATS or self.order is not None:
            raise RequestError(f"a weight in {self.format} has scales of other kinds: use dequantize() for its values")
        return layout.unpack(self.format, self.data, self.shape)

    def dequantize(self) -> Tensor:
        """[N, K] in `dtype`."""
        slices = _row_slices(self.data, self.format, *self.shape)
        return self._by_input(torch.cat([values.to(self.dtype) for _, values in slices]))

    def rows(self, ids: Tensor) -> Tensor:
        """Look rows up, as for an embedding: int32 or int64 ids [...] -> [..., K] in `dtype`."""
        check_id_dtype(ids)
        return self._by_input(_rows(self.data, ids, self.format, *self.shape, self.dtype))

    def _by_input(self, columns: Tensor) -> Tensor:
        """[..., K] in the order of the packed columns -> in that of the inputs."""
        return columns if self.order is None else columns[..., self.order.argsort()]


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, with x rounded to 8 bits if codes are integers, so that the products are, too.

    For int8 each token is rounded with the scale absmax / 127. For fp8 and nf4 nothing is rounded. For the others each
    group of 32 inputs of a token is rounded with that scale, itself rounded up to a power of two (as MXINT8 of the OCP
    Microscaling Formats, arXiv 2310.10537, but never clipped). Gradients pass to x as if it had not been rounded.

    Args:
        x: float32, bfloat16 or float16 [..., K]. A token with an infinity or a NaN returns NaN, and
            with scales of groups also one that reaches 2^110.
        weight: of shape (N, K).
        bias: float [N], or None.

    Returns:
        [..., N] in x's dtype.
    """
    rows, inputs = weight.shape
    if x.dim() == 0 or x.shape[-1] != inputs or x.dtype not in DTYPES:
        raise RequestError(f"linear: a weight {[rows, inputs]} expects float x [..., {inputs}]; got {shapes(x=x)}")
    if bias is not None and (bias.shape != (rows,) or bias.dtype not in DTYPES):
        raise RequestError(f"linear: a weight {[rows, inputs]} expects a float bias [{rows}]; got {shapes(bias=bias)}")
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    return _linear(x, weight.data, bias, weight.format, rows)


def round_activations(x: Tensor, format: str) -> Tensor:
    """float32 x [T, K], rounded to 8 bits for a weight of `format`, as in the kernels; unchanged for fp8 and nf4."""
    if format in layout.GROUPED_FORMATS and layout.GROUPED_FORMATS[format].floats:
        return x
    tokens, inputs = x.shape
    group = inputs if format == "int8" else layout.GROUP
    grouped = pad(x, (0, -inputs % group)).view(tokens, math.ceil(inputs / group), group)
    absmax = grouped.abs().amax(-1, keepdim=True)
    if format == "int8":
        scale, smallest, largest = absmax / 127.0, 1e-36, math.inf
        # torch computes number / tensor as number * reciprocal, which rounds twice; the kernels divide.
        q = (grouped * (torch.full_like(absmax, 127.0) / absmax)).round()
    else:
        # The smallest power of two that scales absmax to 127 or less. Within these bounds its products are exact.
        mantissa, exponent = torch.frexp(absmax)
        exponent = exponent - torch.where(mantissa > 127 / 128, 6, 7)
        scale = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
        smallest, largest = 2.0**-95, 2.0**110
        q = (grouped / scale).round()
    # Groups of smaller values count as zeros. A value that is not finite makes its group, and so its token, NaN.
    rounded = torch.where(absmax >= smallest, q * scale, 0.0)
    return torch.where(absmax < largest, rounded, torch.nan).flatten(1)[:, :inputs]


def rounded_activations(x: Tensor, format: str) -> Tensor:
    """`round_activations`, with the derivative of x if autograd follows it: rounding has none."""
    rounded = round_activations(x, format)
    return x + (rounded - x).detach() if may_be_followed(x) else rounded


def _row_slices(data: Tensor, format: str, rows: int, inputs: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows with their float32 values [some rows, K], few enough to stay in the processor's cache."""
    blocks = math.ceil(2**20 / (layout.BLOCK * inputs))
    for block in range(0, len(data), blocks):
        first = block * layout.BLOCK
        values = layout.values(format, data[block : block + blocks], inputs)[: rows - first]
        yield slice(first, first + len(values)), values


def _linear_definition(x: Tensor, data: Tensor, bias: Tensor | None, format: str, rows: int) -> Tensor:
    inputs = x.shape[-1]
    rounded = rounded_activations(x.reshape(x.numel() // inputs, inputs).to(torch.float32), format)
    out = x.new_empty((len(rounded), rows))
    for run, values in _row_slices(data, format, rows, inputs):
        sums = rounded @ values.T
        out[:, run] = sums if bias is None else sums + bias[run]
    return out.view(*x.shape[:-1], rows)


def _rows_definition(data: Tensor, ids: Tensor, format: str, rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    check_ids(ids, rows)
    values = layout.row_values(format, data, ids.flatten().to(torch.int64), inputs)
    return values.to(dtype).view(*ids.shape, inputs)


def _linear_gradient(
    backward: Backward, x: Tensor, data: Tensor, bias: Tensor | None, format: str, rows: int
) -> Gradients:
    """That of the product with activations that were not rounded; it holds few float weights at a time."""
    grad, inputs = backward.grad, x.shape[-1]
    flat = grad.reshape(grad.numel() // rows, rows).to(torch.float32)
    to_x = to_bias = None
    if backward.needs[0]:
        to_x = flat.new_zeros((len(flat), inputs))
        for run, values in _row_slices(data, format, rows, inputs):
            to_x.addmm_(flat[:, run], values)
        to_x = to_x.to(x.dtype).view(x.shape)
    if bias is not None and backward.needs[2]:
        to_bias = flat.sum(0).to(bias.dtype)
    return to_x, None, to_bias


_linear: Operator[Tensor] = Operator(
    "quantized_linear(Tensor x, Tensor data, Tensor? bias, str format, int rows) -> Tensor",
    _linear_definition,
    lambda k, out, x, data, bias, format, rows: call_linear(k, x, FORMATS[format], [Product(out, data, bias)]),
    lambda x, data, bias, format, rows: x.new_empty((*x.shape[:-1], rows)),
    gradient=_linear_gradient,
    lean=True,
)
_rows: Operator[Tensor] = Operator(
    "quantized_rows(Tensor data, Tensor ids, str format, int rows, int inputs, ScalarType dtype) -> Tensor",
    _rows_definition,
    lambda k, out, data, ids, format, rows, inputs, dtype: call_rows(k, out, FORMATS[format], data, ids, rows, inputs),
    lambda data, ids, format, rows, inputs, dtype: data.new_empty((*ids.shape, inputs), dtype=dtype),
    check=lambda data, ids, format, rows, inputs, dtype: check_ids(ids, rows),
)


def register_tensors(kind: type, *names: str) -> None:
    """Make a dataclass a pytree of its fields `names`, without those that are None."""
    others = [each.name for each in fields(kind) if each.name not in names]

    def present(value: Any) -> dict[str, Any]:
        return {name: tensor for name in names if (tensor := getattr(value, name)) is not None}

    def context(value: Any) -> tuple[Any, ...]:
        return tuple(present(value)), tuple(getattr(value, name) for name in others)

    def made(leaves: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return kind(**dict(zip(context[0], leaves, strict=True)), **dict(zip(others, context[1], strict=True)))

    pytree.register_pytree_node(
        kind,
        lambda value: (list(present(value).values()), context(value)),
        made,
        flatten_with_keys_fn=lambda value: (
            [(pytree.GetAttrKey(name), tensor) for name, tensor in present(value).items()],
            context(value),
        ),
    )


register_tensors(QuantizedWeight, "data", "order")
