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
    """Ids after its parent's path: a block, or the beginning of one, without children. parts: replaced, never changed,
    so that readers need no lock."""

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
        return [node.parts for node in self._path(root, ids)[1:]]

    def find_end(self, root: str, ids: Sequence[int] | bytes) -> tuple[int, StoredBlock]:
        """How many of the ids a stored path begins with, also within a block, and the parts of that block; the ids of
        full blocks and nothing if there is no further block."""
        path = self._path(root, ids)
        step = 4 * self.size if isinstance(ids, bytes) else self.size
        full = max(0, len(path) - 1)
        rest = as_bytes(ids[full * step : (full + 1) * step])
        children = path[-1].children if path else {}
        # What sorts between two texts begins as both do, so one of the neighbours of `rest` has most in common with it.
        contents = list(children)
        before = max((each for each in contents if each <= rest), default=b"")
        after = min((each for each in contents if each > rest), default=b"")
        common, content = max((_common(each, rest), each) for each in (before, after))
        node = children.get(content)
        if not common or node is None or 0 not in node.parts:
            return full * self.size, {}
        return full * self.size + common, node.parts

    def superseded(self, root: str, ids: bytes, first: int) -> list[str]:
        """The files with nothing but the beginning of a block, from `first` on, of which a stored path has more."""
        files, step = list[str](), 4 * self.size
        for at, node in enumerate(self._path(root, ids)[first:], first):
            content = ids[at * step : (at + 1) * step]
            if content not in node.children:
                break
            for other in [each for each in node.children.values() if len(each.ids) < len(content)]:
                if content.startswith(other.ids):
                    names = {part.file for part in other.parts.values()}
                    files += [name for name in names if all(own is other for own, _ in self._files[name][1])]
        return files

    def _path(self, root: str, ids: Sequence[int] | bytes) -> list[_Node]:
        """The root, if anything of it is stored, and the full blocks of the longest stored path."""
        node = self._roots.get(root)
        if node is None:
            return []
        path, step = [node], 4 * self.size if isinstance(ids, bytes) else self.size
        for start in range(0, len(ids) - step + 1, step):
            node = node.children.get(as_bytes(ids[start : start + step]))
            if node is None or 0 not in node.parts:
                break
            path.append(node)
        return path

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
        for start in range(0, len(ids), step):
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


def _common(content: bytes, other: bytes) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(content, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(content), len(other))) // 4


def as_bytes(ids: Sequence[int] | bytes) -> bytes:
    """Ids as little-endian int32."""
    return ids if isinstance(ids, bytes) else array("i", ids).tobytes()
