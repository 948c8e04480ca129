"""The statistics of an engine."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Seconds:
    """Seconds spent so far: schedule: planning steps; step: running the model and sampling; give_out: delivering
    tokens."""

    schedule: float = 0.0
    step: float = 0.0
    give_out: float = 0.0


PARTS = tuple(each.name for each in fields(Seconds))
# The fields of `EngineStats` that are counts.
COUNTS = ("steps", "tokens", "preemptions", "restored_tokens", "blocks_written", "blocks_dropped")


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine, and its counts since it was created.

    waiting, running: requests. sequences: the running sequences. waiting_tokens: prompt tokens in the queue.
    blocks: all blocks of the cache; blocks_used: those of running sequences; blocks_cached: those of the prefix cache;
        blocks_free: the others. A block has 64 positions; without paging it is a row, and for models with sliding or
        recurrent layers it is a unit of memory.
    hit_rate: the share of prompt ids that were found in the cache.
    tokens_per_second, prompt_tokens_per_second: over the last half minute of work.
    steps, tokens, preemptions: counts. seconds: for each part of a step.
    restored_tokens: the tokens that were read from the prefix cache on disk. blocks_written, blocks_dropped: the blocks
        that were given to it, and those that it could not take.
    """

    waiting: int
    running: int
    sequences: int
    waiting_tokens: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    hit_rate: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    steps: int
    tokens: int
    preemptions: int
    seconds: Seconds = field(default_factory=Seconds)
    restored_tokens: int = 0
    blocks_written: int = 0
    blocks_dropped: int = 0

    @property
    def counts(self) -> dict[str, Any]:
        """The counts and the seconds of each part, which add up over engines."""
        seconds = {f"seconds_{part}": getattr(self.seconds, part) for part in PARTS}
        return {name: getattr(self, name) for name in COUNTS} | seconds
