"""A machine with simulated time, and an engine without a model: both drive the real scheduler."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK = 64  # positions of a block


@dataclass(frozen=True)
class Machine:
    """The cost of a step, in seconds. Chunks may cost more at later positions; a new shape costs `making` once.

    noise: a step takes up to this part longer or shorter.
    """

    step: float = 0.020
    decoding_row: float = 0.002
    chunk: float = 0.010
    token: float = 0.001
    token_and_position: float = 0.0
    making: float = 0.0
    noise: float = 0.0

    def decode(self, rows: int) -> float:
        return self.step + self.decoding_row * rows if rows else 0.0

    def prefill(self, position: int, tokens: int) -> float:
        return self.chunk + tokens * (self.token + self.token_and_position * (position + tokens / 2))

    def seconds(self, rows, chunks) -> float:
        return self.decode(rows) + sum(self.prefill(*chunk) for chunk in chunks)


@dataclass(eq=False)
class SimulatedRow:
    total: int
    left: int  # tokens that it will still generate
    client: str | None = None
    computed: int = 0


@dataclass(eq=False)
class Request:
    """A request, which generates `new` tokens of the at most `max_new_tokens` that it asked for."""

    arrival: float
    prompt: int
    new: int = 1
    asked: int = 0  # max_new_tokens beyond `new`
    num_sequences: int = 1
    priority: int = 0
    client: str | None = None
    deadline: float = math.inf
    cancel: float = math.inf
    rows: list[SimulatedRow] = field(default_factory=list)
    blocks: int = 0  # that it holds
    cache_share: float = 0.0
    finish: str = ""
    preempted: int = 0
    lost: int = 0  # computed tokens, to preemptions
    admitted: float = math.nan  # when it was admitted first
    ended: float = math.nan

    def __post_init__(self) -> None:
        self.rows = [SimulatedRow(self.prompt, self.new, self.client) for _ in range(self.num_sequences)]

    @property
    def prompt_tokens(self) -> int:
        return max(row.total for row in self.rows)

    @property
    def max_new_tokens(self) -> int:
        return self.prompt + self.new + self.asked - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        return all(row.total - row.computed == 1 for row in self.rows if row.left)

    def blocks_for(self, new_tokens: int) -> int:
        """Blocks of the prompt and of so many new tokens, for each of its sequences."""
        return self.num_sequences * math.ceil((self.prompt_tokens + new_tokens) / BLOCK)

    @property
    def most_blocks(self) -> int:
        return self.blocks_for(self.max_new_tokens)


@dataclass(frozen=True)
class SimulatedStep:
    start: float
    decoding: int
    chunks: tuple[tuple[int, int], ...]
    seconds: float
    new: bool  # whether a shape of it ran for the first time


class Simulation:
    """Runs requests through a scheduler on a machine with so many blocks, until all have ended.

    admissions: requests in the order in which they joined. steps: all that were run. refused: requests.
    """

    def __init__(
        self, scheduler, machine: Machine, blocks: int = 10**6, seed: int = 0, watch: Callable | None = None
    ) -> None:
        self.scheduler, self.machine, self.free, self.blocks = scheduler, machine, blocks, blocks
        self.now = 0.0
        self.admissions: list[Request] = []
        self.refused: list[Request] = []
        self.steps: list[SimulatedStep] = []
        self._running: list[Request] = []
        self._random = random.Random(seed)
        self._shapes: set[tuple[str, int]] = set()
        self._watch = watch or (lambda simulation: None)

    def run(self, requests: list[Request], most_steps: int = 10**6) -> "Simulation":
        arrivals = sorted(requests, key=lambda request: request.arrival)
        for request in requests:
            request.cache_share = request.most_blocks / self.blocks
        while arrivals or self.scheduler.waiting or self._running:
            if not (self.scheduler.waiting or self._running):
                self.now = max(self.now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= self.now:
                request = arrivals.pop(0)
                if self.scheduler.offer(request, request.arrival) is not None:
                    self._end(request, "refused")
                    self.refused.append(request)
            for request in requests:
                if request.cancel <= self.now and not request.finish and request.arrival <= self.now:
                    self._end(request, "cancelled")
            for request in self.scheduler.expire(self.now):
                self._end(request, "time")
            self._admit()
            self._watch(self)
            self._step()
            assert len(self.steps) <= most_steps, "the simulation does not end"
        assert self.free == self.blocks
        return self

    def _admit(self) -> None:
        while True:
            for request in self.scheduler.admit(self._reserve):
                self._join(request)
            if (victim := self.scheduler.make_room()) is None:
                return
            self._preempt(victim)

    def _preempt(self, victim: Request) -> None:
        self._leave(victim)
        victim.preempted += 1
        victim.lost += sum(row.computed for row in victim.rows)
        for row in victim.rows:
            row.computed = 0

    def _reserve(self, request: Request, new_tokens: int) -> bool:
        needed = request.blocks_for(new_tokens)
        if needed > self.free:
            return False
        self.free -= needed
        request.blocks = needed
        return True

    def _join(self, request: Request) -> None:
        self._running.append(request)
        if math.isnan(request.admitted):
            request.admitted = self.now
            self.admissions.append(request)

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self.free += request.blocks
        request.blocks = 0

    def _end(self, request: Request, finish: str) -> None:
        assert not request.finish, "a request ends once"
        request.finish, request.ended = finish, self.now
        if request in self._running:
            self._leave(request)
        self.scheduler.ended(request)

    def _planned(self):
        """A plan for whose rows there are blocks, after preemptions where they are needed."""
        while True:
            assert self._running == self.scheduler.running
            rows = [row for request in self._running for row in request.rows if row.left]
            plan = self.scheduler.plan(rows)
            if all(self._grow(row, tokens) for row, tokens in plan):
                return rows, plan

    def _grow(self, row: SimulatedRow, tokens: int) -> bool:
        """Whether the row has the blocks for its next tokens. If not, a request has given way."""
        request = next(request for request in self._running if row in request.rows)
        needed = sum(
            math.ceil((each.computed + (tokens if each is row else 0)) / BLOCK) for each in request.rows
        )  # fmt: skip
        missing = max(needed - request.blocks, 0)
        if missing > self.free:
            victim = self.scheduler.preempt()
            assert victim is not None
            assert victim is not self._running[0], "the oldest is never preempted"
            newer = self._running[self._running.index(victim) + 1 :]
            assert victim.client not in {request.client for request in newer}, "the newest of a client gives way"
            self._preempt(victim)
            return False
        self.free -= missing
        request.blocks += missing
        return True

    def _step(self) -> None:
        rows, plan = self._planned()
        if not plan:
            assert not rows, "rows run and none is planned"
            assert not self.scheduler.waiting, "nothing runs, but the head of the queue is not admitted"
            return
        decoding = sum(row.total - row.computed == 1 for row in rows)
        assert sum(row.total - row.computed == 1 for row, _ in plan) == decoding, "rows that decode take part"
        chunks = tuple((row.computed, tokens) for row, tokens in plan if row.total - row.computed > 1)
        seconds = self.machine.seconds(decoding, chunks)
        seconds *= 1 + self.machine.noise * self._random.uniform(-1, 1)
        shapes = {("rows", decoding), *(("chunk", tokens) for _, tokens in chunks)}
        new = bool(shapes - self._shapes)
        seconds += self.machine.making * new
        self._shapes |= shapes
        self.steps.append(SimulatedStep(self.now, decoding, chunks, seconds, new))
        self.now += seconds
        output = 0
        for row, tokens in plan:
            assert 0 < tokens <= row.total - row.computed
            row.computed += tokens
            if row.computed == row.total:
                row.left -= 1
                row.total += 1
                output += 1
        self.scheduler.record_step(seconds, output)
        for request in list(self._running):
            if not any(row.left for row in request.rows):
                self._end(request, "length")
            elif request.deadline <= self.now:
                self._end(request, "time")
