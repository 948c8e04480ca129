"""The numbers of an engine."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from onward.decoding import Slots
from onward.engine.policy import Policy


@dataclass
class Seconds:
    """Seconds spent so far: schedule: on deciding what a step does; step: on the model and on choosing tokens;
    give_out: on handing tokens on."""

    schedule: float = 0.0
    step: float = 0.0
    give_out: float = 0.0


class BlockCounts(NamedTuple):
    """Blocks of a cache: in all, held, kept for prompts that begin alike; and the share of prompts' ids found there."""

    total: int
    held: int
    cached: int
    hit_rate: float

    @classmethod
    def of(cls, slots: Slots) -> Self:
        hit_rate = slots.hits / slots.lookups if slots.lookups else 0.0
        return cls(slots.total, slots.total - slots.available, slots.cached, hit_rate)


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now, and its counts since it was made.

    waiting, running: requests. sequences: texts that run. waiting_tokens: ids of the prompts that wait.
    blocks: of the cache in all; blocks_used: held by texts that run; blocks_cached: kept for prompts that begin alike;
        blocks_free: the others. A block has 64 positions; of a cache that is not paged it is a row. Where layers slide
        or are recurrent it is a unit of memory.
    hit_rate: of the ids of prompts, the share that did not have to be processed, for the cache held them.
    tokens_per_second, prompt_tokens_per_second: over the last half minute of work.
    steps, tokens, preemptions: counts. seconds: in each part of a step.
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

    @classmethod
    def of(
        cls, policy: Policy[Any], blocks: BlockCounts, sequences: int, steps: int, tokens: int, seconds: Seconds
    ) -> "EngineStats":
        return cls(
            waiting=policy.waiting,
            running=len(policy.running),
            sequences=sequences,
            waiting_tokens=policy.waiting_tokens,
            blocks=blocks.total,
            blocks_used=blocks.held,
            blocks_cached=blocks.cached,
            blocks_free=blocks.total - blocks.held - blocks.cached,
            hit_rate=blocks.hit_rate,
            tokens_per_second=policy.throughput.output,
            prompt_tokens_per_second=policy.throughput.prompt,
            steps=steps,
            tokens=tokens,
            preemptions=policy.preemptions,
            seconds=Seconds(seconds.schedule, seconds.step, seconds.give_out),
        )
