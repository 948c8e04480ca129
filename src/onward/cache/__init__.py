"""Caches: where the keys and values of past positions are kept."""

from onward.cache.kv import KVCache
from onward.cache.sized import CompactableCache, SizedCache, length_of

__all__ = ["CompactableCache", "KVCache", "SizedCache", "length_of"]
