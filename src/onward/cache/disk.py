"""Prefixes on disk: blocks of the prefix index in a `PrefixStore`, which other processes share.

These are the full blocks and, if a sequence can continue from any position of a block, also the last block of a text.

**Writing.** A thread copies blocks that are new in the index and gives them to the store, a few at a time. It holds no
lock: nobody writes to a block while it has its node, and `BlockKind.links` tells whether it had it throughout. A block
that is evicted earlier is copied first, unless the store's queue is full.

**Reading.** `SlotManager.acquire` looks up what the store has of a text beyond the index. A `Restoration` reads it into
the slot's own blocks, before the slot's first forward and without a lock. So it takes no memory that the slot has not
reserved, and evicts nothing. Then the blocks are final, as if a forward had computed them.
"""

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onward.cache.allocator import BlockKind
from onward.cache.prefix_index import PrefixIndex
from onward.cache.slot import PrefixNode, Slot
from onward.prefix_store import Part, PrefixStore, StoredBlock, StoredPart
from onward.util.process import lower_priority

# Bytes that are copied or read at a time.
_PORTION, _READ = 32 << 20, 64 << 20
# While forwards run, the thread takes this share of a core.
_SHARE = 0.01
# Bytes of copies that wait for the disk; then blocks wait in the cache.
MAX_QUEUED = 256 << 20
# Seconds for what is not written yet when an engine is closed or the interpreter exits.
EXIT_SECONDS = 30.0
# Seconds until a full queue is tried again.
_RETRY = 0.05


class CurrentStore(NamedTuple):
    """The store of a model with its present weights. is_current: whether they are still the same."""

    store: PrefixStore
    is_current: Callable[[], bool]


class StoredPath(NamedTuple):
    """The blocks of a slot's text that only the store has: those from index `first` on. ids: of the text. positions:
    those that the slot has without them. end: those that it has with them."""

    ids: Sequence[int]
    first: int
    blocks: Sequence[StoredBlock]
    positions: int
    end: int


@dataclass
class DiskCounts:
    """restored: positions that were read. written, dropped: blocks that the store took, and those that it did not."""

    restored: int = 0
    written: int = 0
    dropped: int = 0


class DiskPrefixes:
    """The store of one prefix index, and the thread that writes to it.

    steps: returns a number that changes as forwards run. pending: nodes with blocks to be written, oldest first, each
    with a mark that changes with its blocks.
    """

    def __init__(
        self,
        current: CurrentStore,
        index: PrefixIndex,
        kinds: Sequence[BlockKind],
        steps: Callable[[], int],
        counts: DiskCounts,
    ) -> None:
        self.current, self.kinds, self.counts = current, kinds, counts
        self.size, self._index, self._steps, self._last_step = index.size, index, steps, -1
        # The fewest ids of a block to write or read. Windows and states are those at one position, so a sequence
        # continues only there; else part of a block is worth the bytes of all of it if it saves some tokens.
        self._least = index.size if len(kinds) > 1 else max(1, index.size // 4)
        self._marks = itertools.count()
        self.pending = {node: next(self._marks) for node in index if len(node.tokens) >= self._least}
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may call its `put`, but take no lock
        for kind in kinds:
            kind.on_link, kind.on_unlink = self._linked, self._unlinking
        self.stopped = False
        arguments = weakref.ref(self), self.wake
        self._thread = threading.Thread(target=_write_behind, args=arguments, name="onward-prefixes", daemon=True)
        self._thread.start()
        weakref.finalize(self, self.wake.put, None).atexit = False
        self.wake.put(None)
        _alive.add(self)

    # ── reading ──

    def find(self, slot: Slot, ids: Sequence[int], limit: int, positions: int) -> StoredPath | None:
        """What the store has of ids[:limit] for a slot that has the first `positions`; None if it has no more."""
        size, store = self.size, self.current.store
        first, found = positions // size, store.find(slot.root, ids[: limit // size * size])
        end, last = store.find_end(slot.root, ids[:limit]) if self._least < size else (0, {})
        if end >= max(positions, len(found) * size) + self._least:
            return StoredPath(ids, first, [*found, last], positions, end)
        for blocks in range(len(found), first, -1):
            if all(kind.is_restorable(slot, found, first, blocks) for kind in self.kinds):
                return StoredPath(ids, first, found[:blocks], positions, blocks * size)
        return None

    # ── writing ──

    def _linked(self, node: PrefixNode) -> None:
        if len(node.tokens) >= self._least:
            self.pending[node] = next(self._marks)
            self.wake.put(None)

    def _unlinking(self, node: PrefixNode) -> None:
        """Copy a node that loses a block, with the pending ones above it. The beginning of a block isn't copied: the
        block itself may take its place."""
        if len(node.tokens) < self.size:
            self.pending.pop(node, None)
            return
        chain: list[PrefixNode] = []
        above: PrefixNode | None = node
        while above is not None and above in self.pending:
            chain.append(above)
            above = above.parent
        try:
            is_saved = not chain or self._save(chain[::-1])
        except MemoryError:  # of the copies: the blocks are evicted nevertheless
            is_saved = False
        self.counts.dropped += not is_saved
        self.pending.pop(node, None)

    def write(self) -> float | None:
        """Write some pending nodes. Returns the seconds to wait before the next; None if there are none."""
        began = time.thread_time()
        nbytes, chain = 0, list[PrefixNode]()
        for node in list(self.pending):
            if chain and (node.parent is not chain[-1] or nbytes >= _PORTION):
                break
            chain.append(node)
            nbytes += sum(kind.nbytes for kind in self.kinds if node.blocks[kind.number] is not None)
        if not chain:
            return None
        if not self._save(chain):
            return _RETRY
        step, self._last_step = self._last_step, self._steps()
        return 0.0 if self._last_step == step else (time.thread_time() - began) * (1 / _SHARE - 1)

    def _save(self, chain: Sequence[PrefixNode]) -> bool:
        """Give nodes, each a child of the one before, to the store, as far as it lacks them. Returns False, with all of
        them pending, if its queue is full."""
        store = self.current.store
        if store.stats().queued >= MAX_QUEUED:
            return False
        size, path, marks = self.size, list[PrefixNode](), [self.pending.get(node) for node in chain]
        above = chain[-1].parent
        while above is not None:
            path.append(above)
            above = above.parent
        root = self._index.name_of(path[-1]) if path else None
        ids = [token for node in (*path[::-1], chain[-1]) for token in node.tokens]
        if root is not None:
            first = -(-len(ids) // size) - len(chain)
            found = store.find(root, ids)
            if len(ids) % size and (end := store.find_end(root, ids))[0] == len(ids):
                found.append(end[1])
            parts = [
                part
                for at, node in enumerate(chain, first)
                for part in self._copies(at, node, found[at] if at < len(found) else {})
            ]
            # Whatever computed these blocks did it with the present weights if they are current after the copies.
            if parts and self.current.is_current():
                blocks = len({part.block for part in parts})
                if store.put(root, ids, parts):
                    self.counts.written += blocks
                else:  # the disk is full or cannot be written
                    self.counts.dropped += blocks
        for node, mark in zip(chain, marks, strict=True):
            if self.pending.get(node) == mark:
                self.pending.pop(node, None)
        return True

    def _copies(self, at: int, node: PrefixNode, stored: StoredBlock) -> list[Part]:
        """Copies of what the store lacks of a node, which is block `at` of its path."""
        parts = []
        for kind in self.kinds:
            block = node.blocks[kind.number]
            if block is None or kind.number in stored or not kind.is_final(node, at):
                continue
            link = kind.links[block]
            positions = (len(node.tokens),) if len(node.tokens) < self.size else ()
            copy = kind.memory.dump(block, *positions)
            if kind.links[block] == link and node.blocks[kind.number] == block and kind.is_final(node, at):
                parts.append(Part(at, kind.number, [copy]))
        return parts

    def flush(self, timeout: float) -> bool:
        """Write everything that is pending, in this thread. Returns whether that took at most so many seconds."""
        end = time.monotonic() + timeout
        while (pause := self.write()) is not None and time.monotonic() < end:
            if pause == _RETRY:
                time.sleep(_RETRY)
        return pause is None and self.current.store.flush(max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """End the thread. Whoever calls `write` then writes."""
        self.stopped = True
        _alive.discard(self)
        self.wake.put(None)
        self._thread.join()

    def end(self) -> None:
        """Write nothing more of the index, whose nodes other weights have computed."""
        for kind in self.kinds:
            kind.on_link = kind.on_unlink = None
        self.pending.clear()
        self.stopped = True
        self.wake.put(None)
        _alive.discard(self)


class Restoration:
    """The reading of a slot's stored blocks, in any thread, while nobody else uses the slot.

    end: the number of positions that the slot has then; 0 before the end, and if nothing could be read. What is needed
    to continue from the slot's present positions is not overwritten before all is read.
    """

    def __init__(self, disk: DiskPrefixes, slot: Slot, path: StoredPath) -> None:
        self.slot, self.path, self.end = slot, path, 0
        self._disk = disk
        self._staged: list[tuple[BlockKind, int, bytearray]] = []

    def read(self, is_cancelled: Callable[[], bool] = bool) -> None:
        """Read all blocks, unless it is cancelled meanwhile. Blocks after a damaged one are left out."""
        path, end = self.path, len(self.path.blocks)
        requests = sorted(
            (at, kind.number) for kind in self._disk.kinds for at in kind.restored(self.slot, path.first, end)
        )
        right, portion, nbytes = 0, list[tuple[StoredPart, list[memoryview]]](), 0
        for number, (at, kind) in enumerate(requests, 1):
            part = path.blocks[at][kind]
            portion.append((part, [self._target(self._disk.kinds[kind], at, part.nbytes)]))
            nbytes += part.nbytes
            if number == len(requests) or nbytes >= _READ:
                if is_cancelled():
                    return
                count = self._disk.current.store.read(portion)
                right += count
                if count < len(portion):
                    break
                portion, nbytes = [], 0
        if right == len(requests):
            self.end = path.end
        elif len(self._disk.kinds) == 1 and right:  # keys and values of the whole text have any end
            self.end = (path.first + right) * self._disk.size

    def _target(self, kind: BlockKind, at: int, nbytes: int) -> memoryview:
        """Where to read a part to: the slot's own block, if that has nothing yet."""
        is_new = kind.number == 0 and (at > self.path.first or self.path.positions % self._disk.size == 0)
        memory = kind.memory.writable(kind.block_of(self.slot, at)) if is_new else None
        if memory is None:
            self._staged.append((kind, at, staged := bytearray(nbytes)))
            memory = memoryview(staged)
        return memory

    def place(self) -> None:
        """Copy what was read elsewhere to the slot's blocks."""
        for kind, at, content in self._staged:
            if at * self._disk.size < self.end:
                kind.memory.load(kind.block_of(self.slot, at), memoryview(content))


_alive: "weakref.WeakSet[DiskPrefixes]" = weakref.WeakSet()


@atexit.register
def _flush_at_exit() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for disk in list(_alive):
        disk.flush(max(0.0, end - time.monotonic()))


def _write_behind(ref: "weakref.ref[DiskPrefixes]", wake: "queue.SimpleQueue[None]") -> None:
    """Write pending nodes, until the object is garbage or stopped."""
    lower_priority()
    while True:
        wake.get()
        while not wake.empty():
            wake.get()
        while True:
            disk = ref()
            if disk is None or disk.stopped:
                return
            pause = disk.write()
            del disk
            if pause is None:
                break
            time.sleep(pause)
