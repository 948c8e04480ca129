"""The speed of verification compared with decoding, and the number of wrong verdicts over many random requests.

    python -m benchmarks.receipts [--precision bf16] [--prompt 32] [--new 512] [--pairs 5] [--threads N] [--cpu-time]
    python -m benchmarks.receipts --tokens 1000000 [--seed 0]

Speed: random weights in the shape of Qwen3-0.6B, batch 1, no cached prefix. Each pair generates a text and replays it
as `lm.verify` does: prompt and text in one prefill, with a draw at every position; separate rows include logprobs.
Ratios are medians over pairs of the decoding time of the text, without its prompt, divided by the time of the replay.
The limit of a replay is the prefill of the same ids with logits only after the last one.
--cpu-time measures the processor time of the process, for a busy machine.

--tokens: the demo model generates texts with random options in two engines, each with a copy of the model, in batches
with drafts, prefix hits and several samples. Every receipt is converted to JSON and back, and verified by a third copy;
then one value is altered and the receipt is verified again. Prints the numbers of wrong verdicts, which should be 0 and
0: texts that are not verified, and altered receipts that are.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import onward
from benchmarks.checkpoints import QWEN3_0_6B
from benchmarks.drawn import random_model
from benchmarks.machine import description
from onward import LanguageModel, Receipt, Speculator

DRAFTS = [Speculator("lookup", length=4), Speculator("suffix", length=3)]  # always, unlike an adaptive length
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.1},
}


def speed(precision: str, prompt: int, new: int, pairs: int, *, cpu_time: bool) -> dict[str, Any]:
    lm = LanguageModel(random_model(precision, QWEN3_0_6B), prefix_memory=0)
    clock = time.process_time if cpu_time else time.perf_counter
    cases = [(name, options, None) for name, options in SAMPLINGS.items()]
    cases += [(f"{name}, logprobs", SAMPLINGS[name], 0) for name in ("greedy", "temperature 1")]
    results: dict[str, Any] = {}
    for name, options, logprobs in cases:
        decoding, replaying, prefilling = [], [], []
        for pair in range(pairs + 1):
            ids = [(pair * 7919 + at * 104729) % 150_000 for at in range(prompt)]
            seed = {} if options["temperature"] == 0 else {"seed": pair}
            stream = lm.stream(ids, max_new_tokens=new, ignore_eos=True, logprobs=logprobs, **options, **seed)
            next(stream)
            began = clock()
            completion = _rest(stream)
            decoding.append((clock() - began) / (new - 1))
            began = clock()
            replay = lm.replay(completion)
            replaying.append((clock() - began) / new)
            began = clock()
            lm.generate([*ids, *completion.token_ids], max_new_tokens=1, temperature=0.0)
            prefilling.append((clock() - began) / new)
            assert replay.difference is None
            assert logprobs is None or replay.logprobs == completion.logprobs
        decoding, replaying, prefilling = decoding[1:], replaying[1:], prefilling[1:]  # the first compiled programs
        ratios = [one / other for one, other in zip(decoding, replaying, strict=True)]
        results[name] = {
            "decode ms/token": round(1e3 * statistics.median(decoding), 3),
            "replay ms/token": round(1e3 * statistics.median(replaying), 3),
            "prefill ms/token": round(1e3 * statistics.median(prefilling), 3),
            "ratio": round(statistics.median(ratios), 1),
        }
        print(f"{name:28} {results[name]}", flush=True)
    return results


def _rest(stream: Any) -> Any:
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


def random_options(draws: random.Random) -> dict[str, Any]:
    """Options of a request, each set with its own probability."""
    some: dict[str, Any] = {
        "top_k": draws.choice([1, 20, 200]), "top_p": draws.choice([0.5, 0.9]), "min_p": 0.05, "typical_p": 0.8,
        "repetition_penalty": draws.choice([0.9, 1.2]), "presence_penalty": 0.5, "frequency_penalty": -0.3,
        "no_repeat_ngram_size": draws.choice([2, 3]), "dry_multiplier": 0.8, "xtc_probability": 0.5,
        "logit_bias": {draws.randrange(2048): draws.choice([2.0, float("-inf")]) for _ in range(3)},
        "stop": [draws.choice([".", " and", "\n"])], "min_new_tokens": 3,
    }  # fmt: skip
    options = {name: value for name, value in some.items() if draws.random() < 0.15}
    greedy = draws.random() < 0.15
    if greedy:
        options.pop("xtc_probability", None)
    if draws.random() < 0.1:
        options.pop("min_new_tokens", None)
        options |= draws.choice([{"regex": "[A-Za-z ,.]{10,200}"}, {"json_schema": {"type": "object"}}])
    return options | {
        "temperature": 0.0 if greedy else draws.choice([0.6, 1.0, 1.4]),
        "seed": draws.getrandbits(64),
        "max_new_tokens": draws.choice([8, 40, 160]),
        "n": 1 if greedy else draws.choice([1, 1, 3]),
        "draft": draws.choice([None, "lookup", *DRAFTS]),
        "logprobs": draws.choice([None, 0]),
    }


def altered(receipt: Receipt, draws: random.Random) -> tuple[str, Receipt]:
    """The name of the altered field, and the altered receipt."""
    kind, ids, logprobs = draws.choice(["id", "end", "prompt", "logprob"]), receipt.token_ids, receipt.logprobs
    at = draws.randrange(len(ids)) if ids else 0
    if kind == "id" and ids:
        other = (ids[at] + draws.randrange(1, 2048)) % 2048
        return kind, dataclasses.replace(receipt, token_ids=[*ids[:at], other, *ids[at + 1 :]])
    if kind == "logprob" and logprobs:
        return kind, dataclasses.replace(receipt, logprobs=[*logprobs[:at], logprobs[at] - 1e-6, *logprobs[at + 1 :]])
    if kind == "prompt":
        return kind, dataclasses.replace(receipt, prompt_ids=[*(receipt.prompt_ids or ()), 7])
    cut = None if logprobs is None else logprobs[:-1]
    if ids:
        return "end", dataclasses.replace(receipt, token_ids=ids[:-1], logprobs=cut)
    return "end", dataclasses.replace(receipt, finish_reason="time")


def count_wrong(tokens: int, seed: int) -> dict[str, Any]:
    draws, counts, kinds = random.Random(seed), Counter[str](), Counter[str]()
    verifier = onward.load("demo")
    engines = [onward.Engine(onward.load("demo"), max_sequences=16) for _ in range(2)]
    fingerprint, began = engines[0].fingerprint, time.perf_counter()
    openings = ["Once upon a time", "The fox", "One day, a girl", "Tom and his dog", "It was a cold night"]
    while counts["tokens"] < tokens:
        requests = []
        for number in range(48):
            prompt = " ".join(draws.choices(openings, k=draws.choice([1, 2, 20])))
            requests.append(engines[number % 2].submit(prompt, **random_options(draws)))
        for request in requests:
            try:
                completion = request.result()
            except onward.errors.NothingToDrawError:
                counts["nothing to draw"] += 1
                continue
            counts["prefix hits"] += completion.cached_tokens > 0
            for text in completion.choices:
                counts["texts"] += 1
                counts["tokens"] += len(text.token_ids)
                counts["accepted drafts"] += text.speculation.accepted if text.speculation else 0
                receipt = Receipt.from_json(json.dumps(Receipt.of(text, fingerprint).to_json(), allow_nan=False))
                if not (result := verifier.verify(receipt)).is_verified:
                    counts["wrongly rejected"] += 1
                    print(f"REJECTED: {result}\n{receipt.to_json()}", flush=True)
                kind, other = altered(receipt, draws)
                kinds[kind] += 1
                if verifier.verify(other).is_same_text:
                    counts["wrongly verified"] += 1
                    print(f"VERIFIED after an altered {kind}: {other.to_json()}", flush=True)
        seconds = time.perf_counter() - began
        print(f"{counts['tokens']:,} tokens, {counts['texts']:,} texts, {seconds:.0f} s", file=sys.stderr, flush=True)
    for engine in engines:
        engine.close()
    wrong = {name: counts[name] for name in ("wrongly rejected", "wrongly verified")}
    return {**counts, **wrong, "altered": dict(kinds), "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        onward.set_num_threads(arguments.threads)
    if arguments.tokens:
        result = count_wrong(arguments.tokens, arguments.seed)
    else:
        print(description())
        shape = arguments.precision, arguments.prompt, arguments.new, arguments.pairs
        result = speed(*shape, cpu_time=arguments.cpu_time)
    print(json.dumps(result))
    sys.exit(1 if result.get("wrongly rejected") or result.get("wrongly verified") else 0)


if __name__ == "__main__":
    main()
