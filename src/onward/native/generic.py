"""The generic kernels: torch operators on any types and strides, for forwards written in plain torch.

Here `dtype` is a code of `Element`; shapes and strides are addresses of int64. native/src/generic documents the rest.
"""

from enum import IntEnum

from onward.native.interface import Code, Double, Int, Pointer, kernel


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


@kernel
def onward_unary(
    op: Code, ndim: Int, shape: Pointer, x: Pointer, x_dtype: Code, x_strides: Pointer, out: Pointer, out_dtype: Code,
    out_strides: Pointer, parameter: Double,
) -> Code: ...  # fmt: skip
@kernel
def onward_binary(
    op: Code, compute: Code, ndim: Int, shape: Pointer, a: Pointer, a_dtype: Code, a_strides: Pointer, b: Pointer,
    b_dtype: Code, b_strides: Pointer, out: Pointer, out_dtype: Code, out_strides: Pointer,
) -> Code: ...  # fmt: skip
@kernel
def onward_where(
    ndim: Int, shape: Pointer, condition: Pointer, condition_strides: Pointer, a: Pointer, a_dtype: Code,
    a_strides: Pointer, b: Pointer, b_dtype: Code, b_strides: Pointer, out: Pointer, out_dtype: Code,
    out_strides: Pointer,
) -> Code: ...  # fmt: skip
@kernel
def onward_reduce(
    op: Code, outer_ndim: Int, outer_shape: Pointer, inner_ndim: Int, inner_shape: Pointer, x: Pointer, x_dtype: Code,
    x_outer_strides: Pointer, x_inner_strides: Pointer, out: Pointer, out_dtype: Code, out_strides: Pointer,
) -> Code: ...  # fmt: skip
@kernel
def onward_softmax(
    log: Code, outer_ndim: Int, outer_shape: Pointer, count: Int, x: Pointer, x_dtype: Code, x_outer_strides: Pointer,
    x_stride: Int, out: Pointer, out_dtype: Code, out_outer_strides: Pointer, out_stride: Int,
) -> Code: ...  # fmt: skip
@kernel
def onward_cumsum(
    outer_ndim: Int, outer_shape: Pointer, count: Int, x: Pointer, x_dtype: Code, x_outer_strides: Pointer,
    x_stride: Int, out: Pointer, out_dtype: Code, out_outer_strides: Pointer, out_stride: Int,
) -> Code: ...  # fmt: skip


# bias: or None
@kernel
def onward_matmul(
    batch_ndim: Int, batch_shape: Pointer, m: Int, n: Int, k: Int, a: Pointer, a_batch_strides: Pointer,
    a_m_stride: Int, a_k_stride: Int, b: Pointer, b_batch_strides: Pointer, b_k_stride: Int, b_n_stride: Int,
    bias: Pointer, bias_m_stride: Int, bias_n_stride: Int, out: Pointer, out_batch_strides: Pointer,
    out_m_stride: Int, out_n_stride: Int, dtype: Code, alpha: Double, beta: Double,
) -> Code: ...  # fmt: skip


# index_words: for each index its address, code, stride and size of x's dimension, and ndim strides
@kernel
def onward_index(
    ndim: Int, shape: Pointer, out: Pointer, out_strides: Pointer, x: Pointer, element_bytes: Int, x_strides: Pointer,
    num_indices: Int, index_words: Pointer, put: Code,
) -> Code: ...  # fmt: skip


# gather.cpp; dtype: a code of `DType`
@kernel
def onward_gather_rows(
    count: Int, columns: Int, dtype: Code, table: Pointer, rows: Int, table_stride: Int, ids: Pointer, wide_ids: Code,
    out: Pointer, out_stride: Int,
) -> Code: ...  # fmt: skip
