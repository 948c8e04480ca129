"""How many replicas there should be: as many as the work that they hold fills.

Nothing here knows Ray or a clock, so simulations may run the same code.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.engine.stats import EngineStats

# What a replica reports under.
LOAD = "load"
# Seconds for which prompts may wait: those that take as long fill a replica.
_WAIT = 10.0


def load_of(stats: "EngineStats", max_sequences: int) -> float:
    """How full a replica is: 1 where it runs as much as it can at once, or has prompts to process for `_WAIT` seconds.

    Requests that wait count as those that run. max_sequences: the most texts that it runs at once.
    """
    requests = (stats.running + stats.waiting) / max_sequences
    speed = stats.prompt_tokens_per_second
    prompts = stats.waiting_tokens / speed / _WAIT if speed > 0 else 0.0
    return max(requests, stats.running / max_sequences + prompts)


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """A policy of Ray Serve's: how many replicas what all have would fill. Ray rounds it up and keeps its bounds."""
    return sum(context.aggregated_metrics.get(LOAD, {}).values()), {}
