"""A model over several processes: its layers in stages (docs/sharding.md)."""

from onward.distributed.ranks import load_ranks, run_rank
from onward.distributed.settings import Settings

__all__ = ["Settings", "load_ranks", "run_rank"]
