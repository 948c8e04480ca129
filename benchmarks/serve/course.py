"""The contenders of a part, and its size."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.checkpoints import QWEN3_0_6B, cache_bytes_per_position, weight_bytes_per_token
from benchmarks.compare.contenders import CONTENDERS, OURS, Contender
from benchmarks.compare.process import Worker, worker_command
from benchmarks.compare.turns import Turns, progress
from benchmarks.serve.sheet import Column, Sheet
from benchmarks.serve.workload import Record, Request

PEERS = ("openvino", "llama.cpp")
ENGINE, SHORT_STEPS, GENERATE, DENSE = "", "short steps", "generate", "dense"
# Which worker takes part so.
_WORKERS = {ENGINE: "onward", SHORT_STEPS: "onward", GENERATE: "onward_generate", DENSE: "onward_generate"}


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    clients: numbers of clients of the closed loop, and of rows that decode together.
    each: requests of each client.
    arrivals: requests that arrive at random times.
    tokens: of each request in the closed loop, of each row that decodes, and where paging is compared.
    """

    rounds: int = 3
    threads: int = 2
    clients: Sequence[int] = (1, 2, 4, 8, 16, 32)
    each: int = 2
    arrivals: int = 60
    tokens: int = 64


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    positions: the longest request, prompt and answer. sequences: how many there are at a time.
    ways: Onward's configurations; the first is compared with the peers.
    """

    name: str
    title: str
    columns: Callable[[Plan], list[Column]]
    measure: Callable[["Course"], None]
    sequences: Callable[[Plan], int]
    positions: int
    ways: Sequence[str] = (ENGINE,)
    peers: bool = True


class Course(Turns):
    """The contenders of one part at one precision, and the sheet that they fill."""

    def __init__(self, part: Part, precision: str, plan: Plan) -> None:
        super().__init__(plan.threads, QWEN3_0_6B["vocab_size"], seed=1)
        self.plan, self.precision = plan, precision
        ours = [contender.label for contender in _ours(part, precision)]
        self.sheet = Sheet(part.name, part.title, precision, part.columns(plan), ours, failed=self.failed)

    def run(self, name: str, requests: Sequence[Request], keep: bool = True) -> list[Record] | None:
        """The records of a contender for the requests; None if it failed. keep: all get the same requests."""
        answers: list[list[Record]] = []

        def ask(worker: Worker) -> None:
            answer = worker.ask(do="run", requests=[asdict(request) for request in requests])
            records = [Record(**fields) for fields in answer["records"]]
            for record, request in zip(records, requests, strict=True):
                assert len(record.tokens) == request.new_tokens, f"{name} made {len(record.tokens)} tokens: {request}"
            answers.append(records)
            if keep:
                self.sheet.first_tokens[name] += [record.first for record in records]

        self.attempt(name, ask)
        return answers[0] if answers else None

    def note(self, name: str, column: str, value: float | None) -> None:
        if value is not None:
            self.sheet.turns[name][column].append(value)

    def note_bandwidth(self) -> float:
        reading = self.read_bandwidth()
        self.sheet.bandwidth.append(reading)
        return reading

    def note_decode_limit(self, column: str, rows: int, position: float) -> None:
        """Tokens a second of rows of which each step reads the weights once, and each row's cache."""
        weights = weight_bytes_per_token(precision=self.precision)
        read = weights + rows * position * cache_bytes_per_position()
        self.sheet.limits[column].append(rows * self.note_bandwidth() / read)


def measure(part: Part, precision: str, plan: Plan, peers: Sequence[Contender]) -> Sheet:
    """A part at a precision, all contenders in turns."""
    progress(f"{part.name}, {precision}")
    course = Course(part, precision, plan)
    try:
        for contender in [*_ours(part, precision), *(peers if part.peers else ())]:
            command = worker_command(
                contender.python,
                contender.worker,
                contender.model(),
                precision,
                plan.threads,
                part.positions,
                contender.variant,
                part.sequences(plan),
                package="benchmarks.serve.workers",
            )
            course.enter(contender.label, command)
        part.measure(course)
    finally:
        course.end()
    return course.sheet


def peers_of(precision: str, names: Sequence[str] = PEERS) -> list[Contender]:
    """The contenders of `compare` that process several texts at a time, with their usual settings."""
    return [peer for peer in CONTENDERS if peer.precision == precision and peer.name in names and not peer.variant]


def _ours(part: Part, precision: str) -> list[Contender]:
    return [Contender(OURS, precision, _WORKERS[way], variant=way) for way in part.ways]
