"""Check over many configurations that `generate` and `lm.logprobs` give equal logprobs of generated tokens.

    python -m benchmarks.equal_logprobs --tokens 10000000 [--seed 0] [--threads 1] [--state FILE]

The demo model in float32 and bfloat16; both are trained from time to time. Each round samples texts in one of several
ways (a batch of a random size, an engine, drafts, a cached prompt, long prompts with logprobs). It then computes their
logprobs again with `lm.logprobs`, in another order, packed in groups of random sizes, with or without autograd: those
of the model, and in some rounds those of the sampling. --state: a file with the counts, which a later run continues;
rounds are drawn from their numbers and the seed. The last line is one JSON object; the command fails if any logprob
differs.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import onward
from benchmarks.machine import description

OPENINGS = ["Once upon a time", "The fox", "One day, a girl", "Tom and his dog", "It was a cold night", "Hi"]
SAMPLINGS: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 50, "min_p": 0.02}, {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"typical_p": 0.9, "xtc_probability": 0.3, "no_repeat_ngram_size": 4},
]  # fmt: skip
MOST_IDS = 8192  # of one forward of `lm.logprobs`
TRAINED_EVERY = 40  # rounds


class Compared:
    """A trained model in one dtype, with an engine over it, and the counts of its comparisons."""

    def __init__(self, dtype: str) -> None:
        loaded = onward.load("demo", dtype=dtype, trainable=True)
        self.openings = [loaded.encode(opening) for opening in OPENINGS]
        self.lm = onward.LanguageModel(loaded.model)  # without a tokenizer: texts would only take time
        self.engine = onward.Engine(self.lm, max_sequences=256)
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=1e-4)

    def sampled(self, draws: random.Random) -> tuple[str, list[onward.Completion]]:
        """The sampling method of a round, and its texts."""
        way = draws.choice(["batch", "batch", "engine", "drafts", "prefix", "prompts"])
        rows = draws.choice([1, 8, 96, 256, 512])
        options: dict[str, Any] = {
            "temperature": draws.choice([0.7, 1.0, 1.3]), "logprobs": 0, "max_new_tokens": draws.choice([32, 64, 128]),
            "ignore_eos": True,
        }  # fmt: skip
        if draws.random() < 0.3:
            options |= {"sampling_logprobs": True, **draws.choice(SAMPLINGS)}
        prompts = [[*chain(*draws.choices(self.openings, k=draws.choice([1, 2, 12])))] for _ in range(rows)]
        seeds: list[Any] = [{"seed": draws.getrandbits(64)} for _ in prompts]
        if way == "engine":
            running = [self.engine.submit(p, **options, **own) for p, own in zip(prompts, seeds, strict=True)]
            return way, [each.result() for each in running]
        if way == "drafts":
            options["draft"] = draws.choice(["lookup", onward.Speculator("suffix", length=3)])
        if way == "prompts":
            prompts = [draws.choices(range(self.lm.model.vocab_size), k=draws.choice([100, 200])) for _ in prompts]
            options |= {"max_new_tokens": 8, "prompt_logprobs": 0}
        if way == "prefix":
            prompts = [prompts[0] * 6] * min(rows, 64)
            self.lm.generate(prompts[0], max_new_tokens=1, temperature=0)
            del seeds[len(prompts) :]
        return way, self.lm.generate(prompts, per_prompt=seeds, **options)

    def again(self, texts: list[Any], draws: random.Random, **options: Any) -> list[torch.Tensor]:
        """The logprobs of the texts from `lm.logprobs`, computed in groups."""
        most, found, group = draws.choice([1, 500, MOST_IDS, MOST_IDS]), list[torch.Tensor](), list[Any]()
        with torch.set_grad_enabled(draws.random() < 0.5):
            for text in [*texts, None]:
                if group and (text is None or sum(map(_length, [*group, text])) > most):
                    found += [own.detach() for own in self.lm.logprobs(group, **options)]
                    group = []
                if text is not None:
                    group.append(text)
        return found

    def compared(self, texts: list[onward.Completion], draws: random.Random) -> Iterator[tuple[torch.Tensor, ...]]:
        """For each text, the logprobs that were reported, and those of `lm.logprobs`: of the model, then of the
        sampling."""
        if texts[0].prompt_logprobs is None:
            yield from zip((_tensor(text, "chosen") for text in texts), self.again(texts, draws), strict=True)
        else:
            whole = self.again([text.prompt_ids + text.token_ids for text in texts], draws)
            yield from zip((_tensor(text, "chosen") for text in texts), whole, strict=True)
        if (texts[0].logprobs or ())[0].sampling is not None:
            drawn = self.again(texts, draws, sampling=True)
            yield from zip((_tensor(text, "sampling") for text in texts), drawn, strict=True)

    def train(self, texts: list[onward.Completion]) -> None:
        chosen = self.lm.logprobs(texts[:16])
        torch.cat([own * (-1) ** index for index, own in enumerate(chosen)]).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.update_weights(self.lm.named_parameters())


def _length(text: Any) -> int:
    if isinstance(text, onward.Completion):
        return len(text.prompt_ids) + len(text.token_ids)
    return 0 if text is None else len(text)


def _tensor(text: onward.Completion, field: str) -> torch.Tensor:
    """The logprobs of the new ids; those of the model after the prompt's, if there are any."""
    of_prompt = (text.prompt_logprobs or ())[1:] if field == "chosen" else ()
    return torch.tensor([getattr(entry, field) for entry in [*of_prompt, *(text.logprobs or ())]])


def run(counts: dict[str, int], tokens: int, seed: int, state: Path | None) -> None:
    models = {dtype: Compared(dtype) for dtype in ("float32", "bfloat16")}
    while counts["tokens"] < tokens:
        draws, began = random.Random(f"{seed} {counts['rounds']}"), time.perf_counter()
        dtype = draws.choice(list(models))
        model = models[dtype]
        way, texts = model.sampled(draws)
        draws.shuffle(texts)
        for reported, own in model.compared(texts, draws):
            different = int((own != reported).sum())
            if different:
                print(f"DIFFERENT: {way}, {dtype}, round {counts['rounds']}: {texts[0].request!r}", flush=True)
            for name, count in {"tokens": len(reported), "different": different}.items():
                counts[name] += count
            for name in (way, dtype):
                counts[name] = counts.get(name, 0) + len(reported)
        drafts = sum(text.speculation.accepted for text in texts if text.speculation)
        cached, sampled = sum(text.cached_tokens > 0 for text in texts), texts[0].request.options.sampling_logprobs
        own = len(texts) * len(texts[0].token_ids) if sampled else 0
        for name, count in {"texts": len(texts), "cached": cached, "accepted": drafts, "of the sampling": own}.items():
            counts[name] = counts.get(name, 0) + count
        counts["rounds"] += 1
        if counts["rounds"] % TRAINED_EVERY == 0:
            model.train(texts)
            counts["updates"] = counts.get("updates", 0) + 1
        counts["milliseconds"] = counts.get("milliseconds", 0) + round(1e3 * (time.perf_counter() - began))
        if state is not None:
            state.write_text(json.dumps(counts))
        if counts["rounds"] % 20 == 0:
            print(f"{counts['tokens']:,} logprobs, {counts['different']} different", file=sys.stderr, flush=True)
    for model in models.values():
        model.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    onward.set_num_threads(options.threads)
    counts = {"tokens": 0, "rounds": 0, "different": 0}
    if options.state is not None and options.state.exists():
        counts = json.loads(options.state.read_text())
    run(counts, options.tokens, options.seed, options.state)
    print(json.dumps({"machine": description(), **counts}))
    sys.exit(1 if counts["different"] else 0)


if __name__ == "__main__":
    main()
