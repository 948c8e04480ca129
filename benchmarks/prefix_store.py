"""Measure the prefix cache on disk: writing, reading back, and opening its index.

python -m benchmarks.prefix_store                        blocks of a model with the shape of Qwen3-0.6B, 16,000 tokens
python -m benchmarks.prefix_store --tokens 4000 --cold   also reads after dropping the page cache (root only)
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onward.prefix_store import Part, PrefixStore
from onward.prefix_store.checksum import checksum

BLOCK = 64
# Qwen3-0.6B: 28 layers, keys and values of 8 heads of 128 features in 16 bits.
NBYTES = 28 * 2 * 8 * 128 * 2 * BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000, help="length of the prefix (default: 16,000)")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is printed (default: 5)")
    parser.add_argument("--entries", type=int, default=10_000, help="blocks of the index (default: 10,000)")
    parser.add_argument("--cold", action="store_true", help="also read after dropping the page cache (needs root)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = {
            **checksums(options.runs),
            **prefix(Path(folder, "prefix"), options.tokens // BLOCK, options.runs, options.cold),
            **index(Path(folder, "index"), options.entries, options.runs),
        }
    for name, value in figures.items():
        print(f"{name:<38} {value:>12,.4g}")
    print(json.dumps(figures))


def prefix(folder: Path, blocks: int, runs: int, cold: bool) -> dict[str, float]:
    """Write and read a prefix of `blocks` blocks."""
    ids = list(range(blocks * BLOCK))
    source = torch.randint(256, (NBYTES + blocks * 4096,), dtype=torch.uint8)
    views = [memoryview(source.numpy())[at * 4096 :][:NBYTES] for at in range(blocks)]
    total = blocks * NBYTES
    with_key = {"key": "benchmark", "max_bytes": 4 * total}
    store = PrefixStore(folder, **with_key)
    used = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    for first in range(0, blocks, 8):
        assert store.put("", ids, [Part(at, 0, [views[at]]) for at in range(first, min(first + 8, blocks))])
    put = time.perf_counter() - start
    store.flush()
    write_seconds, cpu = time.perf_counter() - start, cpu_since(used)
    store.close()

    start = time.perf_counter()
    store = PrefixStore(folder, **with_key)
    found = store.find("", ids)
    opened = time.perf_counter() - start
    assert len(found) == blocks, f"{len(found)} of {blocks} blocks were found"
    find = median(lambda: store.find("", ids), 5 * runs)
    miss = median(lambda: store.find("", [1, *ids]), 5 * runs)
    target = torch.empty(total, dtype=torch.uint8).numpy()

    def read() -> None:
        whole = memoryview(target)
        requests = [(block[0], [whole[at * NBYTES :][:NBYTES]]) for at, block in enumerate(found)]
        assert store.read(requests) == blocks

    first_touch = seconds(read)
    again = median(read, runs)
    assert all(bytes(target[at * NBYTES :][:NBYTES]) == bytes(views[at]) for at in (0, blocks // 2, blocks - 1))
    figures = {
        "prefix GB": total / 1e9,
        "put s": put,
        "write GB/s": total / write_seconds / 1e9,
        "write CPU s/GB": cpu / total * 1e9,
        "open, one prefix s": opened,
        "find s": find,
        "miss s": miss,
        "read into new memory s": first_touch,
        "read into new memory GB/s": total / first_touch / 1e9,
        "read s": again,
        "read GB/s": total / again / 1e9,
    }
    if cold:
        drop_page_cache()
        figures["cold read s"] = seconds(read)
        drop_page_cache()
        plain = sum(file.stat().st_size for file in folder.iterdir()) / seconds(lambda: read_files(folder))
        figures |= {"cold read GB/s": total / figures["cold read s"] / 1e9, "the disk's rate GB/s": plain / 1e9}
    store.close()
    return figures


def index(folder: Path, blocks: int, runs: int) -> dict[str, float]:
    """Open a folder of prefixes of 16,000 tokens, of small blocks, in files of 8 blocks."""
    content = [memoryview(os.urandom(4096))]
    store = PrefixStore(folder, "benchmark", max_bytes=2**40)
    per_path = 250
    for path in range(0, blocks, per_path):
        ids = [path, *range(1, per_path * BLOCK)]
        for first in range(0, min(per_path, blocks - path), 8):
            last = min(first + 8, per_path, blocks - path)
            store.put("", ids, [Part(at, 0, content) for at in range(first, last)])
            store.flush()
    store.close()
    files = len(os.listdir(folder))

    def open_index() -> None:
        store = PrefixStore(folder, "benchmark", max_bytes=2**40)
        store.find("", [])
        assert store.stats().parts == blocks
        store.close()

    return {"index: blocks": blocks, "index: files": files, "index: open s": median(open_index, runs)}


def checksums(runs: int) -> dict[str, float]:
    """The speed of a block's checksum, and of a memory copy."""
    import zlib

    source = bytearray(os.urandom(NBYTES))
    copy = bytearray(NBYTES)

    def copied() -> None:
        memoryview(copy)[:] = source

    names = {"checksum": lambda: checksum([memoryview(source)]), "zlib.crc32": lambda: zlib.crc32(source)}
    return {f"{name} GB/s": NBYTES / median(run, 4 * runs) / 1e9 for name, run in {**names, "copy": copied}.items()}


def read_files(folder: Path) -> None:
    buffer = memoryview(bytearray(16 * 2**20))
    for file in sorted(folder.iterdir()):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def cpu_since(before: resource.struct_rusage) -> float:
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(run: Callable[[], object], runs: int) -> float:
    return sorted(seconds(run) for _ in range(runs))[runs // 2]


if __name__ == "__main__":
    main()
