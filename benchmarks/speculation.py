"""Decoding with drafts compared with plain decoding, in one run.

    python -m benchmarks.speculation [--rounds N] [--threads N]

Random weights in the shape of Qwen3-0.6B, int8, batch 1, fresh prompts; and the demo model with its draft. Requests
with and without drafts alternate; figures are medians over the rounds. A greedy text of a random model repeats a single
id, and changes to another one now and then: it stands for repetitive text, and the share of accepted drafts is
reported. A text sampled at temperature 1 is unpredictable. The last line is one JSON object.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import onward
from benchmarks.checkpoints import QWEN3_0_6B, random_checkpoint
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.decoding.speculation import DraftRow, DraftTarget, PromptLookup, Speculator, SuffixLookup

REPETITIVE = {"max_new_tokens": 256, "temperature": 0.0, "ignore_eos": True}
UNPREDICTABLE = {"max_new_tokens": 256, "temperature": 1.0, "ignore_eos": True}
STORIES = {"max_new_tokens": 200, "ignore_eos": True}


class Wrong:
    """A drafter whose ids are all wrong: always the same one of 152,000."""

    def start(self, target: DraftTarget) -> "Wrong":
        return self

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [[17] * row.limit for row in rows]


def compare(
    lm: onward.LanguageModel,
    prompts: Callable[[], list[int] | str],
    options: dict[str, Any],
    speculators: dict[str, Speculator],
    rounds: int,
) -> dict[str, dict[str, float]]:
    """Milliseconds per token after the first, for plain decoding and each speculator; and the counts of drafts."""
    contestants: dict[str, Speculator | None] = {"plain": None, **speculators}
    token_ms: dict[str, list[float]] = {name: [] for name in contestants}
    counts: dict[str, list[Any]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        prompt = prompts()
        texts = []
        for name, speculator in contestants.items():
            completion = lm.generate(prompt, draft=speculator, seed=turn, **options)
            assert isinstance(completion, onward.Completion)
            texts.append(completion.token_ids)
            if turn:  # the first makes the programs
                token_ms[name].append(statistics.fmean(completion.timing.per_token_ms))
                counts[name].append(completion.speculation)
        assert all(text == texts[0] for text in texts), "a drafted text is the plain one"
    result = {}
    for name in contestants:
        row = {"ms_per_token": statistics.median(token_ms[name])}
        row["speedup"] = statistics.median(a / b for a, b in zip(token_ms["plain"], token_ms[name], strict=True))
        if name != "plain":
            drafted, accepted = (sum(getattr(c, field) for c in counts[name]) for field in ("drafted", "accepted"))
            turns = sum(c.rounds for c in counts[name])
            row |= {
                "acceptance": accepted / drafted if drafted else 0.0,
                "tokens_per_round": (accepted + turns) / turns if turns else 0.0,
                "part_in_rounds": (accepted + turns) / (rounds * options["max_new_tokens"]),
            }
        result[name] = {key: round(value, 4) for key, value in row.items()}
    return result


def rejected_round(lm: onward.LanguageModel, prompts: Callable[[], list[int]], rounds: int) -> dict[str, float]:
    """The time of a round whose 4 drafted ids are all rejected, over a plain token: medians, measured in turns."""
    speculator = Speculator(Wrong(), length=4)
    options = REPETITIVE | {"max_new_tokens": 48}
    plain, rejected = [], []
    for turn in range(rounds + 1):
        prompt = prompts()
        for times, draft in ((plain, None), (rejected, speculator)):
            completion = lm.generate(prompt, draft=draft, **options)
            assert isinstance(completion, onward.Completion)
            assert completion.speculation is None or completion.speculation.accepted == 0
            if turn:
                times += completion.timing.per_token_ms[1:-5]  # the last drafts are shorter
    one, other = statistics.median(plain), statistics.median(rejected)
    return {"plain_ms": round(one, 3), "rejected_ms": round(other, 3), "ratio": round(other / one, 3)}


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(f"{'':24}{'ms a token':>12}{'speedup':>9}{'acceptance':>12}{'tokens a round':>16}{'of tokens':>11}")
    for name, row in rows.items():
        line = f"{name:24}{row['ms_per_token']:>12.3f}{row['speedup']:>9.3f}"
        if name != "plain":
            line += f"{row['acceptance']:>12.0%}{row['tokens_per_round']:>16.1f}{row['part_in_rounds']:>11.0%}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    onward.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)

    def fresh() -> list[int]:
        ids: list[int] = torch.randint(0, QWEN3_0_6B["vocab_size"], (32,), generator=generator).tolist()
        return ids

    buffer = bandwidth_buffer()
    bandwidth = [read_bandwidth(buffer)]
    lm = onward.load(str(random_checkpoint()), dtype="bfloat16", quantize="int8")
    result: dict[str, Any] = {"machine": description()}
    lookups = {"lookup": Speculator(PromptLookup()), "suffix": Speculator(SuffixLookup(max_tokens=0))}
    result["repetitive"] = compare(lm, fresh, REPETITIVE, lookups, arguments.rounds)
    print_table("0.6B int8, repetitive text", result["repetitive"])
    bandwidth.append(read_bandwidth(buffer))
    losing = {"lookup": Speculator(PromptLookup(1)), "always wrong": Speculator(Wrong())}
    result["unpredictable"] = compare(lm, fresh, UNPREDICTABLE, losing, arguments.rounds)
    print_table("0.6B int8, unpredictable text", result["unpredictable"])
    result["rejected"] = rejected_round(lm, fresh, arguments.rounds)
    print(f"\nround with a rejected draft of 4: {result['rejected']['ratio']:.3f} of a plain token")
    bandwidth.append(read_bandwidth(buffer))
    del lm

    demo = onward.load("demo", draft="demo-draft")
    assert demo.draft is not None
    drafter = demo.draft.drafter
    guesses = {"adaptive": demo.draft} | {f"drafts of {n}": Speculator(drafter, length=n) for n in (1, 2, 4)}
    guesses |= {"lookup": Speculator(PromptLookup()), "suffix": Speculator(SuffixLookup())}
    starts = iter(
        f"Once upon a time there was a {who}" for who in ("cat", "king", "girl", "dragon", "tree", "boat") * 99
    )
    for name, options in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_p": 0.95})):
        result[f"demo_{name}"] = compare(demo, lambda: next(starts), STORIES | options, guesses, 2 * arguments.rounds)
        print_table(f"demo model with its draft, {name}", result[f"demo_{name}"])
    result["read_bandwidth_gb_s"] = [round(read / 1e9, 1) for read in bandwidth]
    print(f"\nread bandwidth meanwhile: {result['read_bandwidth_gb_s']} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
