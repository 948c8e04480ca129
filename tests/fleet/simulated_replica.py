"""A replica: the engine's scheduler, with step times instead of a model."""

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onward.engine.scheduler import Scheduler

# Positions of a block of the cache.
BLOCK = 64


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: those of any, of a row, of a position that a row reads, of a chunk, of a prompt's token, and
    of a position that one of these attends to.
    """

    step: float
    row: float
    position: float
    chunk: float
    token: float
    pair: float

    def decode(self, rows: int, context: int) -> float:
        return self.step + self.row * rows + self.position * context

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> float:
        """chunks: the first position and the tokens of each."""
        return sum(
            self.chunk + self.token * tokens + self.pair * tokens * (position + tokens / 2)
            for position, tokens in chunks
        )


@dataclass(eq=False)
class Text:
    """A request at one replica: a `SchedulerRequest`, and its row.

    tokens: of its prompt, whose whole blocks have hashes. new: tokens that it generates. emitted: those that it had
    when it came here. generated: those that were generated here; first: when.
    """

    tokens: int
    new: int
    blocks: tuple[int, ...] = ()
    emitted: int = 0
    priority: int = 0
    client: str | None = None
    num_sequences: int = 1
    cache_share: float = 0.0
    deadline: float = math.inf
    computed: int = 0
    cached: int = 0
    reserved: int = 0
    generated: int = 0
    first: float = math.nan

    def __post_init__(self) -> None:
        self.total = self.prompt_tokens = self.tokens + self.emitted
        self.left = self.new - self.emitted
        self.max_new_tokens = self.new - self.emitted


class Prefixes:
    """Which blocks of prompts a cache has; the ones that were used longest ago go first."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def found(self, blocks: Sequence[int]) -> int:
        """How many of these, from the first on, are there."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
            self._blocks.move_to_end(block)
        return len(blocks)

    def keep(self, blocks: Sequence[int], room: int) -> None:
        """Note computed blocks. room: the number of blocks that no running request uses."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > max(0, min(room, self._most)):
            self._blocks.popitem(last=False)


class SimulatedEngine:
    """Serves texts on a clock of its caller's.

    Its driver calls `advance(now)` at the time in `next`, and after each `offer`. Steps in which all rows decode and no
    request waits decide nothing: a run of them is one event, which an offer cuts at the end of a step.

    ended: called with each text and the time at which it had all its tokens.
    """

    def __init__(
        self,
        clock: StepTime,
        ended: Callable[[Text, float], None],
        *,
        max_sequences: int = 32,
        max_waiting: int = 1024,
        blocks: int = 4096,
    ) -> None:
        self.scheduler: Scheduler[Text] = Scheduler(
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_waiting_tokens=1_000_000,
        )
        self.next = math.inf  # when a step or a run of steps ends
        self.load = 0  # requests that wait or run
        self.prompt_tokens = self.cached_tokens = 0
        self._clock, self._ended = clock, ended
        self._blocks = self._free = blocks
        self._prefixes = Prefixes(blocks)
        self._plan: list[tuple[Text, int]] = []
        self._durations: list[float] = []  # of the steps until `next`
        self._began = 0.0

    def offer(self, text: Text, now: float) -> bool:
        """Queue a text; whether there is room for it."""
        if self.scheduler.offer(text, now) is not None:
            return False
        self.load += 1
        if self._durations:
            self._cut(now)
        return True

    def cancel(self, text: Text, now: float) -> None:
        """End a text without a word; it leaves with the step that runs."""
        text.left = 0
        if text not in self.scheduler.running:
            self.scheduler.ended(text)
            self.load -= 1
        elif self._durations:
            self._cut(now)

    def advance(self, now: float) -> None:
        """Advance to the present: at most one run of steps ends, and the next begins."""
        if now < self.next:
            return
        self.settle(now)
        self._begin(now)

    def settle(self, now: float) -> None:
        """Let the steps that have ended by now have been run."""
        if now >= self.next:
            count, end = len(self._durations), self.next
        else:
            ends = list(itertools.accumulate(self._durations, initial=self._began))[1:]
            count = bisect.bisect_right(ends, now)
            end = ends[count - 1] if count else self._began
        if count:
            self._run(self._durations[:count], end)
            del self._durations[:count]
            self._began = end

    def _begin(self, now: float) -> None:
        for text in self.scheduler.running:
            if text.left <= 0:  # it was cancelled
                self._leave(text)
        self.scheduler.expire(now)
        self.scheduler.admit(self._reserve)
        running = self.scheduler.running
        self._plan = self.scheduler.plan(running)
        self._durations, self._began, self.next = [], now, math.inf
        if not self._plan:
            return
        decoding = [text for text, _ in self._plan if text.total - text.computed == 1]
        chunks = [(text.computed, tokens) for text, tokens in self._plan if text.total - text.computed > 1]
        steps = 1
        if not chunks and not self.scheduler.waiting:
            steps = min(text.left for text in decoding)
        rows, context = len(decoding), sum(text.computed for text in decoding)
        more = self._clock.prefill(chunks)
        self._durations = [
            (self._clock.decode(rows, context + rows * at) if rows or chunks else 0.0) + more for at in range(steps)
        ]
        self.next = now + sum(self._durations)

    def _cut(self, now: float) -> None:
        """Let the run of steps end with the one that runs now."""
        end = self._began
        for at, seconds in enumerate(self._durations):
            end += seconds
            if end > now:
                del self._durations[at + 1 :]
                self.next = end
                return

    def _run(self, durations: Sequence[float], end: float) -> None:
        """This number of steps of the plan were run; several only if all rows decode."""
        output = 0
        for text, tokens in self._plan:
            text.computed += tokens
            if text.computed == text.total:
                if not text.generated:
                    text.first = self._began + durations[0]
                more = len(durations)
                text.computed += more - 1
                text.total += more
                text.left -= more
                text.generated += more
                output += 1
        for seconds in durations:
            self.scheduler.record_step(seconds, output)
        for text, _ in self._plan:
            if text.left == 0 and text.generated:
                self._leave(text)
                self._ended(text, end)

    def _reserve(self, text: Text, new_tokens: int) -> bool:
        found = min(self._prefixes.found(text.blocks) * BLOCK, text.prompt_tokens - 1)
        needed = math.ceil((text.prompt_tokens + new_tokens) / BLOCK)
        if needed > self._free:
            return False
        self._free -= needed
        text.reserved, text.computed, text.cached = needed, found, found
        self.prompt_tokens += text.prompt_tokens
        self.cached_tokens += found
        return True

    def _leave(self, text: Text) -> None:
        self.scheduler.ended(text)
        self.load -= 1
        self._free += text.reserved
        if text.computed >= text.tokens:
            self._prefixes.keep(text.blocks, self._free)
