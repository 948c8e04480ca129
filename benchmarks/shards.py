"""A model in two processes compared with one process: tokens per second and memory.

    python -m benchmarks.shards [--large] [--quantize FORMAT] [--new TOKENS]

One process has all cores. Two ranks are measured with half of the cores each, and with all cores each. Rows decode
greedily, and the tokens are compared. --large: random weights in the shape of Qwen3-0.6B instead of the demo model. The
last line is one JSON object.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onward
from benchmarks.checkpoints import random_checkpoint
from benchmarks.machine import description

ROWS = (1, 2, 8, 16)
PROMPT = 384
ROUNDS = 3
PER_TOKEN = "tokens/s of {} rows"


def resident_mb(pid: int | str) -> dict[str, float]:
    """Megabytes of a process: private memory, and pages of mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        kind: round(int(re.search(rf"Rss{kind.title()}:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]
        for kind in ("anon", "file")
    }


def decode(lm: onward.LanguageModel, rows: int, new: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of `rows` rows, the best of some rounds, and the ids."""
    prompts = [[(7 * row + at) % 200 + 20 for at in range(16)] for row in range(rows)]
    speeds = []
    for _ in range(ROUNDS):
        completions = lm.generate(prompts, max_new_tokens=new, temperature=0.0, ignore_eos=True)
        speeds.append(1e3 * rows / statistics.median(completions[0].timing.per_token_ms))
    return max(speeds), [completion.token_ids for completion in completions]


def prefill(lm: onward.LanguageModel) -> float:
    """Prompt tokens per second, the best of some rounds."""
    lm.prefix_memory = 0
    prompt = [at % 200 + 20 for at in range(PROMPT)]
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        lm.generate(prompt, max_new_tokens=1)
        seconds.append(time.perf_counter() - began)
    return PROMPT / min(seconds)


def measure(source: str, ranks: int, quantize: str | None, new: int) -> dict[str, Any]:
    """Measure one way to run the model, in a separate process."""
    before = resident_mb("self")
    lm = onward.load(source, quantize=quantize, max_seq_len=512, pipeline=ranks)
    found: dict[str, Any] = {"resident MB": [{k: v - before[k] for k, v in resident_mb("self").items()}]}
    if ranks > 1:
        found["resident MB"] += [resident_mb(pid) for pid in lm.model.forward.group.processes.pids]  # type: ignore[attr-defined]
    found["ids"] = {}
    for rows in ROWS:
        found[PER_TOKEN.format(rows)], found["ids"][rows] = decode(lm, rows, new)
    found["prompt tokens/s"] = prefill(lm)
    return found


def apart(threads: int, *arguments: str) -> dict[str, Any]:
    """`measure` in a process whose kernels, and those of its ranks, use `threads` threads."""
    command = [sys.executable, "-m", "benchmarks.shards", "--way", *arguments]
    environment = os.environ | {"ONWARD_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--quantize")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        source, ranks, quantize, new = arguments.way
        print(json.dumps(measure(source, int(ranks), quantize or None, int(new))))
        return
    cores = len(os.sched_getaffinity(0))
    source = str(random_checkpoint()) if arguments.large else "demo"
    ways = {"one process": (cores, 1), "2 ranks, cores shared out": (cores // 2, 2), "2 ranks, all cores": (cores, 2)}
    found = {
        name: apart(threads, source, str(ranks), arguments.quantize or "", str(arguments.new))
        for name, (threads, ranks) in ways.items()
    }
    one = found["one process"]
    for name, way in found.items():
        assert way.pop("ids") == one["ids"] if way is not one else True, "ranks give the tokens of one process"
        print(f"\n{name}\n  resident MB by rank: {way['resident MB']}")
        for key in (*map(PER_TOKEN.format, ROWS), "prompt tokens/s"):
            print(f"  {key:22}{way[key]:10,.1f}{way[key] / one[key]:8.2f} of one process")
    one.pop("ids")
    print(json.dumps({"quantize": arguments.quantize, "large": arguments.large} | found | description()))


if __name__ == "__main__":
    main()
