"""Decoding of eight rows with eight adapters, compared with eight rows without, on the same weights in one run.

    python -m benchmarks.adapters [--precisions int8 bf16] [--rank N] [--rounds N]

Random weights and adapters in the shape of Qwen3-0.6B, made in memory; an adapter changes every matrix of every layer.
The two alternate in every round, after fresh prompts of 32 tokens, and the read bandwidth is measured between them.
Also measured: rows that all have the same adapter, and a prompt of 512 tokens with and without an adapter. Figures are
medians over all steps of all rounds; a ratio is the median of the rounds' ratios. The last line is one JSON object.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import onward
from benchmarks.checkpoints import QWEN3_0_6B, random_checkpoint
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.models import Linear
from onward.models.adapters import Adapter, Update
from onward.models.adapters.merge import adaptable, part_names
from onward.models.linear import is_marked
from onward.ops.linear import weight_shape

ROWS, PROMPT, LONG, NEW_TOKENS = 8, 32, 512, 32


def random_adapter(lm: onward.LanguageModel, rank: int, seed: int) -> Adapter:
    """An adapter for every linear layer except the head."""
    draws = torch.Generator().manual_seed(seed)
    updates = {}
    parts = pytree.tree_leaves(lm.model.params, is_leaf=is_marked)
    for name, part in zip(part_names(adaptable(lm.model)), parts, strict=True):
        if isinstance(part, Linear) and name is not None and name != "lm_head":
            outputs, inputs = weight_shape(part.weight)
            a = torch.randn(rank, inputs, generator=draws) * inputs**-0.5
            updates[name] = Update(a, torch.randn(outputs, rank, generator=draws) * 0.01)
    return Adapter(updates)


def step_ms(lm: onward.LanguageModel, prompts: list[list[int]], names: list[str | None]) -> list[float]:
    """The milliseconds of each step of all rows together."""
    own: Any = [{"adapter": name} for name in names]
    made = lm.generate(prompts, per_prompt=own, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    return made[0].timing.per_token_ms


def prefill_ms(lm: onward.LanguageModel, prompt: list[int], name: str | None) -> float:
    return lm.generate(prompt, adapter=name, max_new_tokens=1, temperature=0).timing.prefill_ms


def measure(lm: onward.LanguageModel, rounds: int) -> dict[str, Any]:
    none: list[str | None] = [None] * ROWS
    own: list[str | None] = list(lm.adapters)
    contestants = {"without": none, "eight adapters": own, "one adapter": [own[0]] * ROWS}
    steps: dict[str, list[float]] = {name: [] for name in contestants}
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    prefills: dict[str, list[float]] = {"without": [], "with": []}
    buffer, bandwidth = bandwidth_buffer(), []
    draws = torch.Generator().manual_seed(1)
    for turn in range(rounds + 1):
        prompts = torch.randint(0, QWEN3_0_6B["vocab_size"], (ROWS, PROMPT), generator=draws).tolist()
        long = torch.randint(0, QWEN3_0_6B["vocab_size"], (2, LONG), generator=draws).tolist()
        of_round = {}
        for name, names in contestants.items():
            bandwidth.append(read_bandwidth(buffer))
            of_round[name] = step_ms(lm, prompts, names)
        seconds = prefill_ms(lm, long[0], None), prefill_ms(lm, long[1], own[0])
        if not turn:  # programs are made
            continue
        for name, each in of_round.items():
            steps[name] += each
            ratios[name].append(statistics.median(each) / statistics.median(of_round["without"]))
        for name, taken in zip(prefills, seconds, strict=True):
            prefills[name].append(taken)
    return {
        "read_bandwidth_gb_s": round(statistics.median(bandwidth) / 1e9, 1),
        "step_ms": {name: round(statistics.median(each), 2) for name, each in steps.items()},
        "ratio": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "prefill_512_ms": {name: round(statistics.median(each), 1) for name, each in prefills.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["int8", "bf16"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": description(), "rank": arguments.rank}
    folder = random_checkpoint("qwen3-0.6b")
    for precision in arguments.precisions:
        lm = onward.load(folder, quantize=None if precision == "bf16" else precision)
        for index in range(ROWS):
            lm.adapters.load(f"of row {index}", random_adapter(lm, arguments.rank, index), Path())
        row = measure(lm, arguments.rounds)
        result[precision] = row
        print(precision, row, flush=True)
        del lm
    print(json.dumps(result))


if __name__ == "__main__":
    main()
