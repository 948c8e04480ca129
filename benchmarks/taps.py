"""Taps in the shape of Qwen3-0.6B: a token that reads nothing, reads a layer, or is steered; and embeddings.

    python -m benchmarks.taps [--precision int8] [--texts N] [--lengths LOW HIGH] [--rounds N] [--peer] [--cpu-time]
    python -m benchmarks.taps --positions 1000000 [--seed N]

Random weights, made in memory. The contestants alternate in every round, on the same weights, in one process. A token
that reads nothing runs the same program as without taps: its bytes are compared, not timed. Texts to embed have 128
ids, or a length between two numbers. Embedding is compared with the prefill of the same texts (one new token each) and,
with --peer, with sentence-transformers on the same weights in float32. Medians; the last line is one JSON object.

--positions compares bits instead: the rows that random schedules of the demo model capture (chunks, batches, cached
prefixes, an engine in which other requests generate) with those of one plain forward over each text, until this number
of positions has been compared.
"""

import argparse
import itertools
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import onward
from benchmarks.checkpoints import QWEN3_0_6B, checkpoint_with_tokenizer
from benchmarks.machine import description
from onward.models import Run
from onward.program import ForwardBatch

PROMPT, NEW_TOKENS, LENGTH = 64, 32, 128
Clock = Callable[[], float]


def token_ms(lm: onward.LanguageModel, clock: Clock, prompt: list[int], **options: Any) -> float:
    """The median milliseconds of a token."""
    pieces = lm.stream(prompt, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, **options)
    times = [clock() for _ in pieces]
    return 1000 * statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def seconds(clock: Clock, call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began


def tokens(lm: onward.LanguageModel, clock: Clock, rounds: int) -> dict[str, Any]:
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
            taken = token_ms(lm, clock, prompt, **options)
            if at:  # the first round creates programs
                times[name].append(taken)
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(own, times["plain"], strict=True))
        for name, own in times.items()
    }
    return {name: {"ms": statistics.median(own), "ratio": ratios[name]} for name, own in times.items()}


def embeddings(
    lm: onward.LanguageModel, clock: Clock, texts: int, rounds: int, lengths: Sequence[int], peer: bool
) -> dict[str, Any]:
    """Tokens per second; the contestants take turns within every round, over other texts of the same lengths."""
    draws = random.Random(3)

    def some() -> list[str]:
        """Printable characters, each of which is a token."""
        return ["".join(draws.choices(string.ascii_lowercase, k=draws.randint(*lengths))) for _ in range(texts)]

    contestants: dict[str, Callable[[list[str]], Any]] = {
        "prefill": lambda texts: lm.generate(texts, max_new_tokens=1, temperature=0),
        "embed": lm.embed,
    }
    if peer:
        contestants["sentence-transformers"] = sentence_transformer().encode
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        for name, run in contestants.items():
            batch = some() if at else ["a" * lengths[0]]  # the first round creates programs
            taken = seconds(clock, lambda run=run, batch=batch: run(batch))
            if at:
                rates[name].append(sum(map(len, batch)) / taken)
    ratios = {
        f"embed / {name}": statistics.median(ours / theirs for ours, theirs in zip(rates["embed"], own, strict=True))
        for name, own in rates.items()
        if name != "embed"
    }
    return {name: statistics.median(own) for name, own in rates.items()} | ratios


def sentence_transformer() -> Any:
    """The same weights in float32, its fastest dtype on a CPU without BF16: the last id's values, normalized."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    model = Transformer(str(checkpoint_with_tokenizer()), model_kwargs={"dtype": torch.float32})
    model.tokenizer.pad_token = model.tokenizer.eos_token
    pooling = Pooling(QWEN3_0_6B["hidden_size"], pooling_mode="lasttoken")
    return SentenceTransformer(modules=[model, pooling, Normalize()], device="cpu")


def compared(count: int, seed: int) -> dict[str, Any]:
    """Capture at least `count` positions under random schedules, and compare each with that of a plain forward."""
    lm, draws = onward.load("demo"), random.Random(seed)
    taps = ["embedding", "layers.2", "norm"]
    plain = Run(lm.model)
    done: dict[str, int] = {"hidden_states": 0, "generate": 0, "engine": 0}
    wrong, began, earlier = 0, time.perf_counter(), [[5]]

    def text() -> list[int]:
        """Random ids, often after the beginning of an earlier text."""
        shared = draws.choice(earlier)[: draws.randrange(400)] if draws.random() < 0.5 else []
        return [*shared, *(draws.randrange(lm.model.vocab_size) for _ in range(1 + draws.randrange(400)))]

    def differing(ids: list[int], values: Mapping[str, torch.Tensor]) -> int:
        """The number of positions whose rows at any tap differ in a bit from those of a plain forward over the text."""
        tokens, offsets = torch.tensor([ids], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        batch = ForwardBatch(tokens, offsets, lm.model.new_cache(1, len(ids)), torch.zeros(1, 0).long(), tuple(taps))
        want = plain.step(batch).taps
        assert all(values[name].shape == want[name][0].shape for name in taps)
        differs = [(values[name].view(torch.int16) != want[name][0].view(torch.int16)).any(1) for name in taps]
        return int(torch.stack(differs).any(0).sum())

    while sum(done.values()) < count:
        texts = [text() for _ in range(draws.choice((1, 3, 16, 40)))]
        earlier = texts
        lm.prefill_chunk = draws.choice((1, 5, 64, 100, 512))
        way = draws.choice(list(done))
        options = {"max_new_tokens": 1 + draws.randrange(12), "temperature": 1.0, "ignore_eos": True}
        if way == "hidden_states":
            pairs = list(zip(texts, lm.hidden_states(texts, taps), strict=True))
        else:
            options["taps"] = dict.fromkeys(taps, "all")
            if way == "generate":
                found = lm.generate(texts, **options)
            else:
                with onward.Engine(lm, max_sequences=draws.choice((2, 8))) as engine:
                    others = [engine.submit(each, max_new_tokens=8, ignore_eos=True) for each in texts[:4]]
                    found = [each.result() for each in [engine.submit(each, **options) for each in texts]]
                    assert all(each.result().taps is None for each in others)
            pairs = [([*ids, *one.token_ids[:-1]], one.taps or {}) for ids, one in zip(texts, found, strict=True)]
        for ids, values in pairs:
            wrong += differing(ids, values)
            done[way] += len(ids)
    return {"positions": done, "differing": wrong, "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["int8", "bf16"], default="int8")
    parser.add_argument("--texts", type=int, default=1000, help="of a round; 0: time no embeddings")
    parser.add_argument("--rounds", type=int, default=5, help="0: time no tokens, and one round of embeddings")
    parser.add_argument("--peer", action="store_true", help="also time sentence-transformers in float32")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, for a busy machine")
    parser.add_argument("--lengths", type=int, nargs=2, default=(LENGTH, LENGTH), help="of the texts to embed")
    parser.add_argument("--positions", type=int, help="compare the bits of so many captured positions instead")
    parser.add_argument("--seed", type=int, default=0, help="of the schedules")
    args = parser.parse_args()
    if args.positions is not None:
        print(json.dumps({"machine": description(), **compared(args.positions, args.seed)}))
        return
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time:
        onward.set_num_threads(1)
        torch.set_num_threads(1)
    lm = onward.load(
        checkpoint_with_tokenizer(), dtype="bfloat16", quantize=None if args.precision == "bf16" else args.precision
    )
    lm.prefix_memory = 0
    result: dict[str, Any] = {"machine": description(), "precision": args.precision, "cpu_time": args.cpu_time}
    if args.rounds:
        result["token"] = tokens(lm, clock, args.rounds)
        for name, numbers in result["token"].items():
            print(f"{name:<12} {numbers['ms']:8.2f} ms a token   {numbers['ratio']:.3f}", flush=True)
    if args.texts:
        result["embeddings"] = embeddings(lm, clock, args.texts, max(1, args.rounds // 2), args.lengths, args.peer)
        print(", ".join(f"{name} {value:,.2f}" for name, value in result["embeddings"].items()), "tokens/s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
