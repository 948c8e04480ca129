"""Read GGUF, llama.cpp's single-file model format: metadata by name, and memory-mapped tensors.

Little-endian: "GGUF", version, number of tensors, number of entries; the entries (name, kind, value); each tensor's
name, sizes (innermost first), type and offset; then the tensors, aligned to `general.alignment`. Sizes are checked
against the file's length before memory is allocated.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onward.errors import CheckpointError, ConfigError
from onward.models.fields import TrackedFields


class BlockType(NamedTuple):
    """weights: adjacent weights of a row in a block. size: bytes of a block."""

    name: str
    weights: int
    size: int


# Number, name, weights and bytes of a block.
_TYPES = """
0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 10 Q2_K 256 84,
11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 20 IQ4_NL 32 18, 23 IQ4_XS 256 136, 30 BF16 1 2,
39 MXFP4 32 17
"""
TYPES = {
    int(number): BlockType(name, int(weights), int(size))
    for number, name, weights, size in map(str.split, _TYPES.split(","))
}

# Types that are not supported, for error messages.
_OTHER_TYPES = """
9 Q8_1, 15 Q8_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 21 IQ3_S, 22 IQ2_S, 24 I8, 25 I16, 26 I32, 27 I64, 28 F64,
29 IQ1_M, 34 TQ1_0, 35 TQ2_0, 40 NVFP4
"""
OTHER_TYPES = {int(number): name for number, name in map(str.split, _OTHER_TYPES.split(","))}

MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_NAME_LENGTH = 2**16
_MAX_DIMS = 4


class GgufTensor(NamedTuple):
    """A stored tensor. shape: outermost first. rows: uint8 [product of the outer sizes, bytes of a row]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    rows: Tensor


class GgufFile:
    """A mapped GGUF file. metadata: name -> number, string, list of strings, or numpy array of numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._view = _mapped(path)
        self._bytes = torch.frombuffer(self._view or bytearray(1), dtype=torch.uint8)
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"{error} at byte {self._at}") from error

    def _read(self) -> None:
        if len(self._view) < 24 or self._view[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF' and a header")
        self._at = 4
        version, tensors, entries = self._take("IQQ")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise CheckpointError(f"{self.path} is a big-endian GGUF file: convert it to a little-endian one")
            raise CheckpointError(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        # Entries take at least 13 bytes, and tensors 24.
        self._check_count("metadata entries", entries, 13)
        for _ in range(entries):
            name = self._name()
            if name in self.metadata:
                raise self._damaged(f"the metadata has {name!r} twice")
            self.metadata[name] = self._value(name)
        self._check_count("tensors", tensors, 24)
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment must be a power of two up to 2^20; got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in infos:
            if offset % alignment:
                raise self._damaged(f"tensor {name!r} is at {offset}, which is not a multiple of {alignment}")
            self._add_tensor(name, kind, shape, start + offset)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name()
        (count,) = self._take("I")
        if not 1 <= count <= _MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {count} dimensions, and 1 to {_MAX_DIMS} are allowed")
        shape = self._take(f"{count}Q")[::-1]
        kind, offset = self._take("IQ")
        return name, kind, shape, offset

    def _add_tensor(self, name: str, kind: int, shape: tuple[int, ...], begin: int) -> None:
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unsupported type {OTHER_TYPES.get(kind, f'number {kind}')}; "
                f"supported are {', '.join(kind.name for kind in TYPES.values())}"
            )
        if name in self.tensors:
            raise self._damaged(f"tensor {name!r} appears twice")
        block = TYPES[kind]
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block.weights * block.size
        if rows < 1 or shape[-1] < 1 or shape[-1] % block.weights:
            raise self._damaged(f"tensor {name!r} {list(shape)} is not a whole number of {block.name} blocks")
        if (end := begin + rows * row_bytes) > len(self._view):
            what = f"tensor {name!r} {block.name} {list(shape)}"
            raise self._damaged(f"{what} ends at byte {end}, and the file has {len(self._view)}")
        stored = self._bytes[begin:end].view(rows, row_bytes)
        self.tensors[name] = GgufTensor(name, block, shape, stored)

    def _value(self, name: str) -> Any:
        (kind,) = self._take("I")
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            raise self._damaged(f"{name!r} is of unknown kind {kind}")
        (kind, count) = self._take("IQ")
        if kind == _STRING:
            self._check_count(f"strings of {name!r}", count, 8)
            # Tokens that are not UTF-8 keep their bytes, as lone surrogates.
            return self._strings(count, "surrogateescape" if name == TOKENS else "replace")
        if kind not in _SCALARS:
            raise self._damaged(f"{name!r} is an array of kind {kind}; only numbers and strings are supported")
        dtype = np.dtype("<" + _SCALARS[kind])
        self._check_count(f"numbers of {name!r}", count, dtype.itemsize)
        begin, self._at = self._at, self._at + count * dtype.itemsize
        return np.frombuffer(self._view[begin : self._at], dtype).copy()

    def _strings(self, count: int, errors: str = "replace") -> list[str]:
        """Read `count` strings. A vocabulary has hundreds of thousands, hence this plain loop."""
        view, at, length_at = self._view, self._at, struct.Struct("<Q").unpack_from
        end, strings = len(view), []
        for _ in range(count):
            (length,) = length_at(view, at)
            at += 8
            if length > end - at:
                self._at = at
                raise self._damaged(f"a string of {length} bytes at byte {at} exceeds the file")
            strings.append(view[at : at + length].decode("utf-8", errors))
            at += length
        self._at = at
        return strings

    def _name(self) -> str:
        name = self._strings(1)[0]
        if len(name) > _MAX_NAME_LENGTH:
            raise self._damaged(f"a name has {len(name)} characters")
        return name

    def _take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + format, self._view, self._at)
        self._at += struct.calcsize("<" + format)
        return values

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        left = len(self._view) - self._at
        if count * min_bytes > left:
            raise self._damaged(f"it announces {count} {what}, but has only {left} bytes left")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or truncated ({why}): download or convert it again")


def _mapped(path: Path) -> "mmap.mmap | bytes":
    """The file's bytes, mapped privately: nothing is written back."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if os.path.getsize(path) else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}") from error


# Suffixes of keys with fractional values.
FRACTIONS = (
    *("epsilon", "scale", "softcapping", "factor", "freq_base", "freq_base_swa", "scale_linear", "alpha"),
    *("log_multiplier", "beta_fast", "beta_slow", "max_alibi_bias", "clamp_kqv"),
)
# Boolean keys, which some files store as 0 and 1.
_FLAGS = ("expert_weights_norm", "rope.scaling.finetuned", "attention.causal", "use_parallel_residual")


class Keys(TrackedFields):
    """The metadata below "{architecture}.", which tracks the keys that were read. Values do not depend on their stored
    numeric type: a count is an int, a fraction a float, and a flag a bool."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.prefix = prefix = f"{metadata['general.architecture']}."
        names = [key.removeprefix(prefix) for key in metadata if key.startswith(prefix)]
        super().__init__({name: _plain(name, metadata[prefix + name]) for name in names})


def _plain(key: str, value: Any) -> Any:
    if not isinstance(value, int | float):
        return value
    if key in _FLAGS and value in (0, 1):
        return bool(value)
    if key.endswith(FRACTIONS):
        return value if isinstance(value, bool) else float(value)
    # Above 2**53, floats do not represent every integer.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number in the metadata, which may be repeated for each layer; the default if the key is absent."""
    value = same_everywhere(metadata.get(key, default), key)
    if value is not default and not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number; got {value!r}")
    return value


def same_everywhere(value: Any, what: str, *, ignore_zeros: bool = False) -> Any:
    """The number that all layers share; some files repeat it for each. ignore_zeros: 0 marks layers without it."""
    if not isinstance(value, np.ndarray):
        return value
    numbers = set(value.tolist())
    if ignore_zeros and len(numbers) > 1:
        numbers.discard(0)
    if len(numbers) != 1:
        raise ConfigError(f"{what} differs between layers ({sorted(numbers)[:4]}), which is not supported")
    return numbers.pop()


def list_of(value: Any) -> list[Any] | None:
    return list(value) if isinstance(value, np.ndarray | list) else None


def each_layer(metadata: Mapping[str, Any], key: str) -> tuple[Any, list[bool] | None]:
    """The number that layers share, and which layers have it (not 0); None if the metadata has one for all."""
    value = metadata.get(key)
    counts = list_of(value)
    if counts is None:
        return value, None
    numbers = {int(count) for count in counts if isinstance(count, int | np.integer) and count}
    if len(numbers) > 1:
        raise ConfigError(f"{key} differs between layers ({sorted(numbers)[:4]}), which is not supported")
    return max(numbers, default=None), [bool(count) for count in counts]


def whole_numbers(key: str, value: Any) -> list[int] | None:
    values = list_of(value)
    if values is not None and not all(isinstance(item, int | np.integer) for item in values):
        raise ConfigError(f"{key} must be integers; got {values[:4]}")
    return None if values is None else [int(item) for item in values]


def quotient(value: Any, divisor: Any) -> int:
    """The quotient of two integers; 0, which is never a valid width, for other values."""
    return value // divisor if isinstance(value, int) and isinstance(divisor, int) and divisor else 0
