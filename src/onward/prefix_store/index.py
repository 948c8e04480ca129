"""The index in memory: a trie that finds the stored parts of a path of ids, without the disk."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple


class StoredPart(NamedTuple):
    """Where the bytes of one kind of a block are."""

    file: str
    offset: int
    nbytes: int
    checksum: str


# The parts of a block that are stored, by the number of their kind.
StoredBlock = Mapping[int, StoredPart]


class Entry(NamedTuple):
    """A part of a block of a path: what a file tells the index."""

    block: int
    kind: int
    part: StoredPart


@dataclass(eq=False)
class _Node:
    """A block of ids after its parent's path. parts: replaced, never changed, so that readers need no lock."""

    parent: "_Node | None"
    ids: bytes
    parts: StoredBlock = field(default_factory=dict)
    children: "dict[bytes, _Node]" = field(default_factory=dict)


class Index:
    """Finds parts by root, ids and kind. Ids are compared, never a hash alone.

    `find` may run while another thread changes the index; changes need one thread at a time. size: ids of a block.
    count: of parts in all files.
    """

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self._roots: dict[str, _Node] = {}
        self._files: dict[str, tuple[str, list[tuple[_Node, int]]]] = {}  # with their roots

    @property
    def files(self) -> AbstractSet[str]:
        return self._files.keys()

    def find(self, root: str, ids: Sequence[int] | bytes) -> list[StoredBlock]:
        """The blocks of the longest path of full blocks whose first kind is stored."""
        blocks: list[StoredBlock] = []
        node = self._roots.get(root)
        if node is None:
            return blocks
        step = 4 * self.size if isinstance(ids, bytes) else self.size
        for start in range(0, len(ids) - step + 1, step):
            node = node.children.get(as_bytes(ids[start : start + step]))
            if node is None or 0 not in node.parts:
                break
            blocks.append(node.parts)
        return blocks

    def path_of(self, file: str) -> list[str]:
        """The files with the blocks up to the last one of a file, from the root on."""
        _, own = self._files.get(file, ("", []))
        node = own[-1][0] if own else None
        files = {file: None}
        while node is not None:
            files.update(dict.fromkeys(part.file for part in node.parts.values()))
            node = node.parent
        return list(files)[::-1]

    def add(self, file: str, root: str, ids: bytes, entries: Iterable[Entry]) -> None:
        """Add a file with parts of blocks of a path. Parts of other files with the same bytes are replaced."""
        self.remove(file)
        step = 4 * self.size
        path = [self._roots.setdefault(root, _Node(None, b""))]
        for start in range(0, len(ids) - step + 1, step):
            content, parent = ids[start : start + step], path[-1]
            if content not in parent.children:
                parent.children[content] = _Node(parent, content)
            path.append(parent.children[content])
        own: list[tuple[_Node, int]] = []
        self._files[file] = root, own
        for block, kind, part in entries:
            if block + 1 < len(path):
                node = path[block + 1]
                node.parts = {**node.parts, kind: part}
                own.append((node, kind))
        self.count += len(own)

    def remove(self, file: str) -> None:
        """Remove a file and what only it has."""
        root, own = self._files.pop(file, ("", []))
        self.count -= len(own)
        for node, kind in own:
            if node.parts.get(kind, _NOWHERE).file == file:
                node.parts = {other: part for other, part in node.parts.items() if other != kind}
            while not node.parts and not node.children and node.parent is not None:
                parent = node.parent
                if parent.children.get(node.ids) is node:  # another file's node may have taken its place
                    del parent.children[node.ids]
                node = parent
        if root in self._roots and not self._roots[root].children:
            del self._roots[root]


_NOWHERE = StoredPart("", 0, 0, "")


def as_bytes(ids: Sequence[int] | bytes) -> bytes:
    """Ids as little-endian int32."""
    return ids if isinstance(ids, bytes) else array("i", ids).tobytes()
