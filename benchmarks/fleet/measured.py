"""Runs of the real engine: every step, and when each request had its tokens."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onward
from benchmarks.fleet.step import Step
from benchmarks.serve.workload import log_uniform


@dataclass(frozen=True)
class Asked:
    """at: seconds after the beginning. prompt, new: tokens."""

    at: float
    prompt: int
    new: int


@dataclass(frozen=True)
class Run:
    """What was asked, the times of each request's tokens after the beginning, and the steps."""

    asked: list[Asked]
    tokens: list[list[float]]
    steps: list[Step]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Run":
        steps = [Step(rows, seen, [tuple(chunk) for chunk in parts], s) for rows, seen, parts, s in fields["steps"]]
        return cls([Asked(**asked) for asked in fields["asked"]], fields["tokens"], steps)


def poisson(count: int, rate: float, seed: int, prompts: tuple[int, int], new: tuple[int, int]) -> list[Asked]:
    """Requests at random times, of sizes that are log-uniform."""
    generator, at = random.Random(seed), 0.0
    asked = []
    for _ in range(count):
        at += generator.expovariate(rate)
        asked.append(Asked(at, log_uniform(*prompts, generator), log_uniform(*new, generator)))
    return asked


def measure(engine: onward.Engine, asked: Sequence[Asked], seed: int) -> Run:
    """Let an engine answer random prompts as they are asked."""
    generator = random.Random(seed)
    vocabulary = engine.lm.model.vocab_size
    prompts = [[generator.randrange(vocabulary) for _ in range(one.prompt)] for one in asked]
    watched = _Watched(engine)
    began = time.monotonic()
    generations = []
    for one, prompt in zip(asked, prompts, strict=True):
        time.sleep(max(0.0, began + one.at - time.monotonic()))
        generations.append(engine.submit(prompt, max_new_tokens=one.new, temperature=0, ignore_eos=True))
    for generation in generations:
        generation.result()
    # `submit` takes time of its own: a request arrived when it was submitted.
    arrived = [
        Asked(generation.submitted - began, one.prompt, one.new)
        for generation, one in zip(generations, asked, strict=True)
    ]
    tokens = [[when - began for when, count in each.arrivals for _ in range(count)] for each in generations]
    return Run(arrived, tokens, watched.end())


class _Watched:
    """Notes the steps of an engine: what its policy planned, and what that took."""

    def __init__(self, engine: onward.Engine) -> None:
        self._policy: Any = engine._serving._policy
        self._plan, self._note = self._policy.plan, self._policy.note
        self._steps: list[Step] = []
        self._context, self._last, self._began = 0, 0.0, 0.0
        self._policy.plan, self._policy.note = self.plan, self.note

    def plan(self, rows: Sequence[Any]) -> Any:
        self._context = sum(row.computed for row in rows if row.total - row.computed == 1)
        self._began = time.perf_counter()
        return self._plan(rows)

    def note(self, seconds: float, output: int) -> None:
        now = time.perf_counter()
        # Between two steps the engine also hands out and plans. The time in which it was idle is of no step.
        took = now - max(self._last, self._began - 0.25 * seconds)
        self._steps.append(Step(self._policy._decoding, self._context, list(self._policy._chunks), took))
        self._last = now
        self._note(seconds, output)

    def end(self) -> list[Step]:
        del self._policy.plan, self._policy.note
        return self._steps


def run_all(source: str, quantize: str | None, file: Path, *, sequences: int, count: int, rate: float) -> None:
    """Two runs of one engine into a file: one to fit from, and one of other requests at other rates to hold against."""
    lm = onward.load(source, quantize=quantize, **({} if source == "demo" else {"device": "cpu"}))
    longest = min(lm.model.max_seq_len or 2048, 2048)
    prompts, new = (16, longest // 2), (16, 96)
    with onward.Engine(lm, max_sequences=sequences) as engine:
        measure(engine, poisson(count // 3, 100 * rate, 1, prompts, new), 1)  # programs are made
        runs = {
            "fit": measure(engine, poisson(count, 1.5 * rate, 2, prompts, new), 2),
            "held out": measure(engine, poisson(count, rate, 3, prompts, new), 3),
        }
    written = {name: asdict(run) for name, run in runs.items()}
    file.write_text(json.dumps({"source": source, "quantize": quantize, "sequences": sequences, "runs": written}))
