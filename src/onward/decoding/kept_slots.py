"""Which slots a call gets: its own, or those that the calls of one owner share."""

import weakref

import torch

from onward.cache import KVBlocks
from onward.cache.budget import Prices
from onward.cache.buffers import is_lazy
from onward.cache.slots import PagedSlots
from onward.decoding.dense_slots import DenseSlots
from onward.decoding.slots import Slots
from onward.errors import RequestError
from onward.models import Model, NewBlocks, padded_length
from onward.models.weights_version import computation
from onward.native.machine_memory import memory_limit
from onward.ops.blocks import BLOCK

# The most blocks of a memory. Each costs some bytes of accounts, also one that is never used.
MOST_BLOCKS = 2**15


def slots_for(model: Model, rows: int, length: int) -> Slots:
    """Slots of one's own for `rows` sequences of at most `length` positions."""
    if model.new_blocks is None:
        return DenseSlots.of(model, rows, length)
    return PagedSlots(
        model.new_blocks(rows * -(-length // BLOCK)), max_len=longest_text(model, length), cached_blocks=0
    )


def longest_text(model: Model, length: int) -> int:
    """How many positions a table of blocks has room for: as many for every call, so that all calls share programs."""
    return padded_length(length, model) if model.max_seq_len is None else model.max_seq_len


class KeptSlots:
    """The slots that the calls of one owner share, so that prompts which begin alike are not processed twice.

    memory: the most bytes of keys and values that are kept between calls; 0 keeps none.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._slots: PagedSlots | None = None
        self._model: weakref.ref[Model] | None = None

    def of(self, model: Model, rows: int, length: int) -> Slots:
        """Slots for `rows` sequences of at most `length` positions. Where the shared ones have no room for them, or the
        model's cache is not in blocks, they are the call's own."""
        if model.new_blocks is None or not self.memory:
            return slots_for(model, rows, length)
        slots = self._shared(model, length)
        if rows * slots.blocks_for(length) > slots.available or length > slots.max_len:
            return slots_for(model, rows, length)
        slots.use(computation(model))
        return slots

    def _shared(self, model: Model, length: int) -> PagedSlots:
        if self._slots is None or self._model is None or self._model() is not model:
            assert model.new_blocks is not None, "asked before"
            # Memory that is never written is never allocated on the CPU, so all of the machine's may be asked for.
            limit = memory_limit()
            limit = limit if is_lazy(limit, model.device) else self.memory
            blocks = blocks_within(model.new_blocks, limit, MOST_BLOCKS, model.device)
            self._slots = PagedSlots(
                blocks,
                max_len=longest_text(model, length),
                cached_blocks=min(self.memory, limit) // Prices.of(blocks).unit,
                nbytes=limit,
            )
            self._model = weakref.ref(model)
        return self._slots


def blocks_within(new_blocks: NewBlocks, nbytes: int, most: int, device: torch.device) -> KVBlocks:
    """Memory of at most so many bytes, and of at most `most` blocks of each kind, one at least.

    On the CPU, where memory that is not written is not taken, each kind may have all of it, since slots bound them
    together. Elsewhere both kinds have equally many. Where the system refuses so much, for a process may be limited, it
    is less.
    """
    one = new_blocks(1)
    whole, window = one.block_nbytes, 0 if one.windows is None else one.windows.block_nbytes
    if device.type != "cpu":
        whole = window = whole + window
    count, windows = (max(1, min(nbytes // each, most)) if each else most for each in (whole, window))
    while max(count, windows) > 1:
        try:
            return new_blocks(count) if one.windows is None else new_blocks(count, windows)
        except RequestError:
            count, windows = -(-count // 2), -(-windows // 2)
    return one
