"""Decode and prefill, compared with transformers on the same weights in one run.

    python -m benchmarks.decode [--shape NAME] [--rounds N] [--threads N] [--skip-start]

Random bf16 weights in the shape of Qwen3-0.6B or Gemma 3 1B; batch 1; greedy; a fresh prompt each time. The two
alternate in every round, and the read bandwidth of the machine is measured between them, so that a busy machine slows
all three alike. Medians over all rounds. The last line is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import onward
from benchmarks.checkpoints import SHAPES, random_checkpoint, weight_bytes_per_token
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.checkpoint import find_folder

PROMPTS = (32, 512)
NEW_TOKENS = 24


@dataclass
class Samples:
    """Times of one contestant in seconds, by prompt length."""

    prefill: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in PROMPTS})
    token: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in PROMPTS})


# A contestant decodes NEW_TOKENS after a prompt and returns the seconds to the first token and of each further one.
Contestant = Callable[[list[int]], tuple[float, list[float]]]


class _Clock(BaseStreamer):
    """Records the time at which `generate` returns each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def onward_contestant(lm: onward.LanguageModel) -> Contestant:
    def run(prompt: list[int]) -> tuple[float, list[float]]:
        began = time.perf_counter()
        times = []
        for _ in lm.stream(prompt, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True):
            times.append(time.perf_counter())
        return times[0] - began, [after - before for before, after in itertools.pairwise(times)]

    return run


def transformers_contestant(model: Any) -> Contestant:
    def run(prompt: list[int]) -> tuple[float, list[float]]:
        clock = _Clock()
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            streamer=clock,
            eos_token_id=None,
            pad_token_id=0,
        )
        times = clock.times[1:]  # the first call hands out the prompt
        return times[0] - began, [after - before for before, after in itertools.pairwise(times)]

    return run


def measure(contestants: dict[str, Contestant], rounds: int, vocab_size: int) -> tuple[dict[str, Samples], list[float]]:
    """Samples of every contestant and of the read bandwidth, taken in turns."""
    samples = {name: Samples() for name in contestants}
    buffer, bandwidth = bandwidth_buffer(), []
    generator = torch.Generator().manual_seed(1)
    for turn in range(rounds + 1):
        for length in PROMPTS:
            prompt = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
            for name, run in contestants.items():
                first, rest = run(prompt)
                if turn:  # the first round warms up
                    samples[name].prefill[length].append(first)
                    samples[name].token[length].extend(rest)
            bandwidth.append(read_bandwidth(buffer))
    return samples, bandwidth


def seconds_to_load(folder: str) -> dict[str, float]:
    """The time to load with a warm page cache: medians of three fresh processes each."""
    code = {
        "onward": "import time, onward; t = time.perf_counter(); onward.load({0!r}); print(time.perf_counter() - t)",
        "transformers": "import time, torch, transformers; transformers.logging.disable_progress_bar(); "
        "t = time.perf_counter(); transformers.AutoModelForCausalLM.from_pretrained({0!r}, dtype=torch.bfloat16); "
        "print(time.perf_counter() - t)",
    }
    return {name: _median_output(text.format(folder)) for name, text in code.items()}


def seconds_to_first_token() -> dict[str, float]:
    """From process start to the demo model's first token on standard output, median of three."""
    demo = str(find_folder("demo"))
    by_onward = [str(Path(sys.executable).parent / "onward"), "generate", "Once upon a time", "-n", "1"]
    code = (
        f"import transformers as t; n = {demo!r}; k = t.AutoTokenizer.from_pretrained(n); "
        "m = t.AutoModelForCausalLM.from_pretrained(n); "
        "print(k.decode(m.generate(**k('Once upon a time', return_tensors='pt'), max_new_tokens=1)[0]))"
    )
    by_transformers = [sys.executable, "-c", code]
    return {"onward": _median_wall(by_onward), "transformers": _median_wall(by_transformers)}


def _median_output(code: str) -> float:
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def _median_wall(command: list[str]) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert subprocess.run(command, capture_output=True, check=True).stdout, "no token came out"
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def report(
    shape: str, samples: dict[str, Samples], bandwidth: list[float], extra: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Print the table; returns the contents of the JSON line."""
    limit = statistics.median(bandwidth)
    per_token = weight_bytes_per_token(SHAPES[shape])
    result: dict[str, Any] = {"machine": description(), "shape": shape, "read_bandwidth_gb_s": round(limit / 1e9, 1)}
    result["weight_bytes_per_token"] = per_token
    print(f"read bandwidth {limit / 1e9:.1f} GB/s; {per_token / 1e9:.3f} GB of weights a token")
    print(f"so at most {limit / per_token:.1f} tokens/s\n")
    print(f"{'':28}{'onward':>12}{'transformers':>14}{'ratio':>8}{'of limit':>10}")
    for length in PROMPTS:
        rates = {name: 1 / statistics.median(s.token[length]) for name, s in samples.items()}
        fraction = rates["onward"] * per_token / limit
        result[f"decode_after_{length}"] = _row(f"decode after {length}, tokens/s", rates, fraction)
    for length in PROMPTS:
        rates = {name: length / statistics.median(s.prefill[length]) for name, s in samples.items()}
        result[f"prefill_{length}"] = _row(f"prefill of {length}, tokens/s", rates)
    for name, seconds in extra.items():
        result[name] = _row(f"{name.replace('_', ' ')}, s", seconds)
    return result


def _row(label: str, values: dict[str, float], fraction: float | None = None) -> dict[str, float]:
    ours, theirs = values["onward"], values["transformers"]
    share = "" if fraction is None else f"{fraction:>9.0%}"
    print(f"{label:28}{ours:>12.2f}{theirs:>14.2f}{ours / theirs:>8.2f} {share}")
    row = {**values, "ratio": ours / theirs} | ({} if fraction is None else {"fraction_of_bandwidth": fraction})
    return {name: round(value, 3) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--skip-start", action="store_true", help="do not time loading and process start")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    shape = SHAPES[arguments.shape]
    folder = str(random_checkpoint(arguments.shape, shape))
    extra = {} if arguments.skip_start else {"load": seconds_to_load(folder), "first_token": seconds_to_first_token()}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    contestants = {
        "onward": onward_contestant(onward.load(folder)),
        "transformers": transformers_contestant(theirs),
    }
    samples, bandwidth = measure(contestants, arguments.rounds, shape["vocab_size"])
    print(json.dumps(report(arguments.shape, samples, bandwidth, extra)))


if __name__ == "__main__":
    main()
