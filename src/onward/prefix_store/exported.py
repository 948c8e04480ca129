"""A prefix in a file of the caller's: one segment, which may end within a block and have metadata of its own."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from onward.prefix_store.file_system import FileSystem
from onward.prefix_store.index import StoredPart, as_bytes
from onward.prefix_store.segment import Part, Segment, encode, load_header, read_part
from onward.util.files import write_whole


def save_prefix(
    file: Path,
    *,
    key: str,
    root: str,
    ids: Sequence[int],
    parts: Sequence[Part],
    metadata: Mapping[str, str],
    block: int = 64,
) -> None:
    """Write a file atomically, readable only by its owner. metadata: of the caller's. Raises `OSError`."""
    _, head = encode(key, root, block, as_bytes(ids), parts, metadata)
    buffers = [memoryview(head), *chain.from_iterable(part.buffers for part in parts)]

    def write(temporary: Path) -> None:
        system, handle = FileSystem(), os.open(temporary, os.O_WRONLY)
        try:
            system.write(handle, buffers)
        finally:
            system.close(handle)

    write_whole(file, write)


def load_prefix(file: Path) -> Segment:
    """The header of an exported prefix, whose entries `read_prefix` reads. Raises `OSError`, or `ValueError` for any
    other file, one of another version and damage."""
    return load_header(AnyFile(), str(file.parent), file.name)


def read_prefix(file: Path, parts: Sequence[tuple[StoredPart, Sequence[memoryview]]]) -> bool:
    """Fill flat buffers with the bytes of parts. Returns whether all are as they were written. Raises `OSError`."""
    system = AnyFile()
    handle = system.open(str(file))
    try:
        return all(read_part(system, handle, part, buffers) for part, buffers in parts)
    finally:
        system.close(handle)


class AnyFile(FileSystem):
    """A file that the caller names may be a link, or belong to another user."""

    def open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
