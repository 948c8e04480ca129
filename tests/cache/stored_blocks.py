"""An in-memory store of prefixes whose writes and reads happen when a test triggers them."""

from typing import NamedTuple


class Stats(NamedTuple):
    queued: int = 0


class Stored(NamedTuple):
    content: bytes

    @property
    def nbytes(self):
        return len(self.content)


class StoredBlocks:
    """A double of `PrefixStore` for blocks of `size` ids. right: the most parts that a read finds undamaged; None for
    all."""

    def __init__(self, size):
        self.size, self.right, self.paths = size, None, {}

    def find(self, root, ids):
        found = []
        for end in range(self.size, len(ids) + 1, self.size):
            parts = self.paths.get((root, tuple(ids[:end])), {})
            if 0 not in parts:
                break
            found.append(dict(parts))
        return found

    def put(self, root, ids, parts):
        for block, kind, (content,), *_ in parts:
            path = self.paths.setdefault((root, tuple(ids[: (block + 1) * self.size])), {})
            path.setdefault(kind, Stored(bytes(content)))
        return True

    def read(self, parts):
        right = len(parts) if self.right is None else min(self.right, len(parts))
        for stored, (target,) in parts[:right]:
            target[:] = stored.content
        return right

    def stats(self):
        return Stats()
