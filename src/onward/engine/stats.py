"""The numbers of an engine."""

from dataclasses import dataclass, field
from typing import Any

from onward.decoding import CacheManager


@dataclass
class Seconds:
    """Seconds spent so far: schedule: on deciding what a step does; step: on the model and on choosing tokens;
    give_out: on handing tokens on."""

    schedule: float = 0.0
    step: float = 0.0
    give_out: float = 0.0


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


def block_counts(slots: CacheManager) -> dict[str, Any]:
    """The fields of `EngineStats` that tell of the cache."""
    return {
        "blocks": slots.total,
        "blocks_used": slots.total - slots.available,
        "blocks_cached": slots.cached,
        "blocks_free": slots.available - slots.cached,
        "hit_rate": slots.hits / slots.lookups if slots.lookups else 0.0,
    }
