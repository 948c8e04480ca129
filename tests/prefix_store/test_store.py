"""A stored prefix is found by its ids alone, in this process and in others, within the size limit."""

import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tests.prefix_store.texts import BLOCK, TEXT, all_parts, content, opened, parts, put, read_right

from onward.prefix_store import Part, PrefixStore
from onward.prefix_store.checksum import checksum
from onward.prefix_store.file_system import FileSystem
from onward.prefix_store.index import as_bytes
from onward.prefix_store.segment import Segment, key_of, read_header


def segments(folder: Path) -> list[Path]:
    return sorted((file for file in folder.iterdir() if key_of(file.name)), key=lambda file: file.stat().st_mtime_ns)


def nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


# ── finding ──


def test_a_path_is_found_by_root_and_ids_also_by_a_new_store(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT, kinds=(0, 2))
    again = opened(tmp_path)
    for each in (store, again):
        assert read_right(each, "root", TEXT) == 6
        assert read_right(each, "root", TEXT[:-1]) == 5
        assert read_right(each, "root", [*TEXT[: 3 * BLOCK - 1], 0, *TEXT[3 * BLOCK :]]) == 2
        assert read_right(each, "root", [*TEXT, 1, 2]) == 6
        assert each.find("other", TEXT) == each.find("root", TEXT[1:]) == each.find("root", []) == []
        assert all_parts(each.find("root", TEXT)) == [(block, kind) for block in range(6) for kind in (0, 2)]
    assert opened(tmp_path, key="other key").find("root", TEXT) == []
    assert opened(tmp_path, block=2 * BLOCK).find("root", TEXT) == []


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=6))
def test_the_longest_stored_path_is_found(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> None:
    """Each number is a block of one id."""
    store = opened(tmp_path_factory.mktemp("store"), block=1)
    stored: set[tuple[int, ...]] = set()
    for text in texts:
        store.put("", text, [Part(at, 0, [memoryview(bytes(text[: at + 1]))]) for at in range(len(text))])
        stored |= {tuple(text[:end]) for end in range(1, len(text) + 1)}
    store.flush()
    for text in [*texts, [0, 1, 0], [1, 1, 1, 1]]:
        longest = max((end for end in range(len(text) + 1) if tuple(text[:end]) in stored or not end), default=0)
        assert len(store.find("", text)) == longest
        for at, block in enumerate(store.find("", text)):
            assert store.read([(block[0], [memoryview(target := bytearray(at + 1))])]) == 1
            assert target == bytes(text[: at + 1])
    store.close()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), max_size=6))
def test_a_path_may_end_within_a_block(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> None:
    store = opened(tmp_path_factory.mktemp("store"), block=3)
    for text in texts:
        blocks = [text[start : start + 3] for start in range(0, len(text), 3)]
        store.put("", text, [Part(at, 0, [memoryview(bytes(block))]) for at, block in enumerate(blocks)])
    store.flush()
    for text in [*texts, [0, 1, 0, 0, 1], [1] * 12]:
        end, block = store.find_end("", text)
        assert end == max(n for n in range(len(text) + 1) if not n or any(text[:n] == other[:n] for other in texts))
        full = len(store.find("", text))
        assert bool(block) == (end > 3 * full)
        if block:
            assert store.read([(block[0], [memoryview(target := bytearray(block[0].nbytes))])]) == 1
            assert list(target[: end - 3 * full]) == text[3 * full : end]
    beginnings = {tuple(text) for text in texts if len(text) % 3}
    kept = {text for text in beginnings if not any(text == tuple(each[: len(text)]) != tuple(each) for each in texts)}
    files = [segment for file in segments(Path(store.folder)) if (segment := _header(file)) and len(segment.tokens) % 3]
    assert {tuple(segment.tokens) for segment in files} == kept, "a file is deleted when more of its block is written"
    store.close()


def _header(file: Path) -> Segment | None:
    return read_header(FileSystem(), str(file.parent), file.name)


def test_only_missing_blocks_are_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT[: 3 * BLOCK])
    bytes_before = store.stats().written
    put(store, "root", TEXT[: 3 * BLOCK])
    assert store.stats().written == bytes_before
    assert store.stats().dropped == 0
    put(store, "root", TEXT[: 4 * BLOCK], kinds=(0, 1))
    assert store.stats().written == bytes_before + 3 * 701 + 700 + 701
    assert read_right(store, "root", TEXT) == 4


def test_blocks_without_a_stored_parent_are_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT, first=2)
    assert store.put("root", TEXT, parts("root", TEXT, range(2), kinds=(1,)))
    assert store.flush()
    assert not segments(tmp_path)
    assert store.stats().dropped == 4 * 700 + 2 * 701


@given(st.lists(st.sampled_from([0, 1, 100, 4096, 8192, 10_000]), min_size=1, max_size=4), st.integers(1, 3))
def test_buffers_may_be_split_in_any_way(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], pieces: int
) -> None:
    store = opened(tmp_path_factory.mktemp("store"), block=1)
    data = os.urandom(sum(sizes))
    ends = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    views = [memoryview(data)[first:last] for first, last in itertools.pairwise(ends)]
    store.put("", [1], [Part(0, 0, views)])
    store.flush()
    (block,) = store.find("", [1])
    target = bytearray(len(data))
    step = -(-len(data) // pieces) or 1
    split = [memoryview(target)[at : at + step] for at in range(0, len(data), step)]
    assert store.read([(block[0], split)]) == 1
    assert bytes(target) == data
    store.close()


def test_large_parts_are_read_by_two_threads(tmp_path: Path) -> None:
    store = opened(tmp_path, block=1)
    data = [bytes([at]) * (9 << 20) for at in range(6)]
    store.put("", range(6), [Part(at, 0, [memoryview(each)]) for at, each in enumerate(data)])
    store.flush()
    targets = [bytearray(9 << 20) for _ in data]
    requests = [
        (block[0], [memoryview(target)]) for block, target in zip(store.find("", range(6)), targets, strict=True)
    ]
    assert store.read(requests) == 6
    assert targets == data
    requests[4] = requests[4][0], [memoryview(bytearray(5))]  # not its size
    assert store.read(requests) == 4


# ── files ──


def test_files_are_private_and_readable_by_safetensors(tmp_path: Path) -> None:
    store = opened(tmp_path / "a" / "b", model="a model")
    put(store, "root", TEXT, kinds=(0, 2))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (file,) = segments(tmp_path / "a" / "b")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with safe_open(file, "numpy") as content_:
        assert content_.metadata()["model"] == "a model"
        assert content_.get_tensor("tokens").tolist() == TEXT
        assert content_.get_tensor("2.5").tobytes() == content("root", TEXT, 5, 2)
    offset = store.find("root", TEXT)[0][0].offset
    assert offset % 4096 == 0


def test_the_least_recently_used_files_are_deleted_first(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=40_000)  # a file takes at most an eighth
    texts = [[number] * BLOCK for number in range(8)]
    for text in texts:
        put(store, "root", text)
    assert all(len(store.find("root", text)) == 1 for text in texts)
    assert read_right(store, "root", texts[0]) == 1
    store.put("root", texts[1], [])  # a hit in memory
    store.flush()
    for number in range(8, 11):
        put(store, "root", [number] * BLOCK)
        assert nbytes(tmp_path) <= 40_000
    assert [len(store.find("root", text)) for text in texts] == [1, 1, 0, 0, 0, 1, 1, 1]
    put(store, "root", [20] * 400)
    assert nbytes(tmp_path) <= 40_000
    found = len(store.find("root", [20] * 400))
    assert 20 < found < 100, "a path longer than the bound keeps its beginning"
    assert read_right(store, "root", [20] * 400) == found
    assert store.stats().dropped == (100 - found) * 700


def test_parents_are_used_at_least_as_recently_as_children(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=100_000)
    for end in range(1, 7):
        put(store, "root", TEXT[: end * BLOCK], first=end - 1)
    for _ in range(2):
        path = [block[0].file for block in store.find("root", TEXT)]
        times = [(tmp_path / file).stat().st_mtime_ns for file in path]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == 6
        now = time.time_ns()
        last = store.find("root", TEXT)[-1][0]  # its parents were in memory, say
        assert store.read([(last, [memoryview(bytearray(last.nbytes))])]) == 1
        store.flush()
    assert min((tmp_path / file).stat().st_mtime_ns for file in path) > now - 10**6


def test_files_of_other_processes_are_found_and_deletions_are_misses(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert second.find("root", TEXT) == []
    put(first, "root", TEXT)
    second.flush()
    assert read_right(second, "root", TEXT) == 6
    found = second.find("root", TEXT)
    for file in segments(tmp_path):
        file.unlink()
    assert second.read([(found[0][0], [memoryview(bytearray(700))])]) == 0
    second.flush()
    assert second.find("root", TEXT) == []
    assert second.stats().damaged == 0
    put(second, "root", TEXT)
    first.flush()
    assert read_right(first, "root", TEXT) == 6


def test_files_of_other_processes_are_found_without_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.prefix_store.writer._REFRESH_SECONDS", 0.05)
    first, second = opened(tmp_path), opened(tmp_path)
    put(first, "root", TEXT)
    deadline = time.monotonic() + 30
    while len(second.find("root", TEXT)) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_deleted_during_a_read_is_read_to_its_end(tmp_path: Path) -> None:
    class Deleting(FileSystem):
        def open(self, path: str) -> int:
            handle = super().open(path)
            if deletes:
                os.unlink(path)
            return handle

    deletes: list[bool] = []
    store = opened(tmp_path, system=Deleting())
    put(store, "root", TEXT)
    deletes.append(True)
    assert read_right(store, "root", TEXT) == 6
    assert not segments(tmp_path)


CHURN = """
import random, sys
from tests.prefix_store.texts import opened, put, read_right
store, rng = opened(sys.argv[1], max_bytes=60_000), random.Random(int(sys.argv[2]))
for _ in range(60):
    text = rng.choices(range(3), k=4) * 4
    put(store, "root", text)
    read_right(store, "root", text)
print(store.stats().damaged)
"""


def test_processes_may_write_and_delete_the_same_files_concurrently(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", CHURN, str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, text=True) for seed in range(3)
    ]
    most = 0
    while any(process.poll() is None for process in processes):
        if (tmp_path / "store").exists():
            with os.scandir(tmp_path / "store") as entries:
                most = max(most, sum(_size(entry) for entry in entries))
        time.sleep(0.005)
    assert [process.communicate()[0] for process in processes] == ["0\n"] * 3
    assert [process.returncode for process in processes] == [0] * 3
    # A process counts its new file before it writes it: until it has deleted others, the sum of sizes is larger.
    assert nbytes(tmp_path / "store") <= 60_000 < most + 60_000


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def test_leftovers_of_an_ended_process_are_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT[:BLOCK])
    (file,) = segments(tmp_path)
    old, new = (tmp_path / f".{file.stem}.{digit * 16}.partial" for digit in "01")
    for each in (old, new):
        each.write_bytes(b"part of a file")
        each.chmod(0o600)
    os.utime(old, (time.time() - 3600,) * 2)
    put(store, "root", TEXT)
    assert (old.exists(), new.exists()) == (False, True)


# ── the queue and the thread ──


class Slow(FileSystem):
    """A disk that waits before every write."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, handle: int, buffers: object) -> None:
        assert self.go.wait(30)
        super().write(handle, buffers)  # type: ignore[arg-type]


def test_a_full_queue_drops(tmp_path: Path) -> None:
    system = Slow()
    store = opened(tmp_path, system=system, queue_bytes=1500)
    texts = [[number] * BLOCK for number in range(4)]
    accepted = [store.put("root", text, parts("root", text, [0])) for text in texts]
    assert accepted == [True, True, False, False]
    assert store.stats().queued == 1400
    assert not store.flush(timeout=0.01)
    system.go.set()
    assert store.flush(30)
    assert (store.stats().queued, store.stats().dropped) == (0, 1400)
    assert [len(store.find("root", text)) for text in texts] == [1, 1, 0, 0]
    assert store.put("root", TEXT, parts("root", TEXT, range(6))), "one put may be larger than the queue"


def test_close_writes_the_queue_and_ends_the_thread(tmp_path: Path) -> None:
    store = opened(tmp_path)
    thread = store._writer._thread
    store.put("root", TEXT, parts("root", TEXT, range(6)))
    store.close()
    assert thread is not None
    assert not thread.is_alive()
    assert store.find("root", TEXT) == []
    assert not store.put("root", TEXT, parts("root", TEXT, range(6)))
    assert store.flush()
    assert read_right(opened(tmp_path), "root", TEXT) == 6


def test_the_thread_ends_with_the_store(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT)
    thread = store._writer._thread
    assert thread is not None
    del store
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_thread(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT[: 2 * BLOCK])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert read_right(store, "root", TEXT) == 2
            put(store, "root", TEXT)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.flush()
    assert read_right(store, "root", TEXT) == 6


# ── the checksum ──


@given(st.binary(min_size=1, max_size=20_000), st.data())
def test_any_changed_byte_changes_the_checksum(content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert checksum([memoryview(changed)]) != checksum([memoryview(content)])
    assert checksum([memoryview(content + b"\0")]) != checksum([memoryview(content)])


def test_swapped_pages_change_the_checksum() -> None:
    first, second, third = os.urandom(4096), os.urandom(4096), os.urandom(512)
    sums = {
        checksum([memoryview(b"".join(pages))])
        for pages in ((first, second, third), (second, first, third), (first, first, third), (first, third, second))
    }
    assert len(sums) == 4


def test_ids_are_little_endian() -> None:
    assert as_bytes([1, 258]) == b"\1\0\0\0\2\1\0\0"


def test_a_store_may_be_made_from_a_path(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, "key", max_bytes=10_000)
    assert store.find("", range(64)) == []
    store.close()
