"""Sliding layers that keep only their window, compared with layers that keep the whole text.

    python -m benchmarks.windows [--rounds 7]

Random bf16 weights in the shape of Gemma 3 1B (22 of 26 layers see 512 positions): single tokens after 512 and 4,000
tokens, a prompt of 4,000 tokens, and the number of texts that fit into a cache of 1 GB. The two alternate; ratios are
medians of the rounds' ratios. The last line is one JSON object.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from functools import partial

import torch

import onward
from benchmarks.checkpoints import GEMMA3_1B, random_checkpoint
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.cache import KVPool
from onward.decoding.shared_cache import engine_slots

NEW, LENGTHS = 24, (512, 4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    lm = onward.load(random_checkpoint("gemma3-1b", GEMMA3_1B))
    lms = {"window": lm, "whole": onward.LanguageModel(keeping_all(lm.model))}
    result: dict[str, object] = {"machine": description(), "texts_in_1_GB": texts(lms)}
    for length in LENGTHS:
        result[f"after_{length}"] = measured(lms, length, rounds)
    print(json.dumps(result))


def keeping_all(model: onward.Model) -> onward.Model:
    """The model with a cache whose layers all keep the whole text."""
    plan = model.new_blocks(1).plan.without_windows()
    return dataclasses.replace(model, new_blocks=partial(KVPool, plan))


def texts(lms: dict[str, onward.LanguageModel]) -> dict[str, dict[int, int]]:
    """The number of texts of a length that an engine serves at once with 1 GB."""
    slots = {name: engine_slots(lm.model, 4096, 10**9) for name, lm in lms.items()}
    return {
        name: {length: each.stats().total // each.cost(length) for length in (512, 1024, 4096, 8192, 32768)}
        for name, each in slots.items()
    }


def measured(lms: dict[str, onward.LanguageModel], length: int, rounds: int) -> dict[str, object]:
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in lms}
    buffer, bandwidths = bandwidth_buffer(), []
    for turn in range(rounds + 1):  # the first warms up
        ids = torch.randint(0, GEMMA3_1B["vocab_size"], (length,)).tolist()
        bandwidths.append(read_bandwidth(buffer) / 1e9)
        for name in sorted(lms, reverse=turn % 2 == 0):
            taken = prompt_and_token(lms[name], ids)
            if turn:
                seconds[name].append(taken)
    prompts, tokens = ({name: [taken[at] for taken in seconds[name]] for name in lms} for at in (0, 1))
    return {
        "read_GB_s": round(statistics.median(bandwidths), 1),
        "ms_a_token": {name: round(statistics.median(taken) * 1e3, 2) for name, taken in tokens.items()},
        "tokens_beside_whole": ratio(tokens),
        "prompt_ms": {name: round(statistics.median(taken) * 1e3) for name, taken in prompts.items()},
        "prompt_beside_whole": ratio(prompts),
    }


def ratio(seconds: dict[str, list[float]]) -> float:
    """The speed with windows divided by the speed without."""
    pairs = zip(seconds["whole"], seconds["window"], strict=True)
    return round(statistics.median(whole / window for whole, window in pairs), 3)


def prompt_and_token(lm: onward.LanguageModel, ids: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and the median of the later tokens without the first, which may create a program."""
    began = time.perf_counter()
    at = [time.perf_counter() for _ in lm.stream(ids, max_new_tokens=NEW, temperature=0, ignore_eos=True)]
    return at[0] - began, statistics.median(later - earlier for earlier, later in itertools.pairwise(at[2:]))


if __name__ == "__main__":
    main()
