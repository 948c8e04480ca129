"""Read GGUF, llama.cpp's format of a model in one file: metadata by name, and tensors, mapped.

Little-endian: "GGUF", version, number of tensors, number of entries; the entries (name, kind, value); each tensor's
name, sizes (innermost first), type and offset; then the tensors, each at a multiple of `general.alignment`. What is
read is checked against the file's length before memory is asked for.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onward.errors import CheckpointError, ConfigError


class BlockType(NamedTuple):
    """weights: neighbours in a row that form a block. size: bytes of a block."""

    name: str
    weights: int
    size: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}

# Types that exist and cannot be read: an error names them.
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_NAME = 2**16
_MOST_SIZES = 4


class GgufTensor(NamedTuple):
    """A tensor as it is stored. shape: outermost first. rows: uint8 [product of the outer sizes, bytes of a row]."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    rows: Tensor


class GgufFile:
    """A GGUF file, mapped; `CheckpointError` if it is none or damaged. metadata: name -> number, string, list of
    strings, or numpy array of numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._bytes = _mapped(path)
        self._view = _readable(path)
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"{error} at byte {self._at}") from error

    def _read(self) -> None:
        if len(self._view) < 24 or self._view[:4] != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with 'GGUF' and a header")
        self._at = 4
        version, tensors, entries = self._take("IQQ")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise CheckpointError(
                    f"{self.path} is a big-endian GGUF file: convert the model to a little-endian one"
                )
            raise CheckpointError(f"{self.path} is GGUF of version {version}; versions 2 and 3 can be read")
        # The least that an entry and a tensor take: 13 and 24 bytes.
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
                raise self._damaged(
                    f"tensor {name!r} is at {offset}, which is no multiple of the alignment {alignment}"
                )
            self._add_tensor(name, kind, shape, start + offset)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name()
        (count,) = self._take("I")
        if not 1 <= count <= _MOST_SIZES:
            raise self._damaged(f"tensor {name!r} has {count} sizes, and 1 to {_MOST_SIZES} can be")
        shape = self._take(f"{count}Q")[::-1]
        kind, offset = self._take("IQ")
        return name, kind, shape, offset

    def _add_tensor(self, name: str, kind: int, shape: tuple[int, ...], begin: int) -> None:
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {OTHER_TYPES.get(kind, f'number {kind}')}, which cannot be "
                f"read; these can: {', '.join(kind.name for kind in TYPES.values())}"
            )
        if name in self.tensors:
            raise self._damaged(f"tensor {name!r} is there twice")
        block = TYPES[kind]
        rows, row_bytes = 1, shape[-1] // block.weights * block.size
        for size in shape[:-1]:
            rows *= size
        if rows < 1 or shape[-1] < 1 or shape[-1] % block.weights:
            raise self._damaged(f"tensor {name!r} {list(shape)} is no whole number of {block.name} blocks")
        if begin + rows * row_bytes > len(self._view):
            raise self._damaged(
                f"tensor {name!r} {block.name} {list(shape)} ends at byte {begin + rows * row_bytes}, and the file has "
                f"{len(self._view)}"
            )
        stored = self._bytes[begin : begin + rows * row_bytes].view(rows, row_bytes)
        self.tensors[name] = GgufTensor(name, block, shape, stored)

    def _value(self, name: str) -> Any:
        (kind,) = self._take("I")
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            raise self._damaged(f"{name!r} is of kind {kind}, which no value has")
        (kind, count) = self._take("IQ")
        if kind == _STRING:
            self._check_count(f"strings of {name!r}", count, 8)
            # The bytes of a token that is no UTF-8 are its text: each becomes a lone surrogate.
            return self._strings(count, "surrogateescape" if name == TOKENS else "replace")
        if kind not in _SCALARS:
            raise self._damaged(f"{name!r} is an array of kind {kind}; arrays of numbers and of strings can be read")
        dtype = np.dtype("<" + _SCALARS[kind])
        self._check_count(f"numbers of {name!r}", count, dtype.itemsize)
        begin, self._at = self._at, self._at + count * dtype.itemsize
        return np.frombuffer(self._view[begin : self._at], dtype).copy()

    def _strings(self, count: int, errors: str = "replace") -> list[str]:
        """`count` strings; a vocabulary has hundreds of thousands, so this is one plain loop."""
        view, at, length_at = self._view, self._at, struct.Struct("<Q").unpack_from
        end, strings = len(view), []
        for _ in range(count):
            (length,) = length_at(view, at)
            at += 8
            if length > end - at:
                self._at = at
                raise self._damaged(f"a string of {length} bytes at byte {at} does not fit into the file")
            strings.append(view[at : at + length].decode("utf-8", errors))
            at += length
        self._at = at
        return strings

    def _name(self) -> str:
        name = self._strings(1)[0]
        if len(name) > _LONGEST_NAME:
            raise self._damaged(f"a name has {len(name)} characters")
        return name

    def _take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + format, self._view, self._at)
        self._at += struct.calcsize("<" + format)
        return values

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        left = len(self._view) - self._at
        if count * least_bytes > left:
            raise self._damaged(f"it announces {count} {what}, and has {left} bytes left")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or cut short ({why}): download or convert it again")


def _readable(path: Path) -> "mmap.mmap | bytes":
    """The same bytes, mapped once more: of a tensor's slices a string takes three times as long."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""


def _mapped(path: Path) -> Tensor:
    """The file's bytes, uint8 [size]. The map is private: nothing is written back."""
    try:
        size = os.path.getsize(path)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}") from error


# How the keys end whose numbers are no whole ones.
FRACTIONS = (
    *("epsilon", "scale", "softcapping", "factor", "freq_base", "freq_base_swa", "scale_linear", "alpha"),
    *("log_multiplier", "beta_fast", "beta_slow", "max_alibi_bias", "clamp_kqv"),
)
# Keys that are true or false; some files store them as 0 and 1.
_FLAGS = ("expert_weights_norm", "rope.scaling.finetuned", "attention.causal", "use_parallel_residual")


class Keys(Mapping[str, Any]):
    """The metadata behind "{architecture}.", which remembers the keys that were looked up. A value reads alike in every
    numeric type: a count is an int, a fraction a float, and a flag may be 0 or 1."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.prefix = prefix = f"{metadata['general.architecture']}."
        names = [key.removeprefix(prefix) for key in metadata if key.startswith(prefix)]
        self._values = {name: _plain(name, metadata[prefix + name]) for name in names}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def read(self) -> frozenset[str]:
        """The keys that were looked up, whether or not the file has them."""
        return frozenset(self._read)

    @property
    def unread(self) -> dict[str, Any]:
        """The file's other keys."""
        return {key: value for key, value in self._values.items() if key not in self._read}


def _plain(key: str, value: Any) -> Any:
    if not isinstance(value, int | float):
        return value
    if key in _FLAGS and value in (0, 1):
        return bool(value)
    if key.endswith(FRACTIONS):
        return value if isinstance(value, bool) else float(value)
    # Beyond 2**53 not every whole number is a float.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def number(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A number of the metadata, which may be given for each layer; the default where the file does not have the key."""
    value = same_everywhere(metadata.get(key, default), key)
    if value is not default and not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number; got {value!r}")
    return value


def same_everywhere(value: Any, what: str, *, some_have_none: bool = False) -> Any:
    """A number for all layers; some files list it for each. some_have_none: 0 says that a layer has none."""
    if not isinstance(value, np.ndarray):
        return value
    numbers = set(value.tolist())
    if some_have_none and len(numbers) > 1:
        numbers.discard(0)
    if len(numbers) != 1:
        raise ConfigError(f"{what} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
    return numbers.pop()


def list_of(value: Any) -> list[Any] | None:
    """The values of an array; None for what is none."""
    return list(value) if isinstance(value, np.ndarray | list) else None


def each_layer(metadata: Mapping[str, Any], key: str) -> tuple[Any, list[bool] | None]:
    """The number of all layers that have one (0 says that a layer has none), and which have it. None: the metadata has
    one for all."""
    value = metadata.get(key)
    counts = list_of(value)
    if counts is None:
        return value, None
    numbers = {int(count) for count in counts if isinstance(count, int | np.integer) and count}
    if len(numbers) > 1:
        raise ConfigError(f"{key} differs from layer to layer ({sorted(numbers)[:4]}), which is not supported")
    return max(numbers, default=None), [bool(count) for count in counts]


def whole_numbers(key: str, value: Any) -> list[int] | None:
    """The numbers of an array, one for each layer; None for what is none."""
    values = list_of(value)
    if values is not None and not all(isinstance(item, int | np.integer) for item in values):
        raise ConfigError(f"{key} must be whole numbers; got {values[:4]}")
    return None if values is None else [int(item) for item in values]


def quotient(value: Any, divisor: Any) -> int:
    """Of two whole numbers; 0, which no width may be, where they are none."""
    return value // divisor if isinstance(value, int) and isinstance(divisor, int) and divisor else 0
