"""The C interface of the native library: element codes, C types, and `kernel`, which declares a function.

Each function is declared once, beside the code that calls it: those of an op in the op's file, those of the generic
kernels in `native/generic.py`, and the library's own here. Kernels take addresses as integers (`tensor.data_ptr()`),
sizes and strides in elements (unless a name says bytes) and element types as codes of `DType`. They check little:
callers check shapes and dtypes, because their errors can name the tensors. A test compares every declaration with the
C++ sources.
"""

from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any

__all__ = [
    "SIGNATURES", "Code", "DType", "Double", "Element", "Float", "Format", "Int", "Pointer", "Status",
    "Structure", "kernel", "strided",
]  # fmt: skip


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

# name -> (type of the result, types of the arguments), of every declared function
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {}


def kernel(declaration: Callable[..., Any]) -> str:
    """Declare a C function: a Python function of its name, annotated with the C types; a class of structures stands
    for a pointer to them. Returns the name.

        @kernel
        def onward_argmax(rows: Int, columns: Int, x: Pointer, dtype: Code, stride: Int, out: Pointer) -> Code: ...
    """
    name = declaration.__name__
    assert name not in SIGNATURES, f"{name} is declared twice"
    *arguments, result = declaration.__annotations__.values()
    SIGNATURES[name] = result, [POINTER(each) if issubclass(each, Structure) else each for each in arguments]
    return name


def strided(*names: str, dims: int = 2) -> list[tuple[str, Any]]:
    """The fields of inputs in a structure: the address of each, and the strides of its first dimensions."""
    return [field for name in names for field in ((name, Pointer), (f"{name}_strides", Int * dims))]


# cpu.cpp
@kernel
def onward_isa_name() -> c_char_p: ...
@kernel
def onward_isas() -> c_char_p: ...
@kernel
def onward_usable_isas() -> Code: ...


# team.cpp
@kernel
def onward_set_num_threads(count: Code) -> Code: ...
@kernel
def onward_num_threads() -> Code: ...


# probe.cpp; kind: 0 fma, 1 bf16, 2 int8
@kernel
def onward_probe_read(data: Pointer, bytes: Int, grain: Int) -> Int: ...
@kernel
def onward_probe_arithmetic(kind: Code, iterations: Int) -> Int: ...


# program.cpp: the first word of an instruction, by its kernel's name
@kernel
def onward_program_instruction(name: c_char_p) -> Int: ...


# failed: int64 [1]; nanoseconds: int64, of each instruction, or None
@kernel
def onward_program_run(code: Pointer, words: Int, failed: Pointer, nanoseconds: Pointer) -> Code: ...
