"""A small cache under a fixed load: prefix hits, evictions, preemptions and the maximum of blocks in use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tests.golden.bits import family_model
from tests.held_engine import held

import onward
from onward.cache import PagedCacheManager
from onward.cache.allocator import Allocator

# Whole texts, sliding windows, recurrent states.
FAMILIES = ("qwen3", "gemma3", "qwen3next")
_REQUESTS = 24
_OPTIONS = {"temperature": 0.0, "ignore_eos": True}


def all_counts() -> dict[str, dict[str, float]]:
    """The counts of each family."""
    return {family: counts(family) for family in FAMILIES}


def counts(family: str) -> dict[str, float]:
    """Ids found in the cache, evicted blocks, preemptions, steps, all blocks, and those with cached prefixes."""
    return _alone(family) | _together(family)


def _engine(family: str, overcommit: float = 1.0) -> onward.Engine:
    """An engine whose cache holds three texts of full length. Steps are not cut by the clock."""
    model = family_model(family, torch.float32)
    one = PagedCacheManager(model.new_blocks(1), max_len=256, cached_blocks=0)
    memory = 3 * one.cost(256) * one.unit_nbytes
    lm = onward.LanguageModel(model, prefill_chunk=64)
    return onward.Engine(lm, max_sequences=8, cache_memory=memory, max_step_ms=1e9, overcommit=overcommit)


def _prompt(number: int) -> list[int]:
    """130 ids shared by every second request, then 20 unique ones."""
    return [(7 * at + number % 2) % 250 for at in range(130)] + [(3 * at + number) % 250 for at in range(20)]


def _alone(family: str) -> dict[str, float]:
    """One request after another."""
    with _engine(family) as engine, _evictions() as evictions:
        cached = 0
        for number in range(_REQUESTS):
            cached += engine.submit(_prompt(number), max_new_tokens=12, **_OPTIONS).result().cached_tokens
        stats = engine.stats()
    return {"hits": cached, "evictions": len(evictions), "blocks": stats.blocks, "kept": stats.blocks_cached}


def _together(family: str) -> dict[str, float]:
    """All requests at once, with fewer blocks reserved than they may need."""
    with _engine(family, overcommit=4.0) as engine, _evictions() as evictions:
        with held(engine) as reached:
            first = engine.submit([1], max_new_tokens=1, **_OPTIONS)
            assert reached.wait(60)
            running = [engine.submit(_prompt(number), max_new_tokens=90, **_OPTIONS) for number in range(_REQUESTS)]
        first.result()
        cached = sum(request.result().cached_tokens for request in running)
        stats = engine.stats()
    return {
        "hits together": cached,
        "evictions together": len(evictions),
        "preemptions": stats.preemptions,
        "steps": stats.steps,
    }


@contextmanager
def _evictions() -> Iterator[list[None]]:
    """An item for each eviction inside the block."""
    evictions: list[None] = []
    evict = Allocator.evict

    def counted(allocator: Allocator) -> bool:
        evicted = evict(allocator)
        evictions.extend([None] * evicted)
        return evicted

    Allocator.evict = counted
    try:
        yield evictions
    finally:
        Allocator.evict = evict
