"""A model over several processes, with its layers divided into pipeline stages (docs/sharding.md)."""

from onward.distributed.ranks import Settings, load_ranks, run_rank

__all__ = ["Settings", "load_ranks", "run_rank"]
