"""Whenever the power fails or the process is killed, the files found afterwards are correct."""

import functools
import operator
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.prefix_store.simulated_disk import SimulatedDisk, after_power_loss
from tests.prefix_store.texts import BLOCK, TEXT, content, opened, put, read_right

from onward.prefix_store.segment import key_of, read_header, read_part

OTHER = [*TEXT[: 2 * BLOCK], *range(7, 15)]  # shares two blocks


def disk_after_writes(*, syncs: bool = True, max_bytes: int = 2**30) -> tuple[SimulatedDisk, list[tuple[int, int]]]:
    """A disk to which a store has written six times, and how many calls each `flush` had made."""
    disk, flushes = SimulatedDisk(syncs=syncs), []
    store = opened("/simulated", system=disk, max_bytes=max_bytes)
    for number, (ids, first, kinds) in enumerate(
        [
            (TEXT[: 2 * BLOCK + 1], 0, (0,)), (TEXT[: 2 * BLOCK + 2], 2, (0,)), (TEXT, 2, (0, 2)), (OTHER, 2, (0,)),
            (OTHER, 3, (0, 1)), ([*OTHER, 7], 4, (0,)),
        ],
        1,
    ):  # fmt: skip
        put(store, "root", ids, kinds, first)
        flushes.append((len(disk.log), number))
    store.close()
    return disk, flushes


def is_whole(name: str, content: bytes) -> bool:
    disk = SimulatedDisk({name: content})
    segment = read_header(disk, "", name)
    if segment is None:
        return False
    handle = disk.open(name)
    return all(
        read_part(disk, handle, entry.part, [memoryview(bytearray(entry.part.nbytes))]) for entry in segment.entries
    )


def blocks_found(files: frozenset[tuple[str, bytes]]) -> tuple[int, int, int]:
    """The contents of a new store on these files: blocks of two texts, and ids of the third block of one. It fails if
    anything is wrong."""
    store = opened("/simulated", system=SimulatedDisk(dict(files)))
    try:
        blocks = read_right(store, "root", TEXT), read_right(store, "root", OTHER)
        assert read_right(store, "other root", TEXT) == 0
        end, last = store.find_end("root", TEXT[: 2 * BLOCK + 3])
        if last:
            target = bytearray(last[0].nbytes)
            if store.read([(last[0], [memoryview(target)])]):
                assert target in [content("root", TEXT[: 2 * BLOCK + more], 2, 0) for more in (1, 2, 4)]
        return *blocks, end
    finally:
        store.close()


@pytest.mark.parametrize("max_bytes", [2**30, 12_000], ids=["all fit", "some are evicted"])
def test_after_a_power_loss_every_file_is_whole_or_missing(max_bytes: int) -> None:
    disk, flushes = disk_after_writes(max_bytes=max_bytes)
    durable = [(0, 0, 0), (2, 2, 9), (2, 2, 10), (6, 2, 11), (6, 4, 11), (6, 4, 11), (6, 4, 11)]
    states = 0
    rng = random.Random(0)
    whole, found_in = functools.cache(is_whole), functools.cache(blocks_found)  # many calls leave the same states
    for calls in range(len(disk.log) + 1):
        for files in after_power_loss(disk.log[:calls], rng, samples=4):
            states += 1
            assert all(whole(name, content) for name, content in files.items() if key_of(name)), f"after {calls} calls"
            found = found_in(frozenset(files.items()))
            if max_bytes > 2**20:  # flushed blocks are found
                flushed = max((number for count, number in flushes if count <= calls), default=0)
                assert all(map(operator.ge, found, durable[flushed])), f"after {calls} calls"
    assert states > 500


def test_a_disk_that_ignores_syncs_loses_blocks_but_gives_no_wrong_ones() -> None:
    disk, _ = disk_after_writes(syncs=False)
    rng, broken = random.Random(1), 0
    whole, found_in = functools.cache(is_whole), functools.cache(blocks_found)
    for calls in range(len(disk.log) + 1):
        for files in after_power_loss(disk.log[:calls], rng, samples=4):
            broken += any(not whole(name, content) for name, content in files.items() if key_of(name))
            found_in(frozenset(files.items()))
    assert broken > 100  # so the test above would notice a missing sync


WRITER = """
import itertools, sys
from tests.prefix_store.texts import BLOCK, opened, parts
store = opened(sys.argv[1], max_bytes=200_000)
for number in itertools.count(int(sys.argv[2])):
    ids = [*range(8), *[number] * 8]
    store.put("root", ids, parts("root", ids, range(4), (0, 1)))
    if number % 4 == 0:
        store.flush()
    print(number, flush=True)
"""


def test_blocks_found_after_kill_are_correct(tmp_path: Path) -> None:
    folder, rng, number, found = tmp_path / "store", random.Random(), 0, 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(number)], stdout=subprocess.PIPE, env=environment, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        last = number
        for line in process.stdout.read().splitlines():
            last = int(line)
        process.wait()
        process.stdout.close()
        store = opened(folder)
        for each in range(last + 2):
            found += read_right(store, "root", [*range(8), *[each] * 8])
        assert store.stats().damaged == 0
        store.close()
        number = last + 1
    assert found > 8
