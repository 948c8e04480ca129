"""Taps on the shape of Qwen3-0.6B: a token that reads nothing, reads a layer, is steered; and embeddings.

    python -m benchmarks.taps [--precision int8] [--texts N] [--rounds N] [--peer]

Random weights, made in memory. The contestants take turns within every round, on the same weights, in one process. A
token that reads nothing runs the same program as without taps: its bytes are compared, not timed. Embeddings are of
texts of 128 ids, beside the prefill of the same texts (one new token each) and, with --peer, sentence-transformers on
the same weights in float32 or bf16. Medians; the last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import onward
from benchmarks.checkpoints import QWEN3_0_6B, random_checkpoint
from benchmarks.machine import description

PROMPT, NEW_TOKENS, LENGTH = 64, 32, 128


def token_ms(lm: onward.LanguageModel, prompt: list[int], **options: Any) -> float:
    """The median milliseconds of a token."""
    done = lm.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, **options)
    return statistics.median(done.timing.per_token_ms)


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def tokens(lm: onward.LanguageModel, rounds: int) -> dict[str, Any]:
    width = lm.model.taps["norm"].shape[0]
    last = max(int(name.partition(".")[2]) for name in lm.model.taps if name.startswith("layers."))
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1)) * 0.01
    contestants: dict[str, dict[str, Any]] = {
        "plain": {},
        "one layer": {"taps": {f"layers.{last // 2}": "new"}},
        "every layer": {"taps": {f"layers.{number}": "new" for number in range(last + 1)}},
        "steered": {"steer": {f"layers.{last // 2}": vector}},
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    draws = torch.Generator().manual_seed(2)
    for at in range(rounds + 1):
        prompt = torch.randint(0, QWEN3_0_6B["vocab_size"], (PROMPT,), generator=draws).tolist()
        for name, options in contestants.items():
            taken = token_ms(lm, prompt, **options)
            if at:  # the first round creates programs
                times[name].append(taken)
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(own, times["plain"], strict=True))
        for name, own in times.items()
    }
    return {name: {"ms": statistics.median(own), "ratio": ratios[name]} for name, own in times.items()}


def embeddings(lm: onward.LanguageModel, texts: int, rounds: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(3)
    rates: dict[str, list[float]] = {"prefill": [], "embed": []}
    for _ in range(rounds):
        ids = torch.randint(0, QWEN3_0_6B["vocab_size"], (2 * texts, LENGTH), generator=draws).tolist()
        prefill = seconds(lambda ids=ids: lm.generate(ids[:texts], max_new_tokens=1, temperature=0))
        embed = seconds(lambda ids=ids: lm.embed(ids[texts:]))
        rates["prefill"].append(texts * LENGTH / prefill)
        rates["embed"].append(texts * LENGTH / embed)
    return {name: statistics.median(own) for name, own in rates.items()} | {
        "ratio": statistics.median(e / p for e, p in zip(rates["embed"], rates["prefill"], strict=True))
    }


def peer(texts: int, rounds: int) -> dict[str, Any]:
    """Embeddings of sentence-transformers' way: transformers in batches of 32, the last id, normalized."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(random_checkpoint(), dtype=torch.bfloat16).eval()
    draws, rates = torch.Generator().manual_seed(3), []
    for _ in range(rounds):
        ids = torch.randint(0, QWEN3_0_6B["vocab_size"], (texts, LENGTH), generator=draws)

        @torch.inference_mode()
        def embed(ids: torch.Tensor = ids) -> None:
            for first in range(0, texts, 32):
                states = model(ids[first : first + 32]).last_hidden_state[:, -1]
                torch.nn.functional.normalize(states.float(), dim=1)

        rates.append(texts * LENGTH / seconds(embed))
    return {"embed": statistics.median(rates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["int8", "bf16"], default="int8")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="also time transformers in bf16")
    args = parser.parse_args()
    lm = onward.load(
        random_checkpoint(), dtype="bfloat16", quantize=None if args.precision == "bf16" else args.precision
    )
    lm.prefix_memory = 0
    result: dict[str, Any] = {"machine": description(), "precision": args.precision}
    result["token"] = tokens(lm, args.rounds)
    for name, numbers in result["token"].items():
        print(f"{name:<12} {numbers['ms']:8.2f} ms a token   {numbers['ratio']:.3f}", flush=True)
    result["embeddings"] = embeddings(lm, args.texts, max(1, args.rounds // 2))
    print(", ".join(f"{name} {value:,.2f}" for name, value in result["embeddings"].items()), "tokens/s", flush=True)
    if args.peer:
        result["peer"] = peer(args.texts, 1)
        print(f"transformers {result['peer']['embed']:,.1f} tokens/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
