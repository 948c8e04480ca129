"""Long prompts that arrive while texts decode: the gaps between tokens, in this source tree and another one.

    python -m benchmarks.long_prompts [OLD] [--old-native DIR] [--case int8] [--rows 8] [--prompts 1] [--prompt 4000]
        [--new 384] [--steps default,60] [--rounds 3] [--threads N] [--cpu-time]

OLD is a checkout; its native libraries are those of this tree, or in --old-native. Each tree runs in a separate
process, with an engine for each setting of `max_step_ms` in --steps; all alternate, and the order changes from round to
round. In a round `--rows` texts decode; when one of them has 96 tokens, the prompts arrive. The first round of each
engine isn't counted: it creates programs, and touches the memory of the cache. Cases: `int8`, `int4` and `bf16` are
random weights in the shape of Qwen3-0.6B; `demo` is the bundled model.

Figures: `before` is the median gap between two tokens of a text before the prompts arrive. `p50`, `p99` and `max` are
gaps while prompts are processed, and `growth` is p99 over before. `first` is the mean time to the first token of the
prompts, and `alone` the same while nothing decodes. `tokens/s` counts all tokens of a round, those of prompts and new
ones. Figures are medians over all rounds; the last line is one JSON object.

--cpu-time measures the processor time of the engine's thread instead, also within the engine, for a busy machine; use
it with --threads 1.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks.trees import Worker

FIGURES = ("before", "p50", "p99", "max", "growth", "first", "alone", "tokens/s")
_CODE = """
import itertools, statistics, threading
case, rows, prompts, length, new, settings, cpu_time = arguments
rows, prompts, length, new, cpu_time = int(rows), int(prompts), int(length), int(new), cpu_time == "True"
onward.set_num_threads(int(threads))
PROMPT, AFTER = 128, 96

import onward.decoding.loop as loop
if cpu_time:
    class Clock:  # of the engine's thread
        perf_counter = staticmethod(time.thread_time)
    loop.time = Clock

if case == "demo":
    lm = onward.load("demo")
else:
    from benchmarks.checkpoints import QWEN3_0_6B
    from benchmarks.drawn import random_model
    lm = onward.LanguageModel(random_model(case, QWEN3_0_6B), prefix_memory=0)
    memory = (rows * (PROMPT + new + 64) + prompts * (length + 128)) * 114_688

engines, turn = {}, 0
for setting in settings.split(","):
    limit = None if setting == "default" else float(setting)
    memory_or_none = None if case == "demo" else memory
    engine = onward.Engine(lm, max_sequences=rows + prompts, cache_memory=memory_or_none, max_step_ms=limit)
    now = time.perf_counter
    if cpu_time:
        thread = [each.ident for each in threading.enumerate() if each.name == "onward-engine"][-1]
        clock = time.pthread_getcpuclockid(thread)
        now = lambda clock=clock: time.clock_gettime(clock)
    engines[setting] = engine, now

def prompt(count):
    global turn
    turn += 1
    return [(turn * 7919 + at * 104729) % 250 for at in range(count)]

def submit(engine, count, new):
    return engine.submit(prompt(count), max_new_tokens=new, temperature=0.0, ignore_eos=True)

def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]

def measure(engine, now):
    began = now()
    submit(engine, length, 1).result()
    alone = now() - began
    times, arrival, first = [[] for _ in range(rows)], [], []
    arrived = threading.Event()

    def read(generation, times, last):
        for _ in generation:
            times.append(now())
            if last and len(times) == AFTER:
                arrived.set()

    began = now()
    texts = [submit(engine, PROMPT, new) for _ in range(rows)]
    readers = [
        threading.Thread(target=read, args=(text, times[row], row == rows - 1)) for row, text in enumerate(texts)
    ]
    for reader in readers:
        reader.start()
    arrived.wait()
    arrival = now()

    def wait(generation):
        generation.result()
        first.append(now() - arrival)

    waiters = [threading.Thread(target=wait, args=(submit(engine, length, 1),)) for _ in range(prompts)]
    for thread in waiters:
        thread.start()
    for thread in waiters + readers:
        thread.join()
    seconds = now() - began
    end = arrival + max(first)
    begun = max(each[0] for each in times)
    before, during = [], []
    for each in times:
        for earlier, later in itertools.pairwise(each):
            if begun <= earlier and later <= arrival:
                before.append(1e3 * (later - earlier))
            elif arrival <= earlier and later <= end:
                during.append(1e3 * (later - earlier))
    before, p99 = statistics.median(before), quantile(during, 0.99)
    tokens = rows * (PROMPT + new) + prompts * (length + 1)
    growth, first = p99 / before, statistics.mean(first)
    return before, statistics.median(during), p99, max(during), growth, first, alone, tokens / seconds

print("ready", flush=True)
for line in sys.stdin:
    (setting,) = json.loads(line)
    print(json.dumps(measure(*engines[setting])), flush=True)
for engine, _ in engines.values():
    engine.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="a checkout of another tree")
    parser.add_argument("--old-native", type=Path, help="the folder of its native libraries")
    parser.add_argument("--case", default="int8", choices=("int8", "int4", "bf16", "demo"))
    parser.add_argument("--rows", type=int, default=8, help="texts that decode")
    parser.add_argument("--prompts", type=int, default=1, help="prompts that arrive together")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of each")
    parser.add_argument("--new", type=int, default=384, help="tokens of each text")
    parser.add_argument("--steps", default="default", help="settings of max_step_ms, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()

    from benchmarks.machine import description
    from onward.native.loader import library_folder

    native = library_folder()
    sources = {"new": (Path(__file__).parents[1] / "src", native)}
    if options.old is not None:
        sources["old"] = options.old / "src", options.old_native or native
    arguments = (options.case, options.rows, options.prompts, options.prompt, options.new, options.steps)
    workers = {
        tree: Worker(_CODE, source, libraries, options.threads, *map(str, arguments), str(options.cpu_time))
        for tree, (source, libraries) in sources.items()
    }
    ways = [(tree, setting) for tree in workers for setting in options.steps.split(",")]
    turns: dict[tuple[str, str], list[list[float]]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        at = number % len(ways)
        for tree, setting in [*ways[at:], *ways[:at]]:
            figures = workers[tree].turn(setting)
            if number:  # the first makes programs and touches memory
                turns[tree, setting].append(figures)
    print(f"{'':16}" + "".join(f"{name:>10}" for name in FIGURES) + f"   medians of {options.rounds} rounds")
    for (tree, setting), rounds in turns.items():
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{tree + ', ' + setting:16}" + "".join(f"{value:10.2f}" for value in medians))
    for worker in workers.values():
        worker.close()
    cases = {", ".join(way): rounds for way, rounds in turns.items()}
    print(json.dumps({"machine": description(), "figures": FIGURES, "rounds": cases}))


if __name__ == "__main__":
    main()
