"""The nodes that write and that read each storage of a trace."""

from collections import defaultdict
from collections.abc import Iterable

from onward.program.arrays import Array, Kind, Storage
from onward.program.nodes import Node


class Uses:
    """The nodes that write and that read each storage."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._writers: dict[Storage, list[Node]] = defaultdict(list)
        self._readers: dict[Storage, list[Node]] = defaultdict(list)
        for node in nodes:
            for array in (*node.outputs, *node.writes):
                self._writers[array.storage].append(node)
            for storage in {array.storage for array in node.reads}:
                self._readers[storage].append(node)

    def constant(self, array: Array) -> bool:
        """Whether no node changes the array's storage after it was made."""
        return len(self._writers[array.storage]) <= (array.storage.kind is Kind.TEMPORARY)

    def only_for(self, array: Array, reader: Node) -> Node | None:
        """The node that made a temporary, if only `reader` reads it."""
        writers, readers = self._writers[array.storage], self._readers[array.storage]
        return writers[0] if len(writers) == 1 and readers == [reader] and writers[0].outputs else None
