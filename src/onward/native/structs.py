"""The C interface of the native library: its codes and the signature of every function.

Kernels take addresses as integers (`tensor.data_ptr()`), sizes and strides in elements (unless a name says bytes) and
element types as codes of `DType`. They check little: callers check shapes and dtypes, because their errors can name the
tensors. Almost every function returns a status, which `Library.check` turns into an exception.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any


class DType(IntEnum):
    """Codes of element types, as in native/src/api.h."""

    F32 = 0
    BF16 = 1
    F16 = 2


class Element(IntEnum):
    """Codes of element types in the generic kernels, as in native/src/generic/elements.h; they extend `DType`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I32 = 3
    I64 = 4
    BOOL = 5
    F64 = 6


class Unary(IntEnum):
    """Operations of onward_unary, as in native/src/generic/unary.cpp."""

    COPY = 0
    NEG = 1
    ABS = 2
    EXP = 3
    LOG = 4
    SQRT = 5
    RSQRT = 6
    RECIPROCAL = 7
    SIN = 8
    COS = 9
    TANH = 10
    SIGMOID = 11
    SILU = 12
    RELU = 13
    GELU = 14
    GELU_TANH = 15
    SQUARE = 16
    ERF = 17
    LOGICAL_NOT = 18
    BITWISE_NOT = 19
    FLOOR = 20
    CEIL = 21
    SIGN = 22
    LOG1P = 24
    EXPM1 = 25
    EXP2 = 26
    ISNAN = 27
    ISINF = 28


class Binary(IntEnum):
    """Operations of onward_binary, as in native/src/generic/binary.cpp."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    FLOOR_DIV = 4
    REMAINDER = 5
    MIN = 7
    MAX = 8
    EQ = 9
    NE = 10
    LT = 11
    LE = 12
    GT = 13
    GE = 14
    AND = 15
    OR = 16
    XOR = 17


class Reduce(IntEnum):
    """Operations of onward_reduce, as in native/src/generic/reduce.cpp."""

    SUM = 0
    MEAN = 1
    MAX = 2
    MIN = 3
    ARGMAX = 4
    ANY = 5
    ALL = 6


class Format(IntEnum):
    """Codes of packed weight formats, as in native/src/linear/layout.h."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    Q8_0 = 5
    Q4_1 = 6
    Q5_0 = 7
    Q5_1 = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    Q2_K = 12
    Q3_K = 13
    IQ4_NL = 14
    IQ4_XS = 15
    MXFP4 = 16
    UINT4 = 17
    UINT4_128 = 18
    UINT8_128 = 19
    NVFP4 = 20
    FP8 = 21
    NF4 = 22


class Status(IntEnum):
    """Status codes of kernels."""

    OK = 0
    BAD_ARGUMENT = 1
    OUT_OF_MEMORY = 2


Pointer = c_void_p
Int = c_int64
Code = c_int32
Float = c_float
Double = c_double


class AttentionArguments(Structure):
    """OnwardAttention of native/src/attention/attention.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "heads", "kv_heads", "queries", "positions", "dim", "value_dim")),
        *((name, Pointer) for name in ("q", "keys", "values", "out")),
        *((f"{name}_strides", Int * 3) for name in ("q", "keys", "values", "out")),
        ("offsets", Pointer),
        ("window", Int),
        ("mask", Pointer),
        ("mask_strides", Int * 4),
        ("sinks", Pointer),
        *((name, Float) for name in ("scale", "softcap")),
        ("dtype", Code),
        ("table", Pointer),
        ("table_stride", Int),
    )


class LinearArguments(Structure):
    """OnwardLinear of native/src/linear/linear.cpp: one packed matrix [n, k] and its output."""

    _fields_ = (
        ("n", Int),
        *((name, Pointer) for name in ("packed", "bias", "out")),
        ("out_stride", Int),
        *((name, Code) for name in ("bias_dtype", "out_dtype")),
    )


class LoraArguments(Structure):
    """OnwardLora of native/src/linear/lora.cpp: the low-rank update of one matrix."""

    _fields_ = (
        *((name, Int) for name in ("outputs", "rank", "y_stride", "a_stride", "b_stride", "out_stride")),
        *((name, Pointer) for name in ("y", "a", "b", "factors", "scale", "shift", "ranks", "out")),
    )


class ExpertsArguments(Structure):
    """OnwardExperts of native/src/experts/experts.h, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("tokens", "width", "inner", "experts", "chosen")),
        ("x", Pointer),
        ("x_stride", Int),
        *((name, Pointer) for name in ("ids", "weights", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")),
        ("out", Pointer),
        ("out_stride", Int),
        *((name, Code) for name in ("x_dtype", "bias_dtype", "out_dtype", "format", "activation")),
        *((name, Float) for name in ("alpha", "limit")),
    )


class HeadsArguments(Structure):
    """OnwardHeads of native/src/heads.cpp, which documents the fields."""

    _fields_ = (
        ("heads", Int),
        ("x", Pointer),
        ("x_strides", Int * 3),
        ("norm_weight", Pointer),
        *((name, Float) for name in ("eps", "weight_offset")),
        *((name, Code) for name in ("after_cast", "rotate")),
        ("out", Pointer),
        ("out_strides", Int * 3),
        ("to_cache", Code),
        ("positions", Int),
        ("table", Pointer),
        ("table_stride", Int),
    )


class StateArguments(Structure):
    """OnwardState of native/src/state/places.h, which documents the fields."""

    _fields_ = (
        ("data", Pointer),
        ("strides", Int * 2),
        ("held", Pointer),
        ("held_stride", Int),
        ("slots", Int),
        ("rows", Pointer),
        ("offsets", Pointer),
    )


def _strided(*names: str) -> list[tuple[str, Any]]:
    """The fields of inputs [B, T, …]: an address, and strides of the first two dimensions."""
    return [field for name in names for field in ((name, Pointer), (f"{name}_strides", Int * 2))]


class ShortConvArguments(Structure):
    """OnwardShortConv of native/src/state/short_conv.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "channels", "taps")),
        *_strided("x"),
        *((name, Pointer) for name in ("weight", "bias", "out")),
        *((name, Code) for name in ("dtype", "silu")),
        *StateArguments._fields_,
    )


class GatedDeltaArguments(Structure):
    """OnwardGatedDelta of native/src/state/gated_delta.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "key_heads", "value_heads", "key_dim", "value_dim")),
        *_strided("qkv", "decay", "beta"),
        *((name, Pointer) for name in ("log_rate", "decay_bias", "out")),
        ("dtype", Code),
        ("eps", Float),
        *StateArguments._fields_,
    )


class SsdArguments(Structure):
    """OnwardSsd of native/src/state/ssd.cpp, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("batch", "queries", "groups", "heads", "state_dim", "head_dim")),
        *_strided("mixed", "step"),
        *((name, Pointer) for name in ("log_rate", "step_bias", "skip", "out")),
        ("dtype", Code),
        *((name, Float) for name in ("least", "most")),
        *StateArguments._fields_,
    )


# A tensor argument of the generic kernels: address, code of Element, address of int64 strides.
_TENSOR = (Pointer, Code, Pointer)
# A batch of matrices: address, address of the int64 strides of the batch dimensions, the strides of both matrix dims.
_MATRIX = (Pointer, Pointer, Int, Int)

# name -> (result, arguments). The comments name the arguments; the C++ sources document them.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # cpu.cpp
    "onward_isa_name": (c_char_p, []),
    "onward_cpu_features": (Code, []),
    # team.cpp
    "onward_set_num_threads": (Code, [Code]),
    "onward_num_threads": (Code, []),
    # probe.cpp: data, bytes, grain
    "onward_probe_read": (Int, [Pointer, Int, Int]),
    # kind (0 fma, 1 bf16, 2 int8), iterations
    "onward_probe_arithmetic": (Int, [Code, Int]),
    # linear/linear.cpp: format, t, n, k, x, x_dtype, x_stride, packed, bias (or None), bias_dtype,
    # out, out_dtype, out_stride
    "onward_linear": (Code, [Code, Int, Int, Int, Pointer, Code, Int, Pointer, Pointer, Code, Pointer, Code, Int]),
    # products, count, format, t, k, x, x_dtype, x_stride
    "onward_linear_many": (Code, [POINTER(LinearArguments), Int, Code, Int, Int, Pointer, Code, Int]),
    # format, t, heads, n, k, x, x_dtype, x_stride, x_head_stride, packed, out, out_dtype, out_stride, out_head_stride
    "onward_linear_by_head": (Code, [Code, *[Int] * 4, Pointer, Code, Int, Int, Pointer, Pointer, Code, Int, Int]),
    # linear/quantize.cpp: format, rows, inputs, x, x_dtype, x_stride, packed, sums
    "onward_linear_quantize": (Code, [Code, Int, Int, Pointer, Code, Int, Pointer, Pointer]),
    # linear/pack.cpp: format, rows, inputs
    "onward_linear_packed_bytes": (Int, [Code, Int, Int]),
    # format, rows, inputs, w, w_dtype, w_stride, packed
    "onward_linear_pack": (Code, [Code, Int, Int, Pointer, Code, Int, Pointer]),
    # linear/gguf.cpp: format, rows, inputs, blocks, row_bytes, packed
    "onward_linear_pack_blocks": (Code, [Code, Int, Int, Pointer, Int, Pointer]),
    # linear/pack.cpp: format, rows, inputs, packed, ids (int64, or None), count, out, out_dtype, out_stride
    "onward_linear_rows": (Code, [Code, Int, Int, Pointer, Pointer, Int, Pointer, Code, Int]),
    # linear/lora.cpp: parts, count, rows, tokens, inputs, num_slots, dtype, x, x_stride, slots (int32)
    "onward_lora": (Code, [POINTER(LoraArguments), *[Int] * 5, Code, Pointer, Int, Pointer]),
    # experts/experts.cpp
    "onward_experts": (Code, [POINTER(ExpertsArguments)]),
    # experts/router.cpp: rows, experts, logits, dtype, stride, count, score, bias (or None), groups, kept_groups,
    # normalize, scale, ids (int32), weights (float)
    "onward_top_experts": (
        Code,
        [Int, Int, Pointer, Code, Int, Int, Code, Pointer, Int, Int, Int, Code, Float, Pointer, Pointer],
    ),
    # attention/attention.cpp
    "onward_attention": (Code, [POINTER(AttentionArguments)]),
    # norm.cpp: rows, columns, dtype, x, x_stride, residual (or None), residual_stride, sum (or None), sum_stride,
    # weight (or None), weight_offset, after_cast, eps, out, out_stride
    "onward_rms_norm": (Code, [Int, Int, Code, *[Pointer, Int] * 3, Pointer, Float, Code, Float, Pointer, Int]),
    # rows, columns, dtype, x, x_stride, residual (or None), residual_stride, sum (or None), sum_stride,
    # weight (or None), bias (or None), eps, out, out_stride
    "onward_layer_norm": (Code, [Int, Int, Code, *[Pointer, Int] * 3, Pointer, Pointer, Float, Pointer, Int]),
    # rope.cpp: batch, heads, queries, dim, dtype, x, x_strides (int64 [3]), cos, sin, pairs, angle_strides
    # (int64 [2]), interleaved, out, out_strides
    "onward_rotate": (
        Code,
        [*[Int] * 4, Code, Pointer, Pointer, Pointer, Pointer, Int, Pointer, Code, Pointer, Pointer],
    ),
    # rows, pairs, radians, cos, sin (all float)
    "onward_rotary_angles": (Code, [Int, Int, Pointer, Pointer, Pointer]),
    # heads.cpp: parts, count, batch, queries, dim, dtype, cos, sin (or None), angle_strides (int64 [2], or
    # None), pairs, offsets (int32, or None)
    "onward_heads": (Code, [POINTER(HeadsArguments), *[Int] * 4, Code, Pointer, Pointer, Pointer, Int, Pointer]),
    # elementwise.cpp: rows, columns, dtype, gate, gate_stride, up, up_stride, out, out_stride
    "onward_swiglu": (Code, [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # rows, columns, dtype, approximate, gate, gate_stride, up, up_stride, out, out_stride
    "onward_geglu": (Code, [Int, Int, Code, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # rows, columns, dtype, gate, gate_stride, x, x_stride, out, out_stride
    "onward_sigmoid_gate": (Code, [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # rows, columns, dtype, a, a_stride, b, b_stride, out, out_stride
    "onward_add": (Code, [Int, Int, Code, Pointer, Int, Pointer, Int, Pointer, Int]),
    # gather.cpp: count, columns, dtype, table, rows, table_stride, ids, wide_ids, out, out_stride
    "onward_gather_rows": (Code, [Int, Int, Code, Pointer, Int, Int, Pointer, Code, Pointer, Int]),
    # generic/unary.cpp: op, ndim, shape, x, x_dtype, x_strides, out, out_dtype, out_strides, parameter. Here and
    # below dtypes are codes of Element, shapes and strides addresses of int64.
    "onward_unary": (Code, [Code, Int, Pointer, *_TENSOR, *_TENSOR, Double]),
    # generic/binary.cpp: op, compute, ndim, shape, a, a_dtype, a_strides, b, b_dtype, b_strides, out, out_dtype,
    # out_strides
    "onward_binary": (Code, [Code, Code, Int, Pointer, *_TENSOR, *_TENSOR, *_TENSOR]),
    # generic/where.cpp: ndim, shape, condition, condition_strides, a, a_dtype, a_strides, b, b_dtype, b_strides,
    # out, out_dtype, out_strides
    "onward_where": (Code, [Int, Pointer, Pointer, Pointer, *_TENSOR, *_TENSOR, *_TENSOR]),
    # generic/reduce.cpp: op, outer_ndim, outer_shape, inner_ndim, inner_shape, x, x_dtype, x_outer_strides,
    # x_inner_strides, out, out_dtype, out_strides
    "onward_reduce": (Code, [Code, Int, Pointer, Int, Pointer, *_TENSOR, Pointer, *_TENSOR]),
    # generic/softmax.cpp: log, outer_ndim, outer_shape, count, x, x_dtype, x_outer_strides, x_stride, out, out_dtype,
    # out_outer_strides, out_stride
    "onward_softmax": (Code, [Code, Int, Pointer, Int, *_TENSOR, Int, *_TENSOR, Int]),
    # outer_ndim, outer_shape, count, x, x_dtype, x_outer_strides, x_stride, out, out_dtype, out_outer_strides,
    # out_stride
    "onward_cumsum": (Code, [Int, Pointer, Int, *_TENSOR, Int, *_TENSOR, Int]),
    # generic/matmul/matmul.cpp: batch_ndim, batch_shape, m, n, k, a, a_batch_strides, a_m_stride, a_k_stride, b,
    # b_batch_strides, b_k_stride, b_n_stride, bias (or None), bias_m_stride, bias_n_stride, out, out_batch_strides,
    # out_m_stride, out_n_stride, dtype, alpha, beta
    "onward_matmul": (
        Code,
        [Int, Pointer, *[Int] * 3, *_MATRIX * 2, Pointer, Int, Int, *_MATRIX, Code, Double, Double],
    ),
    # generic/index.cpp: ndim, shape, out, out_strides, x, element_bytes, x_strides, num_indices, index_words (int64:
    # for each index its address, code, stride and size of x's dimension, ndim strides), put
    "onward_index": (Code, [Int, Pointer, Pointer, Pointer, Pointer, Int, Pointer, Int, Pointer, Code]),
    # program.cpp: the first word of an instruction, by its kernel's name
    "onward_program_instruction": (Int, [c_char_p]),
    # code, words, failed (int64 [1]), nanoseconds of each instruction (int64, or None)
    "onward_program_run": (Code, [Pointer, Int, Pointer, Pointer]),
    # argmax.cpp: rows, columns, x, dtype, stride, out (int64)
    "onward_argmax": (Code, [Int, Int, Pointer, Code, Int, Pointer]),
    # token_mask.cpp: rows, columns, x, dtype, stride, words, count, out, left
    "onward_apply_token_mask": (Code, [Int, Int, Pointer, Code, Int, Pointer, Int, Pointer, Pointer]),
    # sampling/sample.cpp: rows, columns, x, dtype, stride; a value of each row: temperature, top_k (int64), top_p,
    # min_score, seeds (int64), positions (int64); out (int64)
    "onward_sample": (Code, [Int, Int, Pointer, Code, Int, *[Pointer] * 7]),
    # state/short_conv.cpp
    "onward_short_conv": (Code, [POINTER(ShortConvArguments)]),
    # state/gated_delta.cpp
    "onward_gated_delta": (Code, [POINTER(GatedDeltaArguments)]),
    # state/ssd.cpp
    "onward_ssd": (Code, [POINTER(SsdArguments)]),
}
