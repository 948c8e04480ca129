"""A disk that loses power: the possible states of files and names after any of the store's calls.

A page that was written since the file's last `sync` may be old, new or torn (half of each), independently of other
pages; so may the file's size. A name that was created, renamed or deleted since the last `sync_folder` may be in the
old or the new state, independently of other names.
"""

import errno
import itertools
import os
import random
from collections.abc import Iterator, Sequence

from onward.prefix_store.file_system import FileInfo, FileSystem

PAGE = 1024

Log = list[tuple[object, ...]]


class SimulatedDisk(FileSystem):
    """Files in memory. log: of the calls that change something. syncs: False for a disk that ignores `sync`."""

    def __init__(self, files: dict[str, bytes] | None = None, *, syncs: bool = True) -> None:
        self.log: Log = []
        self._syncs = syncs
        self._clock = itertools.count(1)
        self._handles: dict[int, list[int]] = {}
        self.inodes: dict[int, bytearray] = {}
        self.names_: dict[str, int] = {}
        self._modified: dict[int, int] = {}
        for name, content in (files or {}).items():
            self.names_[name] = inode = next(self._clock)
            self.inodes[inode], self._modified[inode] = bytearray(content), 0
        self.before = {name: bytes(self.inodes[inode]) for name, inode in self.names_.items()}

    def make_folder(self, folder: str) -> None:
        pass

    def names(self, folder: str) -> list[str]:
        return list(self.names_)

    def changed(self, folder: str) -> int:
        return next(self._clock)

    def files(self, folder: str) -> list[FileInfo]:
        return [FileInfo(name, len(self.inodes[inode]), self._modified[inode]) for name, inode in self.names_.items()]

    def create(self, path: str, nbytes: int) -> int:
        inode = next(self._clock)
        self.inodes[inode], self._modified[inode] = bytearray(nbytes), 2**62
        self.names_[os.path.basename(path)] = inode
        self.log.append(("create", os.path.basename(path), inode, nbytes))
        return self._handle(inode)

    def _handle(self, inode: int) -> int:
        handle = next(self._clock)
        self._handles[handle] = [inode, 0]
        return handle

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        inode, at = self._handles[handle]
        for view in buffers:  # a call for each: the power may fail between them
            self.inodes[inode][at : at + view.nbytes] = view
            self.log.append(("write", inode, at, bytes(view)))
            at += view.nbytes
        self._handles[handle][1] = at

    def sync(self, handle: int) -> None:
        if self._syncs:
            self.log.append(("sync", self._handles[handle][0]))

    def set_modified(self, path: str, modified: int) -> None:
        self._modified[self._inode(path)] = modified

    def close(self, handle: int) -> None:
        del self._handles[handle]

    def rename(self, path: str, to: str) -> None:
        self.names_[os.path.basename(to)] = self._inode(path)
        del self.names_[os.path.basename(path)]
        self.log.append(("rename", os.path.basename(path), os.path.basename(to)))

    def remove(self, path: str) -> None:
        self._inode(path)
        del self.names_[os.path.basename(path)]
        self.log.append(("remove", os.path.basename(path)))

    def sync_folder(self, folder: str) -> None:
        self.log.append(("sync_folder",))

    def open(self, path: str) -> int:
        return self._handle(self._inode(path))

    def read(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        content, done = self.inodes[self._handles[handle][0]], 0
        for view in buffers:
            piece = content[offset + done :][: view.nbytes]
            view[: len(piece)] = piece
            done += len(piece)
        return done

    def _inode(self, path: str) -> int:
        inode = self.names_.get(os.path.basename(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode


def after_power_loss(log: Log, rng: random.Random, samples: int) -> Iterator[dict[str, bytes]]:
    """What may be on the disk if the power fails after these calls: every combination of names, each with the extremes
    (every unsynced page old; every one new; all but one; only one, also torn) and with `samples` random mixtures."""
    synced: dict[int, bytearray] = {}  # the content on the disk
    sizes: dict[int, int] = {}
    unsynced: dict[int, list[tuple[int, bytes]]] = {}
    names: dict[str, int] = {}  # on the disk
    inode_of: dict[str, int] = {}  # as the process sees them
    pending: list[tuple[str | None, str | None, int]] = []  # a name that goes, one that comes
    for call, *arguments in log:
        match call, arguments:
            case "create", [str(name), int(inode), int(nbytes)]:
                synced[inode], sizes[inode], unsynced[inode] = bytearray(), nbytes, []
                inode_of[name] = inode
                pending.append((None, name, inode))
            case "write", [int(inode), int(at), bytes(data)]:
                unsynced[inode].append((at, data))
            case "sync", [int(inode)]:
                synced[inode] = _with(synced[inode], sizes[inode], unsynced[inode])
                unsynced[inode] = []
            case "rename", [str(old), str(new)]:
                inode_of[new] = inode = inode_of.pop(old)
                pending.append((old, new, inode))
            case "remove", [str(name)]:
                pending.append((name, None, inode_of.pop(name)))
            case "sync_folder", []:
                for change in pending:
                    _apply(names, *change)
                pending = []
            case other:
                raise AssertionError(other)
    for chosen in itertools.product((False, True), repeat=len(pending)):
        seen = dict(names)
        for change, happened in zip(pending, chosen, strict=True):
            if happened:
                _apply(seen, *change)
        dirty = sorted({inode for inode in seen.values() if unsynced[inode] or len(synced[inode]) != sizes[inode]})
        pages = [(inode, page) for inode in dirty for page in range(-(-sizes[inode] // PAGE))]
        for states in _states(len(pages), rng, samples):
            of_page = dict(zip(pages, states, strict=True))
            yield {
                name: _content(inode, synced, sizes, unsynced, of_page) if inode in dirty else bytes(synced[inode])
                for name, inode in seen.items()
            }


def _states(count: int, rng: random.Random, samples: int) -> Iterator[list[str]]:
    """For each page, whether it is old, new or torn."""
    yield ["new"] * count
    if not count:
        return
    yield ["old"] * count
    for one in range(count):
        for others, state in (("new", "old"), ("old", "new"), ("new", "torn")):
            yield [state if page == one else others for page in range(count)]
    for _ in range(samples):
        yield rng.choices(("old", "new", "torn"), k=count)


def _content(
    inode: int,
    synced: dict[int, bytearray],
    sizes: dict[int, int],
    unsynced: dict[int, list[tuple[int, bytes]]],
    of_page: dict[tuple[int, int], str],
) -> bytes:
    new = _with(synced[inode], sizes[inode], unsynced[inode])
    states = [of_page[inode, page] for page in range(-(-len(new) // PAGE))]
    if set(states) == {"old"}:
        return bytes(synced[inode])  # and the size
    content = bytearray(synced[inode]) + bytes(len(new) - len(synced[inode]))
    for page, state in enumerate(states):
        end = {"old": 0, "torn": PAGE // 2, "new": PAGE}[state]
        content[page * PAGE : page * PAGE + end] = new[page * PAGE : page * PAGE + end]
    return bytes(content)


def _with(content: bytearray, size: int, writes: list[tuple[int, bytes]]) -> bytearray:
    result = bytearray(content) + bytes(size - len(content))
    for at, data in writes:
        result[at : at + len(data)] = data
    return result


def _apply(names: dict[str, int], gone: str | None, come: str | None, inode: int) -> None:
    if gone is not None:
        names.pop(gone, None)
    if come is not None:
        names[come] = inode
