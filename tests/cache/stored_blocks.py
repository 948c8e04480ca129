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

    def find_end(self, root, ids):
        full = len(self.find(root, ids)) * self.size
        end, last = full, {}
        for (other, path), parts in self.paths.items():
            common = next((at for at, (a, b) in enumerate(zip(path, ids, strict=False)) if a != b), len(path))
            common = min(common, len(ids))
            if other == root and 0 in parts and full < len(path) <= full + self.size and common > end:
                end, last = common, parts
        return end, last

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
