"""A draft model in an engine, for one request and for eight at once, in this source tree and another one.

    python -m benchmarks.drafts OLD [--old-native DIR] [--pairs 10] [--threads N] [--new 96] [--cpu-time]

OLD is a checkout; its native libraries are those of this tree, or in --old-native. Each tree runs in a separate
process; the two alternate, and the order changes from pair to pair. Ratios are old over new, pair by pair: above 1 the
new tree is faster.

The target has 8 layers of Qwen3-0.6B's shape, random in int8, and 8,192 ids; the draft model is its first layer. The
outputs of the other layers are scaled by 0.05, so that the two models agree on three quarters of the tokens. Requests
sample at temperature 0.8. Figures are ms per token over all requests, without a draft, with drafts of 4 tokens, and
with drafts of adaptive length. --cpu-time measures the processor time of the process, for a busy machine.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks.trees import Worker

_CODE = """
new, clock = arguments
onward.set_num_threads(int(threads))
from benchmarks import drawn
from benchmarks.checkpoints import QWEN3_0_6B
from onward.decoding.speculation import ModelDrafter, Speculator

class Noise(drawn._Noise):
    def take(self, name, shape, dtype=None):
        drawn_here = super().take(name, shape, dtype)
        parts = name.split(".")
        later = "layers" in parts and int(parts[parts.index("layers") + 1]) > 0
        return drawn_here * 0.05 if later and parts[-2] in ("o_proj", "down_proj") else drawn_here

drawn._Noise, config = Noise, QWEN3_0_6B | {"vocab_size": 8192, "num_hidden_layers": 8}
lm = onward.LanguageModel(drawn.random_model("int8", config), prefix_memory=0)
drafter = ModelDrafter(drawn.random_model("int8", config | {"num_hidden_layers": 1}))
drafts = {"plain": None, "drafts of 4": Speculator(drafter, length=4), "adaptive": Speculator(drafter)}
engine = onward.Engine(lm, max_sequences=8)
turn = 0

def measure(rows, draft):
    # Milliseconds per token of all requests, and the accepted share of the drafted ids.
    prompts = [[(turn * 7919 + row * 31 + at * 104729) % 8000 for at in range(32)] for row in range(rows)]
    options = {"max_new_tokens": int(new), "temperature": 0.8, "ignore_eos": True, "draft": draft}
    now = getattr(time, clock)
    began = now()
    generations = [engine.submit(prompt, seed=row, **options) for row, prompt in enumerate(prompts)]
    counts = [generation.result().speculation for generation in generations]
    milliseconds = 1e3 * (now() - began) / (rows * int(new))
    drafted = 0 if draft is None else sum(each.drafted for each in counts)
    return milliseconds, sum(each.accepted for each in counts) / drafted if drafted else 0.0

print("ready", flush=True)
for _ in sys.stdin:
    turn += 1
    result = {f"{rows} rows, {name}": measure(rows, draft) for rows in (1, 8) for name, draft in drafts.items()}
    print(json.dumps(result), flush=True)
engine.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the old tree")
    parser.add_argument("--old-native", type=Path, help="the folder of its native libraries")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new", type=int, default=96, help="tokens of each request")
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time; give --threads 1")
    options = parser.parse_args()
    clock = "process_time" if options.cpu_time else "perf_counter"

    from benchmarks.machine import description
    from onward.native.loader import library_folder

    native = library_folder()
    sources = {
        "old": (options.old / "src", options.old_native or native),
        "new": (Path(__file__).parents[1] / "src", native),
    }
    workers = {
        name: Worker(_CODE, source, libraries, options.threads, str(options.new), clock)
        for name, (source, libraries) in sources.items()
    }
    turns: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in workers}
    for pair in range(options.pairs + 2):
        for name in list(workers) if pair % 2 else list(reversed(workers)):
            result = workers[name].turn()
            if pair > 1:  # the first two make the programs
                turns[name].append(result)
    report = {}
    print(f"{'case':24} {'old ms':>9} {'new ms':>9} {'old/new':>8} {'accepted':>9}   of {options.pairs} pairs")
    for case in turns["new"][0]:
        old, new = ([turn[case][0] for turn in turns[name]] for name in ("old", "new"))
        ratios = sorted(before / after for before, after in zip(old, new, strict=True))
        accepted = statistics.median(turn[case][1] for turn in turns["new"])
        figures = [statistics.median(old), statistics.median(new), statistics.median(ratios), accepted]
        report[case] = [round(figure, 3) for figure in figures] + [round(ratio, 3) for ratio in ratios]
        row = f"{case:24} {figures[0]:9.3f} {figures[1]:9.3f} {figures[2]:8.3f} {accepted:9.0%}"
        print(f"{row}   {ratios[0]:.3f} to {ratios[-1]:.3f}", flush=True)
    for worker in workers.values():
        worker.close()
    print(json.dumps({"machine": description(), "cases": report}))


if __name__ == "__main__":
    main()
