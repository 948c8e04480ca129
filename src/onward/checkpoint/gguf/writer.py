"""Write GGUF (`onward.checkpoint.gguf.reader` says what it looks like)."""

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.checkpoint.gguf.reader import MAGIC
from onward.checkpoint.gguf.types import TYPES
from onward.errors import RequestError

_VERSION, _ALIGNMENT = 3, 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NUMBERS = {block.name: number for number, block in TYPES.items()}


class Stored(NamedTuple):
    """A tensor to write. type: a name in `TYPES`. shape: outermost first. data: its bytes, of any dtype."""

    type: str
    shape: tuple[int, ...]
    data: Tensor


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    """Write a file. metadata: strings, booleans, whole numbers of 32 bits, floats, or lists of one of these."""
    head = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for name, value in metadata.items():
        head += [_text(name), *_value(value)]
    offset = 0
    for name, stored in tensors.items():
        sizes = struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *reversed(stored.shape))
        head += [_text(name), sizes, struct.pack("<IQ", _NUMBERS[stored.type], offset)]
        offset += _padded(stored.data.nbytes)
    text = b"".join(head)
    with file.open("wb") as out:
        out.write(text + bytes(_padded(len(text)) - len(text)))
        for stored in tensors.values():
            out.write(stored.data.contiguous().view(torch.uint8).numpy().data)
            out.write(bytes(_padded(stored.data.nbytes) - stored.data.nbytes))
        out.flush()
        os.fsync(out.fileno())


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{text[:80]!r} is not valid Unicode, which all texts in GGUF are") from error
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> Iterable[bytes]:
    if isinstance(value, list):
        # llama.cpp reads types of tokens as int32 alone, and lists of whole numbers as either. Merges alone may be
        # none, and they are strings.
        whole = bool(value) and all(type(item) is int for item in value)
        kind, one = (_INT32, struct.Struct("<i").pack) if whole else _kind(value)
        return [struct.pack("<IIQ", _ARRAY, kind, len(value)), *(one(item) for item in value)]
    kind, one = _kind([value])
    return [struct.pack("<I", kind), one(value)]


def _kind(values: Sequence[Any]) -> tuple[int, Any]:
    """The number of a kind of values, and what writes one."""
    if all(isinstance(value, str) for value in values):
        return _STRING, _text
    if all(isinstance(value, bool) for value in values):
        return _BOOL, struct.Struct("<?").pack
    if all(isinstance(value, int) for value in values):
        negative = any(value < 0 for value in values)
        return (_INT32, struct.Struct("<i").pack) if negative else (_UINT32, struct.Struct("<I").pack)
    return _FLOAT32, struct.Struct("<f").pack
