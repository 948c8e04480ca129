"""Packed weights of torch tensors, for the tests and the benchmarks; nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_calls import CODES, call, poisoned
from torch import Tensor

from onward import native
from onward.native.interface import Format
from onward.ops import quantized_layout
from onward.ops.packed import LinearArguments

FLOAT_FORMATS = {Format.F32: torch.float32, Format.BF16: torch.bfloat16, Format.F16: torch.float16}
GROUP = 32


def aligned_bytes(count: int, fill: int = 255) -> Tensor:
    """uint8 [count] at an address that is a multiple of 64."""
    memory = torch.full((count + 64,), fill, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + count]


@dataclass
class Packed:
    """A weight [rows, inputs] in a packed format, and the values it stands for."""

    format: Format
    rows: int
    inputs: int
    data: Tensor  # uint8
    values: Tensor  # float64 [rows, inputs]
    scales: Tensor | None = None  # int8: float32 [rows]; int4: float16 [rows, groups]
    integers: Tensor | None = None  # int8 [rows, inputs]

    @staticmethod
    def _memory(fmt: Format, rows: int, inputs: int) -> Tensor:
        library = native.library()
        assert library is not None
        return aligned_bytes(library.onward_linear_packed_bytes(fmt, rows, inputs))

    @classmethod
    def of_floats(cls, fmt: Format, weight: Tensor) -> Packed:
        rows, inputs = weight.shape
        data = cls._memory(fmt, rows, inputs)
        call(
            "onward_linear_pack", fmt, rows, inputs, weight.data_ptr(), CODES[weight.dtype], weight.stride(0),
            data.data_ptr(),
        )  # fmt: skip
        return cls(fmt, rows, inputs, data, weight.to(FLOAT_FORMATS[fmt]).double())

    @classmethod
    def of_int8(cls, integers: Tensor, scales: Tensor) -> Packed:
        rows, inputs = integers.shape
        data = cls._memory(Format.INT8, rows, inputs)
        data.copy_(quantized_layout.pack("int8", integers, scales).flatten())
        values = integers.double() * scales.double()[:, None]
        return cls(Format.INT8, rows, inputs, data, values, scales, integers)

    @classmethod
    def of_int4(cls, integers: Tensor, scales: Tensor) -> Packed:
        rows, inputs = integers.shape
        data = cls._memory(Format.INT4, rows, inputs)
        data.copy_(quantized_layout.pack("int4", integers, scales).flatten())
        values = integers.double() * scales.double().repeat_interleave(GROUP, 1)[:, :inputs]
        return cls(Format.INT4, rows, inputs, data, values, scales, integers)

    @classmethod
    def random(cls, fmt: Format, rows: int, inputs: int, generator: torch.Generator) -> Packed:
        """Weights whose outputs are of the size of their activations."""
        size = max(inputs, 1) ** -0.5
        if fmt in FLOAT_FORMATS:
            return cls.of_floats(fmt, torch.randn(rows, inputs, generator=generator) * size)
        if fmt == Format.INT8:
            integers = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, generator=generator)
            return cls.of_int8(integers, (torch.rand(rows, generator=generator) + 0.5) * size / 127)
        groups = -(-inputs // GROUP)
        integers = torch.randint(-8, 8, (rows, inputs), dtype=torch.int8, generator=generator)
        return cls.of_int4(integers, ((torch.rand(rows, groups, generator=generator) + 0.5) * size / 8).half())

    def product(self, bias: Tensor | None, out: Tensor) -> LinearArguments:
        """This matrix in a call of onward_linear_many."""
        return LinearArguments(
            n=self.rows, packed=self.data.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(), out_stride=out.stride(0), bias_dtype=0 if bias is None else CODES[bias.dtype],
            out_dtype=CODES[out.dtype],
        )  # fmt: skip

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | torch.dtype = torch.float32) -> Tensor:
        """x [T, inputs] -> [T, rows], of the dtype of `out` or into it."""
        if isinstance(out, torch.dtype):
            out = poisoned((x.shape[0], self.rows), out)
        call(
            "onward_linear_many", self.product(bias, out), 1, self.format, x.shape[0], self.inputs, x.data_ptr(),
            CODES[x.dtype], x.stride(0),
        )  # fmt: skip
        return out

    def take(self, ids: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        """Rows by ids (int64), or the first `count`."""
        out = poisoned((count, self.inputs), dtype)
        call(
            "onward_linear_rows", self.format, self.rows, self.inputs, self.data.data_ptr(),
            None if ids is None else ids.data_ptr(), count, out.data_ptr(), CODES[dtype], out.stride(0),
        )  # fmt: skip
        return out
