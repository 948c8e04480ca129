"""Two source trees of Onward compared: prefill, decode, and the time of a step without the kernels.

    python -m benchmarks.trees OLD [--old-native DIR] [--pairs 10] [--cases demo,bf16,int8] [--threads N]

OLD is a checkout. Its native libraries come from --old-native, or from OLD/src/onward/native/lib, or are those of this
tree. Each tree runs in a separate process that loads every case once; then the two alternate, and the order changes
from pair to pair. Ratios are old over new, pair by pair: above 1 the new tree is faster. Cases: `demo` is the bundled
model, which is nearly all overhead; `bf16`, `int8` and `int4` are random weights in the shape of Qwen3-0.6B. The last
line is one JSON object.

Figures: `prefill` is the time to the first token. `token` is the median time of each later token. `step` is the same
without the time inside `onward_program_run`, the call that runs a program's kernels: it measures Python, and operators
that run outside programs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT, NEW_TOKENS = 128, 48
FIGURES = ("prefill", "token", "step")
# The beginning of a worker's code. `import onward` must find its tree, not an editable install.
_PRELUDE = """
import json, os, sys, time
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
source, root, threads, *arguments = sys.argv[1:]
sys.path[:0] = [source, root]
import torch
torch.set_num_threads(int(threads))
import onward
assert onward.__file__.startswith(source), onward.__file__
"""
_CODE = """
cases, = arguments
from benchmarks.checkpoints import QWEN3_0_6B
from benchmarks.drawn import random_model

def model(case):
    if case == "demo":
        return onward.load("demo")
    return onward.LanguageModel(random_model(case, QWEN3_0_6B), prefix_memory=0)

models = {case: model(case) for case in cases.split(",")}
turn = 0

inside = 0.0  # the seconds inside onward_program_run
library = onward.native.library()
program_run = library.onward_program_run

def timed_run(*arguments):
    global inside
    began = time.perf_counter()
    status = program_run(*arguments)
    inside += time.perf_counter() - began
    return status

library.onward_program_run = timed_run

def seconds(lm, prompt, new):
    # The time to the first token, and the median time of each further one, with and without the kernels.
    began, times = time.perf_counter(), []
    for piece in lm.stream(prompt, max_new_tokens=new, temperature=0.0, ignore_eos=True):
        times.append((time.perf_counter(), inside))
    pairs = list(zip(times, times[1:]))
    tokens = sorted(after[0] - before[0] for before, after in pairs)
    steps = sorted(after[0] - after[1] - before[0] + before[1] for before, after in pairs)
    return times[0][0] - began, tokens[len(tokens) // 2], steps[len(steps) // 2]

print("ready", flush=True)
for line in sys.stdin:
    case, length, new = json.loads(line)
    turn += 1
    lm = models[case]
    prompt = [(turn * 7919 + at * 104729) % 250 for at in range(length)]
    print(json.dumps(seconds(lm, prompt, new)), flush=True)
"""


class Worker:
    """A tree in a process of its own. code: prints a line when it is ready, and then one for each line it reads.
    arguments: its `arguments`."""

    def __init__(self, code: str, source: Path, native: Path, threads: int, *arguments: str) -> None:
        environment = os.environ | {"ONWARD_NATIVE_DIR": str(native.resolve())}
        source = source.resolve()
        # Each tree with its own benchmarks: these import modules by the names that they have there.
        command = [sys.executable, "-c", _PRELUDE + code, str(source), str(source.parent), str(threads), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()

    def turn(self, *message: Any) -> Any:
        """The worker's answer to a message."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return line


def compare(workers: dict[str, Worker], case: str, pairs: int) -> dict[str, Any]:
    """Medians in ms and ratios of one case, after a pair that does not count."""
    turns: dict[str, list[list[float]]] = {name: [] for name in workers}
    for pair in range(pairs + 1):
        order = list(workers) if pair % 2 else list(reversed(workers))
        seconds = {name: workers[name].turn(case, PROMPT, NEW_TOKENS) for name in order}  # in the order of FIGURES
        if pair:
            for name, value in seconds.items():
                turns[name].append(value)
    report: dict[str, Any] = {"case": case}
    for index, figure in enumerate(FIGURES):
        old, new = ([turn[index] for turn in turns[name]] for name in ("old", "new"))
        ratios = sorted(before / after for before, after in zip(old, new, strict=True))
        report[figure] = {
            "old_ms": 1e3 * statistics.median(old),
            "new_ms": 1e3 * statistics.median(new),
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the old tree")
    parser.add_argument("--old-native", type=Path, help="the folder of its native libraries")
    parser.add_argument("--new-native", type=Path, help="the folder of this tree's native libraries")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--cases", default="demo,bf16,int8")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()

    from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
    from onward.native.loader import library_folder

    new_native = options.new_native or library_folder()
    built = options.old / "src/onward/native/lib"
    old_native = options.old_native or (built if built.is_dir() else new_native)
    sources = {"old": (options.old / "src", old_native), "new": (Path(__file__).parents[1] / "src", new_native)}
    workers = {
        name: Worker(_CODE, source, native, options.threads, options.cases)
        for name, (source, native) in sources.items()
    }
    bandwidth = read_bandwidth(bandwidth_buffer())
    print(f"{'case':8} {'figure':8} {'old ms':>9} {'new ms':>9} {'old/new':>8}   of {options.pairs} pairs")
    results = []
    for case in options.cases.split(","):
        results.append(compare(workers, case, options.pairs))
        for figure in FIGURES:
            row = results[-1][figure]
            low, high = row["ratios"][0], row["ratios"][-1]
            print(
                f"{case:8} {figure:8} {row['old_ms']:9.3f} {row['new_ms']:9.3f} {row['ratio']:8.3f}   {low} to {high}"
            )
    for worker in workers.values():
        worker.close()
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    print(json.dumps({"machine": description(), "bandwidth": bandwidth, "cases": results}))


if __name__ == "__main__":
    main()
