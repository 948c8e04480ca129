"""The C interface of the native library: its codes and the signature of every function.

Kernels take addresses as integers (`tensor.data_ptr()`), sizes and strides as integers in elements
unless a name says bytes, and codes of element types from `DType`. They check little: whoever calls
them has compared shapes and dtypes before, where an error can name them. Almost every function
returns a status, which `Library.check` turns into an exception.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any


class DType(IntEnum):
    """Codes of element types; native/src/api.h holds the same list."""

    F32 = 0
    BF16 = 1
    F16 = 2


class Format(IntEnum):
    """Codes of packed weight formats; native/src/linear/layout.h holds the same list."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4


class Status(IntEnum):
    """What a kernel returns."""

    OK = 0
    BAD_ARGUMENT = 1
    OUT_OF_MEMORY = 2


Pointer = c_void_p
Int = c_int64
Code = c_int32
Float = c_float
Double = c_double


class AttentionArguments(Structure):
    """OnwardAttention of native/src/attention/attention.cpp, where the fields are explained."""

    _fields_ = (
        *((name, Int) for name in ("batch", "heads", "kv_heads", "queries", "positions", "dim")),
        *((name, Pointer) for name in ("q", "keys", "values", "out")),
        *((f"{name}_strides", Int * 3) for name in ("q", "keys", "values", "out")),
        ("offsets", Pointer),
        ("window", Int),
        ("mask", Pointer),
        ("mask_strides", Int * 4),
        ("sinks", Pointer),
        ("scale", Float),
        ("dtype", Code),
    )


# name -> (result, arguments). The comments name the arguments; the sources say what they mean.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # cpu.cpp
    "onward_isa_name": (c_char_p, []),
    "onward_cpu_features": (Code, []),
    # team.cpp
    "onward_set_num_threads": (Code, [Code]),
    "onward_num_threads": (Code, []),
    # convert.cpp: rows, columns, from, from_dtype, from_stride, to, to_dtype, to_stride
    "onward_convert": (Code, [Int, Int, Pointer, Code, Int, Pointer, Code, Int]),
    # probe.cpp: data, bytes, grain
    "onward_probe_read": (Int, [Pointer, Int, Int]),
    # kind (0 fma, 1 bf16, 2 int8), iterations
    "onward_probe_arithmetic": (Int, [Code, Int]),
    # linear/linear.cpp: format, t, n, k, x, x_dtype, x_stride, packed, bias (or None), bias_dtype,
    # out, out_dtype, out_stride
    "onward_linear": (
        Code,
        [Code, Int, Int, Int, Pointer, Code, Int, Pointer, Pointer, Code, Pointer, Code, Int],
    ),
    # linear/pack.cpp: format, rows, inputs
    "onward_linear_packed_bytes": (Int, [Code, Int, Int]),
    # format, rows, inputs, w, w_dtype, w_stride, packed
    "onward_linear_pack": (Code, [Code, Int, Int, Pointer, Code, Int, Pointer]),
    # rows, inputs, q, q_stride, scales, packed
    "onward_linear_pack_int8": (Code, [Int, Int, Pointer, Int, Pointer, Pointer]),
    # rows, inputs, q, q_stride, scales, scales_stride, packed
    "onward_linear_pack_int4": (Code, [Int, Int, Pointer, Int, Pointer, Int, Pointer]),
    # rows, inputs, packed, q, q_stride, scales
    "onward_linear_unpack_int8": (Code, [Int, Int, Pointer, Pointer, Int, Pointer]),
    # rows, inputs, packed, q, q_stride, scales, scales_stride
    "onward_linear_unpack_int4": (Code, [Int, Int, Pointer, Pointer, Int, Pointer, Int]),
    # format, rows, inputs, packed, ids (int64, or None), count, out, out_dtype, out_stride
    "onward_linear_rows": (Code, [Code, Int, Int, Pointer, Pointer, Int, Pointer, Code, Int]),
    # attention/attention.cpp
    "onward_attention": (Code, [POINTER(AttentionArguments)]),
    # norm.cpp: rows, columns, dtype, x, x_stride, residual (or None), residual_stride, weight (or None),
    # weight_offset, after_cast, eps, out, out_stride
    "onward_rms_norm": (
        Code,
        [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Float, Code, Float, Pointer, Int],
    ),
    # rows, columns, dtype, x, x_stride, weight (or None), bias (or None), eps, out, out_stride
    "onward_layer_norm": (
        Code,
        [Int, Int, Code, Pointer, Int, Pointer, Pointer, Float, Pointer, Int],
    ),
    # rope.cpp: batch, heads, queries, dim, dtype, x, x_strides (int64 [3]), offsets (int32), inverse
    # frequencies (float), pairs, scale, interleaved, out, out_strides
    "onward_rope": (
        Code,
        [*[Int] * 4, Code, Pointer, Pointer, Pointer, Pointer, Int, Double, Code, Pointer, Pointer],
    ),
    # batch, heads, queries, dim, dtype, x, x_strides (int64 [3]), cos, sin, pairs, angle_strides
    # (int64 [2]), interleaved, out, out_strides
    "onward_rotate": (
        Code,
        [*[Int] * 4, Code, Pointer, Pointer, Pointer, Pointer, Int, Pointer, Code, Pointer, Pointer],
    ),
    # elementwise.cpp: rows, columns, dtype, gate, gate_stride, up, up_stride, out, out_stride
    "onward_swiglu": (Code, [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # rows, columns, dtype, approximate, gate, gate_stride, up, up_stride, out, out_stride
    "onward_geglu": (Code, [Int, Int, Code, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # rows, columns, dtype, a, a_stride, b, b_stride, out, out_stride
    "onward_add": (Code, [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # gather.cpp: count, columns, dtype, table, rows, table_stride, ids, wide_ids, out, out_stride
    "onward_gather_rows": (
        Code,
        [Int, Int, Code, Pointer, Int, Int, Pointer, Code, Pointer, Int],
    ),
    # argmax.cpp: rows, columns, x, dtype, stride, out (int64)
    "onward_argmax": (Code, [Int, Int, Pointer, Code, Int, Pointer]),
}
