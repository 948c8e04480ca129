"""The measurements: all contenders process the same prompt in turns, and the bandwidth is read after Onward's turn."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpoints import QWEN3_0_6B, SHAPES, random_checkpoint
from benchmarks.compare.contenders import OURS, Contender
from benchmarks.compare.process import Worker, worker_command
from benchmarks.compare.turns import Turns, progress

LENGTHS = (32, 512)
LONG = 4000
LONG_TURNS = 3  # for one of the others
BETWEEN = (1000, 2000)  # Onward alone, to see how the cost of a token grows
CAPACITY = 4608  # positions: the longest prompt and all that is decoded after it


@dataclass(frozen=True)
class Plan:
    """The size of a run: `tokens` are decoded after each prompt, in `rounds` rounds after a warm-up round."""

    rounds: int = 5
    tokens: int = 24
    threads: int = 2
    long: bool = True


@dataclass
class Samples:
    """What one contender took, in seconds; by length of the prompt, turn by turn.

    token: of each turn every token.
    first_tokens: what it answered to each prompt, which the others of its precision should answer too.
    instructions: those that it reports.
    """

    instructions: str = ""
    load: float = 0.0
    prefill: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    token: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    first_tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    peak: dict[int, int] = field(default_factory=dict)
    batch: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def tokens(self, length: int) -> list[float]:
        """Those of all turns."""
        return [seconds for turn in self.token.get(length, []) for seconds in turn]

    def decode_rate(self, length: int) -> float | None:
        """Tokens per second; None if it was not measured."""
        return 1 / statistics.median(self.tokens(length)) if self.tokens(length) else None

    def prefill_rate(self, length: int) -> float | None:
        return length / statistics.median(self.prefill[length]) if self.prefill.get(length) else None


@dataclass
class Session:
    """All contenders of one precision: what they took, the bandwidth meanwhile, and who failed, with the reason.

    bandwidth: by length of the prompt, for each turn right after Onward's.
    """

    samples: dict[str, Samples] = field(default_factory=dict)
    bandwidth: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, str] = field(default_factory=dict)

    def readings(self) -> list[float]:
        return [reading for readings in self.bandwidth.values() for reading in readings]


class Course(Turns):
    """The turns of one session: the requests to each contender, and their times."""

    def __init__(self, plan: Plan, vocab_size: int = QWEN3_0_6B["vocab_size"], seed: int = 1) -> None:
        super().__init__(plan.threads, vocab_size, seed)
        self.plan = plan
        self.result = Session(failed=self.failed)

    def enter(self, name: str, command: list[str]) -> tuple[float, str]:
        self.result.samples[name] = samples = Samples()
        samples.load, samples.instructions = super().enter(name, command)
        return samples.load, samples.instructions

    def begin(self, name: str, ids: Sequence[int], keep: bool = True) -> None:
        """Prefill, timed unless it is a warm-up."""

        def run(worker: Worker, samples: Samples) -> None:
            answer = worker.ask(do="begin", ids=ids)
            if keep:
                samples.prefill[len(ids)].append(answer["seconds"])
                samples.first_tokens[len(ids)].append(answer["token"])

        self._with(name, run)

    def more(self, name: str, length: int, keep: bool = True, count: int | None = None) -> None:
        """Decode after a prompt of `length` that was begun."""

        def run(worker: Worker, samples: Samples) -> None:
            seconds = worker.ask(do="more", count=count or self.plan.tokens)["seconds"]
            if keep:
                samples.token[length].append(seconds)

        self._with(name, run)

    def batch(self, name: str, rows: int, length: int, keep: bool = True) -> None:
        def run(worker: Worker, samples: Samples) -> None:
            # Ragged: from half of `length` to half as much again, `length` in the mean.
            prompts = [self.prompt(length // 2 + length * row // (rows - 1)) for row in range(rows)]
            seconds = worker.ask(do="batch", prompts=prompts, count=self.plan.tokens)["seconds"]
            if keep:
                samples.batch[rows].extend(seconds)

        self._with(name, run)

    def note_peak(self, length: int) -> None:
        """The peak memory of each contender so far, with prompts of up to `length` tokens."""
        for name in self.everyone():

            def run(worker: Worker, samples: Samples) -> None:
                samples.peak[length] = worker.ask(do="memory")["peak"]

            self._with(name, run)

    def note_bandwidth(self, length: int) -> None:
        self.result.bandwidth[length].append(self.read_bandwidth())

    def _with(self, name: str, run: Callable[[Worker, Samples], None]) -> None:
        self.attempt(name, lambda worker: run(worker, self.result.samples[name]))


def measure_precision(contenders: Sequence[Contender], plan: Plan) -> Session:
    """Decode after 32, 512 and 4,000 tokens and prefill, all contenders of one shape in turns."""
    course = Course(plan, SHAPES[contenders[0].shape]["vocab_size"])
    try:
        for contender in contenders:
            course.enter(contender.label, contender_command(contender, plan))
        _short(course)
        course.note_peak(max(LENGTHS))
        if plan.long:
            _long(course)
            course.note_peak(LONG)
    finally:
        course.end()
    return course.result


def contender_command(contender: Contender, plan: Plan) -> list[str]:
    return worker_command(
        contender.python,
        contender.worker,
        contender.model(),
        contender.precision,
        plan.threads,
        CAPACITY,
        contender.variant,
    )


def _short(course: Course) -> None:
    for turn in range(course.plan.rounds + 1):
        progress(f"round {turn} of {course.plan.rounds}" if turn else "warming up")
        for length in LENGTHS:
            prompt = course.prompt(length)
            for name in course.everyone(turn):
                course.begin(name, prompt, keep=turn > 0)
                course.more(name, length, keep=turn > 0)
                if turn > 0 and name.startswith(OURS):
                    course.note_bandwidth(length)


def _long(course: Course) -> None:
    """One prefill for each, then all decode in turns; the context grows by less than a tenth."""
    progress(f"a prompt of {LONG}")
    prompt = course.prompt(LONG)
    for turn, length in enumerate(BETWEEN):
        for name in course.everyone(turn):
            if name.startswith(OURS):
                course.begin(name, prompt[:length])
                for _ in range(2):
                    course.more(name, length)
                    course.note_bandwidth(length)
    for name in course.everyone():
        course.begin(name, prompt)
        course.more(name, LONG, keep=False)
    # Shorter turns than after short prompts, more often: nothing has to be processed again, and the memory bus changes.
    for turn in range(course.plan.rounds * LONG_TURNS):
        for name in course.everyone(turn):
            course.more(name, LONG, count=max(1, course.plan.tokens // LONG_TURNS))
            if name.startswith(OURS):
                course.note_bandwidth(LONG)


def measure_batch(plan: Plan, rows: int = 8, length: int = 32) -> Session:
    """Onward in int8: batches of `rows` and of 1 in turns."""
    course = Course(plan)
    name = f"{OURS} int8"
    try:
        course.enter(
            name, worker_command(Path(sys.executable), "onward", random_checkpoint(), "int8", plan.threads, CAPACITY)
        )
        for turn in range(plan.rounds + 1):
            course.begin(name, course.prompt(length), keep=turn > 0)
            course.more(name, length, keep=turn > 0)
            course.batch(name, rows, length, keep=turn > 0)
    finally:
        course.end()
    return course.result


def measure_demo(contenders: Sequence[Contender], plan: Plan, length: int = 32) -> Session:
    """The bundled model in bf16, which is nearly all overhead."""
    from onward.checkpoint import find_folder

    course = Course(plan, vocab_size=2048)
    try:
        for contender in contenders:
            model = find_folder("demo")
            course.enter(
                contender.label, worker_command(contender.python, contender.worker, model, "bf16", plan.threads, 1024)
            )
        for turn in range(plan.rounds + 1):
            prompt = course.prompt(length)
            for name in course.everyone(turn):
                course.begin(name, prompt, keep=turn > 0)
                for _ in range(4):
                    course.more(name, length, keep=turn > 0)
    finally:
        course.end()
    return course.result
