"""Where keys and values of past positions live."""

from onward.cache.kv import KVCache
from onward.cache.sized import CompactableCache, SizedCache, length_of

__all__ = ["CompactableCache", "KVCache", "SizedCache", "length_of"]
