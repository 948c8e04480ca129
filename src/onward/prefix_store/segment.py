"""A segment: a safetensors file with parts of consecutive blocks of one path. It is written once and never changed.

tokens               int32 [N]: the ids of the path, from the root to the end of the segment's last block, which may
                     have fewer ids than the others
<kind>.<block>       uint8 [bytes]: a part; the number of its kind and of its block in the path
__metadata__         onward_prefix (the format's version)
                     key        a digest of everything else that the bytes depend on; model: its readable name
                     root       where the path starts
                     block      ids of a block
                     part_checksums  in the order of the parts, separated by spaces
                     digest     SHA-256 of this header and the tokens

Parts begin at a multiple of 4096 bytes if their sizes are multiples of it. The file's name has digests of the key and
of the header, so processes that write the same parts of the same path write the same file.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onward.prefix_store.checksum import Checksum, checksum, has_whole_rows, pieces
from onward.prefix_store.file_system import FileSystem
from onward.prefix_store.index import Entry, StoredPart

ALIGNMENT = 4096
_VERSION = "1"
_FIELDS = frozenset({"onward_prefix", "key", "root", "block", "part_checksums", "digest"})
_MAX_HEADER = 64 * 2**20
_FIRST_READ = 64 * 1024
_NAME = re.compile(r"prefix-([0-9a-f]{16})-([0-9a-f]{32})\.safetensors")
_TEMPORARY = re.compile(r"\.prefix-[0-9a-f]{16}-[0-9a-f]{32}\.[0-9a-f]{16}\.partial")
_PART = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,8})")


# What the content of other files raises.
_OF_OTHER_FILES = (
    json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError, MemoryError
)  # fmt: skip


class Part(NamedTuple):
    """The bytes of one kind of a block: those of flat, consecutive buffers."""

    block: int
    kind: int
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.buffers)


class Segment(NamedTuple):
    """The header of a segment. ids: little-endian int32. entries: its parts. metadata: the caller's."""

    key: str
    model: str
    root: str
    block: int
    ids: bytes
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @property
    def tokens(self) -> list[int]:
        """The ids of the path."""
        return array("i", self.ids).tolist()

    def ids_of(self, entry: Entry) -> int:
        """The number of ids of a part's block."""
        return min(self.block, len(self.ids) // 4 - entry.block * self.block)


def key_digest(key: str) -> str:
    """The part of the file names of a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def key_of(name: str) -> str | None:
    """The `key_digest` in a segment's name; None for other files."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def is_temporary(name: str) -> bool:
    """Whether it is the name of a segment that is being written, or was when its process ended."""
    return _TEMPORARY.fullmatch(name) is not None


def temporary_name(name: str, unique: str) -> str:
    """The name of a segment while it is written. unique: 16 hexadecimal digits."""
    return f".{name.removesuffix('.safetensors')}.{unique}.partial"


def encode(
    key: str, root: str, block: int, ids: bytes, parts: Sequence[Part], metadata: Mapping[str, str]
) -> tuple[str, bytes]:
    """The name of a segment, and the bytes of its file before those of the parts.

    ids: little-endian int32. metadata: `model`, and anything else of the caller's.
    """
    assert not _FIELDS & metadata.keys(), "these names are the segment's own"
    fields = {
        **metadata,
        "onward_prefix": _VERSION,
        "key": key,
        "root": root,
        "block": str(block),
        "part_checksums": " ".join(checksum(part.buffers) for part in parts),
    }
    tensors: dict[str, Any] = {
        "tokens": {"dtype": "I32", "shape": [len(ids) // 4], "data_offsets": [0, end := len(ids)]}
    }
    for part in parts:
        nbytes = part.nbytes
        tensors[f"{part.kind}.{part.block}"] = {
            "dtype": "U8",
            "shape": [nbytes],
            "data_offsets": [end, end := end + nbytes],
        }
    fields["digest"] = digest = _digest(fields, tensors, ids)
    header = json.dumps({"__metadata__": fields, **tensors}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header) + len(ids)) % ALIGNMENT)
    return f"prefix-{key_digest(key)}-{digest[:32]}.safetensors", len(header).to_bytes(8, "little") + header + ids


def read_header(system: FileSystem, folder: str, name: str) -> Segment | None:
    """The header of a segment that is whole and of this version; None for every other file."""
    try:
        return load_header(system, folder, name)
    except (OSError, ValueError):
        return None


def load_header(system: FileSystem, folder: str, name: str) -> Segment:
    """The header of a segment. Raises `OSError`, or `ValueError` for other files, other versions and damage."""
    handle = system.open(f"{folder}/{name}")
    try:
        return _read_header(system, handle, name)
    except _OF_OTHER_FILES as error:
        raise ValueError("it is not a segment of a prefix") from error
    finally:
        system.close(handle)


def _read_header(system: FileSystem, handle: int, name: str) -> Segment:
    start = _read(system, handle, 0, _FIRST_READ)
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= _MAX_HEADER:
        raise ValueError("it is not a segment of a prefix")
    content = start[8 : 8 + length]
    if len(content) < length:
        content += _read(system, handle, 8 + len(content), length - len(content))
    tensors = json.loads(content)
    fields = tensors.pop("__metadata__")
    if fields["onward_prefix"] != _VERSION:
        raise ValueError(f"its format is {fields['onward_prefix']}, and this Onward reads {_VERSION}: upgrade it")
    count, begin = tensors["tokens"]["data_offsets"][1], 8 + length
    if not isinstance(count, int) or not 0 <= count <= _MAX_HEADER:
        raise ValueError("it has too many tokens")
    ids = start[begin : begin + count]
    if len(ids) < count:
        ids += _read(system, handle, begin + len(ids), count - len(ids))
    if fields["digest"] != _digest(fields, tensors, ids):
        raise ValueError("its header is damaged")
    if not all(isinstance(value, str) for value in fields.values()):
        raise TypeError("its metadata are not texts")
    del tensors["tokens"]
    entries = []
    for (part, tensor), value in zip(tensors.items(), fields["part_checksums"].split(), strict=True):
        kind, block = map(int, _PART.fullmatch(part).groups())  # type: ignore[union-attr]
        first, last = tensor["data_offsets"]
        if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < 2**62):
            raise TypeError("its parts are not in a file")
        entries.append(Entry(block, kind, StoredPart(name, begin + first, last - first, value)))
    rest = {key: value for key, value in fields.items() if key not in _FIELDS}
    return Segment(
        fields["key"], fields.get("model", ""), fields["root"], int(fields["block"]), ids, tuple(entries), rest
    )


def read_part(system: FileSystem, handle: int, part: StoredPart, buffers: Sequence[memoryview]) -> bool:
    """Fill flat buffers with the bytes of a part. Returns whether they are those that were written."""
    if sum(view.nbytes for view in buffers) != part.nbytes:
        return False
    if not has_whole_rows(buffers):
        return system.read(handle, buffers, part.offset) == part.nbytes and checksum(buffers) == part.checksum
    total, offset = Checksum(), part.offset
    for piece in pieces(buffers):  # which is still in the processor's cache when it is summed
        if system.read(handle, [piece], offset) != piece.nbytes:
            return False
        total.update(piece)
        offset += piece.nbytes
    return total.value() == part.checksum


def _read(system: FileSystem, handle: int, offset: int, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    return bytes(content[: system.read(handle, [memoryview(content)], offset)])


def _digest(fields: Mapping[str, str], tensors: Mapping[str, Any], ids: bytes) -> str:
    """The digest of a header. It is of values, so whatever the file's bytes are, these values are those written."""
    rest = {key: value for key, value in fields.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps([rest, list(tensors.items())], sort_keys=True).encode())
    digest.update(ids)
    return digest.hexdigest()
