"""A model over several processes: its layers in stages (docs/sharding.md)."""

from onward.distributed.ranks import Settings, load_ranks, run_rank

__all__ = [
    "Settings",
    "load_ranks",
    "run_rank",
]
