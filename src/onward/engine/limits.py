"""How much memory an engine's cache takes, and the slots in it."""

from torch import Tensor

from onward.cache.slots import PagedSlots
from onward.checks import check_whole
from onward.decoding import DenseSlots, Slots
from onward.decoding.dense_slots import dims_of
from onward.decoding.kept_slots import MOST_BLOCKS, blocks_within
from onward.errors import RequestError
from onward.models import Model
from onward.native.machine_memory import memory_limit
from onward.ops.blocks import BLOCK
from onward.program.leaves import leaves_of
from onward.reprs import in_bytes

# The share of the machine's memory that a cache takes at most where nothing else is asked for.
_SHARE = 0.25
# Positions of a text where the model does not say how many it serves.
_UNKNOWN_CONTEXT = 4096


def engine_slots(model: Model, max_sequences: int, cache_memory: int | None) -> Slots:
    """Slots for an engine.

    cache_memory: bytes of keys, values and recurrent states; None takes what all sequences of full length need, and at
        most a quarter of the machine's memory. A cache in blocks takes memory only as it is written.

    Raises:
        RequestError: so much memory holds not even one block.
    """
    if cache_memory is not None:
        check_whole("cache_memory", cache_memory, low=1)
    limit = int(_SHARE * memory_limit()) if cache_memory is None else cache_memory
    context = _UNKNOWN_CONTEXT if model.max_seq_len is None else model.max_seq_len
    if model.new_blocks is None:
        return _dense(model, max_sequences, context, limit, cache_memory)
    one = PagedSlots(model.new_blocks(1), max_len=context, cached_blocks=0)
    unit = one.unit_nbytes
    limit = min(limit, max_sequences * one.blocks_for(context) * unit)
    if limit < (least := one.blocks_for(BLOCK) * unit):
        raise RequestError(
            f"cache_memory={cache_memory} bytes holds not even one block of {BLOCK} positions, which takes "
            f"{in_bytes(least)}: give more"
        )
    most = min(MOST_BLOCKS, max_sequences * -(-context // BLOCK))
    blocks = blocks_within(model.new_blocks, limit, most, model.device)
    return PagedSlots(blocks, max_len=context, cached_blocks=limit // unit, nbytes=limit)


def _dense(model: Model, rows: int, context: int, limit: int, cache_memory: int | None) -> Slots:
    """Rows of one dense cache, as long as fit into the memory."""
    least = min(BLOCK, context)
    position = _bytes_of(model.new_cache(1, least)) // least
    length = context if not position else min(context, limit // (rows * position))
    if length < least:
        raise RequestError(
            f"cache_memory={limit} bytes is too little for {rows} texts of {least} positions, of which each takes "
            f"{in_bytes(position)}: give more, or lower max_sequences"
        )
    cache = model.new_cache(rows, length)  # no longer than that, for the memory is a bound
    return DenseSlots(cache, rows, length, dims_of(model, cache, rows), model)


def _bytes_of(cache: object) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(cache) if isinstance(leaf, Tensor))
