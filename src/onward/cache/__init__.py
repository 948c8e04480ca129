"""KV caches: storage for the keys and values of past positions."""

from onward.cache.dense import AdaptedCache, KVCache, SizedCache, length_of
from onward.cache.manager import PagedCacheManager
from onward.cache.paged import KVPool, PagedKVCache
from onward.cache.plan import CachePlan, LayerShape, StateShape
from onward.cache.slot import AdapterRef, Slot
from onward.cache.whole import WholeTexts

__all__ = [
    "AdaptedCache", "AdapterRef", "CachePlan", "KVCache", "KVPool", "LayerShape", "PagedCacheManager", "PagedKVCache",
    "SizedCache", "Slot", "StateShape", "WholeTexts", "length_of",
]  # fmt: skip
