"""The cache of an engine, within a limit of memory."""

from torch import Tensor

from onward.cache.manager import PagedCacheManager
from onward.cache.plan import total_memory
from onward.decoding import CacheManager, RowCacheManager
from onward.decoding.row_cache import dims_of
from onward.decoding.shared_cache import MAX_BLOCKS, blocks_within
from onward.errors import OptionError, RequestError
from onward.models import Model
from onward.ops.heads import BLOCK
from onward.program.leaves import leaves_of
from onward.util.checks import check_whole
from onward.util.text import in_bytes

# The largest share of a device's memory that a cache takes by default.
_MAX_MEMORY_SHARE = 0.25
# Positions per sequence for models without a max_seq_len.
_DEFAULT_CONTEXT = 4096


def context_of(model: Model) -> int:
    return _DEFAULT_CONTEXT if model.max_seq_len is None else model.max_seq_len


def engine_slots(model: Model, max_sequences: int, cache_memory: int | None) -> CacheManager:
    """The cache of an engine. Raises `RequestError` for too little memory for one block.

    cache_memory: bytes of keys, values and recurrent states. None allocates for all sequences at full length, up to a
        quarter of the memory of the model's device. A paged cache takes memory only as it is written.
    """
    if cache_memory is not None:
        check_whole("cache_memory", cache_memory, low=1)
    limit = int(_MAX_MEMORY_SHARE * total_memory(model.device)) if cache_memory is None else cache_memory
    context = context_of(model)
    if model.new_blocks is None:
        return _dense(model, max_sequences, context, limit, cache_memory)
    single = PagedCacheManager(model.new_blocks(1), max_len=context, cached_blocks=0)
    unit = single.unit_nbytes
    limit = min(limit, max_sequences * single.cost(context) * unit)
    if limit < (minimum := single.cost(BLOCK) * unit):
        raise OptionError(
            "cache_memory",
            f"must be at least one block of {BLOCK} positions, {in_bytes(minimum)}; got {in_bytes(limit)}",
        )
    max_blocks = min(MAX_BLOCKS, max_sequences * -(-context // BLOCK))
    blocks = blocks_within(model.new_blocks, limit, max_blocks, model.device)
    return PagedCacheManager(blocks, max_len=context, cached_blocks=limit // unit, nbytes=limit)


def _dense(model: Model, rows: int, context: int, limit: int, cache_memory: int | None) -> CacheManager:
    minimum = min(BLOCK, context)
    nbytes = sum(leaf.nbytes for leaf in leaves_of(model.new_cache(1, minimum)) if isinstance(leaf, Tensor))
    position = nbytes // minimum
    length = context if not position else min(context, limit // (rows * position))
    if length < minimum:
        raise RequestError(
            f"cache_memory={limit} bytes is too little for {rows} texts of {minimum} positions, of which each takes "
            f"{in_bytes(position)}: give more, or lower max_sequences"
        )
    cache = model.new_cache(rows, length)
    return RowCacheManager(cache, rows, length, dims_of(model, cache, rows), model)


def nbytes_of(slots: CacheManager) -> int:
    """The most memory that a cache takes."""
    if isinstance(slots, PagedCacheManager):
        return slots.stats().total * slots.unit_nbytes
    assert isinstance(slots, RowCacheManager)
    return sum(leaf.nbytes for leaf in leaves_of(slots.cache) if isinstance(leaf, Tensor))
