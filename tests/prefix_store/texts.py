"""The texts and blocks that the tests of the prefix store write and expect."""

import functools
import random
from collections.abc import Sequence

from onward.prefix_store import Part, PrefixStore
from onward.prefix_store.index import StoredBlock

BLOCK = 4
TEXT = list(range(100, 124))  # six blocks


def content(root: str, ids: Sequence[int], block: int, kind: int, nbytes: int = 700) -> bytes:
    """The bytes of a part: a function of its inputs, like keys and values."""
    return _random_bytes(repr((root, list(ids[: (block + 1) * BLOCK]), kind)), nbytes + kind)


@functools.lru_cache
def _random_bytes(seed: str, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def parts(root: str, ids: Sequence[int], blocks: Sequence[int], kinds: Sequence[int] = (0,)) -> list[Part]:
    return [Part(block, kind, [memoryview(content(root, ids, block, kind))]) for block in blocks for kind in kinds]


def opened(folder: object, key: str = "key", **options: object) -> PrefixStore:
    settings = {"max_bytes": 2**30, "block": BLOCK, **options}
    return PrefixStore(str(folder), key, **settings)  # type: ignore[arg-type]


def put(store: PrefixStore, root: str, ids: Sequence[int], kinds: Sequence[int] = (0,), first: int = 0) -> None:
    """Write the blocks of a path from block `first` on, the last one also if it has fewer ids."""
    assert store.put(root, ids, parts(root, ids, range(first, -(-len(ids) // BLOCK)), kinds))
    assert store.flush(30)


def read_right(store: PrefixStore, root: str, ids: Sequence[int]) -> int:
    """How many blocks are found and read; every block read must be right."""
    found = store.find(root, ids)
    requests = [(block, kind, part) for block, kinds in enumerate(found) for kind, part in sorted(kinds.items())]
    buffers = [bytearray(part.nbytes) for _, _, part in requests]
    right = store.read([(part, [memoryview(buffer)]) for (*_, part), buffer in zip(requests, buffers, strict=True)])
    for (block, kind, _), buffer in zip(requests[:right], buffers, strict=False):
        assert bytes(buffer) == content(root, ids, block, kind), f"wrong bytes of block {block}, kind {kind}"
    return requests[right][0] if right < len(requests) else len(found)


def all_parts(found: Sequence[StoredBlock]) -> list[tuple[int, int]]:
    return [(block, kind) for block, kinds in enumerate(found) for kind in sorted(kinds)]
