"""The gain from reinforcement learning: examples/grpo.py over several seeds, compared with a threshold set in advance.

    python -m benchmarks.grpo [--seeds 0 1 2] [--steps 60] [--threads N] [--state FILE] [--picture FILE.svg]

Each seed trains a fresh copy of the demo model. Before and after, the model is measured on held-out prompts, always
with the same random numbers. It passes if the lower end of the 95 % interval of the mean gain (Student's t over the
seeds) is above THRESHOLD. --state: a file with the finished seeds, which a later run continues. --picture: the share of
correct texts in each step. The last line is one JSON object.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import onward
from benchmarks.machine import description

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo.py"
# The gain in the share of held-out texts with the right number of sentences; set before the first run over three seeds.
THRESHOLD = 0.2
# Student's t at 97.5 %, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    assert spec is not None, EXAMPLE
    assert spec.loader is not None, EXAMPLE
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(seed: int, steps: int) -> dict[str, Any]:
    grpo, lm, began = example(), onward.load("demo", trainable=True), time.perf_counter()
    before = grpo.accuracy(lm, grpo.HELD_OUT)
    shares = grpo.train(lm, steps, 1e-4, seed)
    after = grpo.accuracy(lm, grpo.HELD_OUT)
    return {"before": before, "after": after, "shares": shares, "seconds": round(time.perf_counter() - began)}


def interval(gains: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of two or more gains."""
    half = _T[len(gains) - 1] * statistics.stdev(gains) / len(gains) ** 0.5
    return statistics.mean(gains) - half, statistics.mean(gains) + half


def picture(runs: Sequence[Sequence[float]], smoothed: int = 5) -> str:
    """An SVG of the share of correct texts by step, with a line for each run: means over `smoothed` steps."""
    width, height, left, top = 640, 300, 48, 16
    steps = max(map(len, runs))

    def place(step: float, share: float) -> str:
        return f"{left + step / steps * (width - left - 16):.1f},{top + (1 - share) * (height - top - 40):.1f}"

    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ends = place(0, share), place(steps, share)
        y = ends[0].split(",")[1]
        lines.append(f'<polyline points="{" ".join(ends)}" stroke="#888" stroke-opacity="0.3" fill="none"/>')
        lines.append(f'<text x="{left - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{share:.0%}</text>')
    for step in range(0, steps + 1, 10):
        x = place(step, 0).split(",")[0]
        lines.append(f'<text x="{x}" y="{height - 22}" text-anchor="middle">{step}</text>')
    for run in runs:
        means = [statistics.mean(run[max(0, at + 1 - smoothed) : at + 1]) for at in range(len(run))]
        points = " ".join(place(at + 1, share) for at, share in enumerate(means))
        lines.append(f'<polyline points="{points}" stroke="#2a6fdb" stroke-width="2" fill="none" opacity="0.7"/>')
    lines.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">step</text>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#777">\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
        onward.set_num_threads(options.threads)
    runs: dict[str, Any] = {}
    if options.state is not None and options.state.exists():
        runs = json.loads(options.state.read_text())
    for seed in options.seeds:
        if str(seed) not in runs:
            runs[str(seed)] = trained(seed, options.steps)
            if options.state is not None:
                options.state.write_text(json.dumps(runs))
        own = runs[str(seed)]
        print(
            f"seed {seed}: {own['before']:.1%} right before, {own['after']:.1%} after, {own['seconds']} s", flush=True
        )
    chosen = [runs[str(seed)] for seed in options.seeds]
    if options.picture is not None:
        options.picture.write_text(picture([own["shares"] for own in chosen]))
    gains = [own["after"] - own["before"] for own in chosen]
    report: dict[str, Any] = {"machine": description(), "gains": gains, "threshold": THRESHOLD}
    if len(gains) > 1:
        low, high = interval(gains)
        report |= {"interval": [low, high], "passed": low > THRESHOLD}
        print(
            f"mean gain {statistics.mean(gains):.1%}, 95 % interval {low:.1%} to {high:.1%}; threshold {THRESHOLD:.0%}"
        )
    print(json.dumps(report))
    sys.exit(0 if report.get("passed", True) else 1)


if __name__ == "__main__":
    main()
