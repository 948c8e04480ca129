"""One checkpoint as a built-in family and through transformers: the cost of transformers' forward with our kernels.

    python -m benchmarks.hosted [--precisions bf16 int8] [--rounds 5]

Random weights in the shape of Qwen3-0.6B; single tokens after fresh prompts of 32 tokens, in turns. The ratio is the
median of the rounds' ratios. The last line is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import time

import torch

import onward
from benchmarks.checkpoints import QWEN3_0_6B, random_checkpoint
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth

PROMPT, NEW = 32, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "int8", "int4"), default=["bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, object] = {"machine": description()}
    for precision in options.precisions:
        found = measured(None if precision == "bf16" else precision, options.rounds)
        result[precision] = found
        print(precision, found, flush=True)
    print(json.dumps(result))


def measured(quantize: str | None, rounds: int) -> dict[str, object]:
    folder = random_checkpoint()
    lms = {via: onward.load(folder, via=via, quantize=quantize) for via in ("onward", "transformers")}
    seconds: dict[str, list[float]] = {via: [] for via in lms}
    buffer, bandwidths = bandwidth_buffer(), []
    for turn in range(rounds + 1):  # the first warms up
        ids = torch.randint(0, QWEN3_0_6B["vocab_size"], (PROMPT,)).tolist()
        bandwidths.append(read_bandwidth(buffer) / 1e9)
        for via, lm in lms.items():
            taken = token_seconds(lm, ids)
            if turn:
                seconds[via].append(taken)
    ratios = [family / hosted for family, hosted in zip(seconds["onward"], seconds["transformers"], strict=True)]
    return {
        "read_GB_s": round(statistics.median(bandwidths), 1),
        "ms_a_token": {via: round(statistics.median(taken) * 1e3, 2) for via, taken in seconds.items()},
        "speed_beside_the_family": round(statistics.median(ratios), 3),
        "runs_as_a_program": lms["transformers"].model.compiles,
    }


def token_seconds(lm: onward.LanguageModel, ids: list[int]) -> float:
    """The median time of single tokens, without the first, which may create a program."""
    at = [time.perf_counter() for _ in lm.stream(ids, max_new_tokens=NEW, temperature=0, ignore_eos=True)]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(at[2:]))


if __name__ == "__main__":
    main()
