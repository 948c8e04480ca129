"""`KernelCalls`: how an op calls its kernel, the same eagerly and in a program.

An op's kernel function is written once. In an eager call it gets tensors and `LibraryCalls`, which calls the native
library. In a program it gets the arrays of a trace and the program's builder, which records the calls. `Operand` is the
interface that tensors and arrays share; everything else goes through `KernelCalls`.

A kernel function must not read values, and must not branch on the numbers of rows and tokens: one program serves many
of them. Where the kernel doesn't support its arguments, it raises `Unsupported` and torch runs the op instead.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.native import Library
from onward.native.interface import DType, Structure

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


class Unsupported(Exception):  # noqa: N818 - not an error: torch runs the op instead
    """No kernel supports this use of an op; the message names the missing feature."""


class Operand(Protocol):
    """An argument of a kernel function: a tensor in an eager call, an array in a program."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def stride(self) -> tuple[int, ...]: ...
    def is_contiguous(self) -> bool: ...


class KernelCalls(ABC):
    """Makes or records the kernel calls of one op. Copies that it makes live until the calls are done.

    address: returns the address of a tensor's first element.
    """

    __slots__ = ()
    address: Callable[[Any], Any]

    @abstractmethod
    def call(self, kernel: str, *arguments: Any) -> None:
        """Call a kernel, by the name that `onward.native.interface.kernel` returns."""

    @abstractmethod
    def address_at(self, x: Any, offset: int) -> Any:
        """The address of the element `offset` elements after the first."""

    @abstractmethod
    def struct(self, kind: type[Structure], **fields: Any) -> Any:
        """A structure; fields that are left out are 0 or null."""

    @abstractmethod
    def array(self, structs: Sequence[Any]) -> Any:
        """The address of structures of one kind."""

    @abstractmethod
    def int64s(self, values: Sequence[int]) -> Any:
        """The address of integers, such as strides."""

    @abstractmethod
    def constant(self, tensor: Tensor) -> Any:
        """A tensor that the kernel function made from sizes."""

    @abstractmethod
    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        """A contiguous copy in this dtype."""

    @abstractmethod
    def num_slots(self, count: int) -> int:
        """The size of memory that rows share, as a kernel's bound: a program serves memory of any size."""

    def code(self, x: Operand) -> int:
        """The `DType` code of a float tensor; raises `Unsupported` for another dtype."""
        code = DTYPES.get(x.dtype)
        if code is None:
            raise Unsupported(f"dtype {x.dtype}")
        return code

    def contiguous(self, x: Operand) -> Any:
        """The tensor or a contiguous copy."""
        return x if x.is_contiguous() else self.cast(x, x.dtype)

    def contiguous_rows(self, x: Operand) -> Any:
        """The tensor, or a copy whose last dimension is contiguous."""
        return x if x.stride()[-1] == 1 else self.contiguous(x)

    def optional(self, x: Operand | None) -> Any:
        """The address of a contiguous tensor or copy; None for None."""
        return None if x is None else self.address(self.contiguous(x))

    def rows(self, x: Operand) -> tuple[Any, int, int, int]:
        """A tensor [..., D] as evenly spaced rows: (the tensor or a copy, number of rows, D, stride of the rows)."""
        layout = _uniform_rows(x)
        if layout is None:
            x = self.contiguous(x)
            layout = _uniform_rows(x)
            assert layout is not None
        return (x, *layout)


class LibraryCalls(KernelCalls):
    """The calls of one eager call of an op, on CPU tensors."""

    __slots__ = ("_copies", "_library")

    def __init__(self, library: Library) -> None:
        self._library = library
        self._copies: list[Tensor] = []

    def call(self, kernel: str, *arguments: Any) -> None:
        status = getattr(self._library, kernel)(*arguments)
        if status:
            self._library.check(status, kernel)

    address = staticmethod(Tensor.data_ptr)

    def address_at(self, x: Tensor, offset: int) -> int:
        return x.data_ptr() + offset * x.element_size()

    def struct(self, kind: type[Structure], **fields: Any) -> Structure:
        return kind(**fields)

    def array(self, structs: Sequence[Structure]) -> Any:
        return structs[0] if len(structs) == 1 else (type(structs[0]) * len(structs))(*structs)

    def int64s(self, values: Sequence[int]) -> Any:
        return (ctypes.c_int64 * len(values))(*values)

    def constant(self, tensor: Tensor) -> Tensor:
        self._copies.append(tensor)
        return tensor

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.constant(x.to(dtype).contiguous())

    def num_slots(self, count: int) -> int:
        return count

    def rows(self, x: Operand) -> tuple[Any, int, int, int]:
        if not x.is_contiguous():
            return super().rows(x)
        columns = x.shape[-1]
        return x, x.numel() // (columns or 1), columns, columns  # type: ignore[attr-defined]


def _uniform_rows(x: Operand) -> tuple[int, int, int] | None:
    """(rows, columns, row stride) of a tensor [..., D]; None if its rows are not evenly spaced."""
    *leading, columns = x.shape
    *steps, last = x.stride()
    if columns > 1 and last != 1:
        return None
    rows, step = 1, None
    expected: int | None = None
    for size, stride in zip(reversed(leading), reversed(steps), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != expected:
            return None
        rows *= size
        expected = stride * size
    if any(size == 0 for size in leading):
        return 0, columns, columns
    return rows, columns, columns if step is None else step


def broadcast_strides(x: Operand, shape: Sequence[int]) -> list[int]:
    """The strides of a tensor broadcast to a shape: 0 for repeated dimensions."""
    missing = len(shape) - len(x.shape)
    return [0] * missing + [
        0 if size == 1 and full_size != 1 else stride
        for size, stride, full_size in zip(x.shape, x.stride(), shape[missing:], strict=True)
    ]
