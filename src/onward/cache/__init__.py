"""Caches: where the keys and values of past positions are kept."""

from onward.cache.blocks import KVBlocks, PagedKVCache
from onward.cache.kv import KVCache
from onward.cache.positions import NamedDims, SizedCache, length_of
from onward.cache.shape import LayerShape
from onward.cache.slot import RowAdapter, Slot
from onward.cache.slots import PagedSlots
from onward.cache.states import StateShape

__all__ = [
    "KVBlocks",
    "KVCache",
    "LayerShape",
    "NamedDims",
    "PagedKVCache",
    "PagedSlots",
    "RowAdapter",
    "SizedCache",
    "Slot",
    "StateShape",
    "length_of",
]
