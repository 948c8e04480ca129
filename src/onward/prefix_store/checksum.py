"""The checksum of parts: sums of 64-bit words by row and by column, at the speed of memory.

Bytes are words in rows of 4 KiB, the last row filled up with zeros. The checksum is a hash of the length, the sums of
all rows and the sums of all columns. A change of any one byte changes it, and so do a row (a page of a disk) that is
missing, torn, repeated or in another's place. It protects against damage, not against forgery: files are private.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

ROW = 4096
_WORDS = ROW // 8
_PIECE = 256 * ROW  # the columns are summed while the piece is still in the processor's cache


class Checksum:
    """The checksum of bytes in pieces. All pieces but the last must have whole rows."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.uint64]] = []
        self._columns = np.zeros(_WORDS, np.uint64)
        self._nbytes = 0

    def update(self, piece: memoryview) -> None:
        assert self._nbytes % ROW == 0, "all pieces but the last have whole rows"
        self._nbytes += piece.nbytes
        if piece.nbytes % ROW:
            piece = memoryview(bytes(piece) + bytes(-piece.nbytes % ROW))
        words = np.frombuffer(piece, np.uint64).reshape(-1, _WORDS)
        self._rows.append(words.sum(1))
        self._columns += words.sum(0)

    def value(self) -> str:
        """16 hexadecimal digits."""
        digest = hashlib.blake2b(self._nbytes.to_bytes(8, "little"), digest_size=8)
        for sums in (*self._rows, self._columns):
            digest.update(sums.tobytes())
        return digest.hexdigest()


def has_whole_rows(buffers: Sequence[memoryview]) -> bool:
    """Whether all buffers but the last have whole rows."""
    return not any(view.nbytes % ROW for view in buffers[:-1])


def pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Buffers with whole rows, in pieces that fit into a processor's cache."""
    for view in buffers:
        for start in range(0, view.nbytes, _PIECE):
            yield view[start : start + _PIECE]


def checksum(buffers: Sequence[memoryview]) -> str:
    """The checksum of consecutive flat buffers of bytes. They are copied if they have no whole rows."""
    total = Checksum()
    for piece in pieces(buffers if has_whole_rows(buffers) else [memoryview(b"".join(buffers))]):
        total.update(piece)
    return total.value()
