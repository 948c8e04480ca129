"""The prefix cache on disk: the time to the first token after a restart, and the cost of writing in the background.

    python -m benchmarks.prefix_restart [--positions 4000 16000] [--rounds 6] [--quantize FORMAT] [--threads N]

Random weights in the shape of Qwen3-0.6B. For each length one process computes a prompt, writes it and kills itself
(SIGKILL); another one loads the model and generates a token of the same prompt. The page cache is warm. The time of the
first token is divided into reading, forwards and the rest, next to the machine's rates in the same process: a copy
within memory, and a warm file that two threads read into new memory without a checksum. Then two models in one process
take turns, with and without the disk: each computes a new prompt of 1,000 tokens and decodes, while the prompt is
written. The first of a round changes from round to round. The last line is one JSON object.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import onward
from benchmarks.checkpoints import random_checkpoint
from benchmarks.machine import description
from onward.cache.disk import Restoration
from onward.cache.plan import as_bytes, lazy_zeros
from onward.models import Run

CPU = torch.device("cpu")
NEW, SKIPPED, PROMPT = 96, 2, 1000


def prompt_of(positions: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 150_000, (positions,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(positions: int, folder: str | None, arguments: argparse.Namespace) -> onward.LanguageModel:
    return onward.load(
        random_checkpoint(), quantize=arguments.quantize, max_seq_len=positions + 1024, prefix_cache_dir=folder
    )


def child(positions: int, folder: str, arguments: argparse.Namespace) -> None:
    """Print the seconds of loading and of the first token, and the number of cached positions; write, and be killed."""
    began = time.perf_counter()
    lm = load(positions, folder, arguments)
    loaded = time.perf_counter() - began
    lm.generate([1, 2, 3], max_new_tokens=2, temperature=0)  # traces a decoding step
    prompt = prompt_of(positions)
    spent = {"read_s": timed(Restoration, "read"), "forwards_s": timed(Run, "step")}
    began = time.perf_counter()
    completion = lm.generate(prompt, max_new_tokens=1, temperature=0)
    first = time.perf_counter() - began
    parts = {name: sum(seconds) for name, seconds in spent.items()}
    slots = lm._prefix_cache._shared.slots  # type: ignore[union-attr]
    began = time.perf_counter()
    while slots.disk is None:  # the weights are being hashed
        time.sleep(0.05)
        lm.generate([1, 2, 3], max_new_tokens=2, temperature=0)
    assert slots.disk.flush(600)
    row = {"load_s": loaded, "first_s": first, "cached": completion.cached_tokens, "token": completion.token_ids[0]}
    print(json.dumps(row | parts | {"flush_s": time.perf_counter() - began} | rates(Path(folder))), flush=True)
    os.kill(os.getpid(), 9)


def timed(owner: type, name: str) -> list[float]:
    """The seconds of each call of a method from now on."""
    seconds, method = list[float](), getattr(owner, name)

    def call(*args: object, **kwargs: object) -> object:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, call)
    return seconds


def rates(folder: Path, nbytes: int = 256 << 20) -> dict[str, float]:
    """GB/s of a copy in memory, and of two threads that read a file of the page cache into new pages of 2 MB."""
    source = torch.full((nbytes,), 7, dtype=torch.uint8).numpy()
    target, file = source.copy(), folder / "rates"
    file.write_bytes(source.data)
    figures = {"copy_GB/s": (lambda _: target.__setitem__(slice(None), source), lambda: None)}

    def read(new: memoryview) -> None:
        with file.open("rb") as stream, ThreadPoolExecutor(2) as pool:
            half = nbytes // 2
            list(pool.map(lambda at: os.preadv(stream.fileno(), [new[at : at + half]], at), (0, half)))

    figures["read_GB/s"] = (read, lambda: as_bytes(lazy_zeros((nbytes,), torch.uint8, CPU, huge_pages=True)))
    best = {}
    for name, (run, prepare) in figures.items():
        times = []
        for _ in range(5):
            memory = prepare()
            began = time.perf_counter()
            run(memory)
            times.append(time.perf_counter() - began)
        best[name] = nbytes / min(times) / 1e9
    file.unlink()
    return best


def restarted(positions: int, folder: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.prefix_restart", "--child", str(positions), "--folder", folder]
    command += [] if arguments.quantize is None else ["--quantize", arguments.quantize]
    command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    rows = []
    for _ in range(3):
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        rows.append(json.loads(output.splitlines()[-1]))
    assert len({row["token"] for row in rows}) == 1, "a hit gives the token of a miss"
    return rows


def decoding(folder: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per token without and with the disk, and the median of the rounds' ratios."""
    lms = [load(PROMPT, place, arguments) for place in (None, folder)]
    seconds: list[list[float]] = [[], []]
    for lm in lms:
        lm.generate(prompt_of(PROMPT, 1), max_new_tokens=4, temperature=0)
    slots = lms[1]._prefix_cache._shared.slots  # type: ignore[union-attr]
    while slots.disk is None:
        time.sleep(0.05)
        lms[1].generate([1, 2, 3], max_new_tokens=2, temperature=0)
    blocks_before = slots.disk.counts.written
    for number in range(arguments.rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            prompt = prompt_of(PROMPT, 10 + number)
            times = [time.perf_counter() for _ in lms[at].stream(prompt, max_new_tokens=NEW, temperature=0)]
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            seconds[at].append(sum(gaps[SKIPPED:]) / len(gaps[SKIPPED:]))
            if at:
                written_while_decoding = slots.disk.counts.written - blocks_before
                slots.disk.flush(600)
                blocks_before = slots.disk.counts.written
    without, with_disk = (1e3 * statistics.median(each) for each in seconds)
    ratios = [disk / none for none, disk in zip(*seconds, strict=True)]
    store, ids = slots.disk.current.store, prompt_of(4000, 99)
    began = time.perf_counter()
    for _ in range(100):
        store.find("", ids)
    return {
        "without_ms": without,
        "with_ms": with_disk,
        "ratio": statistics.median(ratios),
        "blocks_written_in_last_round": written_while_decoding,
        "miss_us": 1e4 * (time.perf_counter() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quantize")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        onward.set_num_threads(arguments.threads)
    if arguments.child is not None:
        child(arguments.child, arguments.folder, arguments)
    print(description())
    random_checkpoint()
    time.sleep(3)  # the hash of files that have just changed is not remembered
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for positions in arguments.positions:
            computed, *hits = restarted(positions, f"{folder}/{positions}", arguments)
            hit = min(hits, key=lambda row: row["first_s"])
            print(
                f"{positions:>6} positions: computed in {computed['first_s']:.2f} s, read in {hit['first_s']:.3f} s "
                f"({hit['cached']} cached; loaded in {hit['load_s']:.1f} s; written in {computed['flush_s']:.1f} s)"
            )
            rest = hit["first_s"] - hit["read_s"] - hit["forwards_s"]
            print(
                f"       reading {hit['read_s']:.3f} s, forwards {hit['forwards_s']:.3f} s, others {rest:.3f} "
                f"s; the machine copies {hit['copy_GB/s']:.1f} GB/s, reads files at {hit['read_GB/s']:.1f} GB/s"
            )
            results[str(positions)] = {"computed": computed, "hits": hits}
        results["decoding"] = row = decoding(f"{folder}/decoding", arguments)
    print(
        f"decoding: {row['without_ms']:.1f} ms without, {row['with_ms']:.1f} ms while it writes "
        f"({row['ratio']:.3f}x); a miss costs {row['miss_us']:.0f} us"
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
