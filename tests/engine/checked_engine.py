"""An engine whose blocks are checked before every step, and when it is closed."""

import threading

from block_accounts import check_accounts
from onward.cache.manager import PagedCacheManager
from onward.engine import Engine

# Engines that a test has made and not yet closed.
OPEN: list["CheckedEngine"] = []


class CheckedEngine(Engine):
    """Asserts that requests of several texts take no more blocks than they have reserved, and when it is closed that
    nothing is left of its generations."""

    def __init__(self, lm, **limits):
        super().__init__(lm, **limits)
        self.generations = []
        self._recording = threading.Lock()
        OPEN.append(self)
        self.between_steps(self._check_reserved)

    def _check_reserved(self):
        for request in self._worker._scheduler.running:
            slots = [holder.slot for sequence in request.sequences for holder in sequence.holders()]
            assert request.num_sequences == 1 or self.slots.cost_of(slots) <= request._blocks

    def _submit(self, *args):
        generation = super()._submit(*args)
        with self._recording:
            self.generations.append(generation)
        return generation

    @property
    def slots(self):
        return self._worker.slots

    @property
    def thread(self):
        return self._worker._thread

    def between_steps(self, action):
        """Call `action()` in the engine's thread before every step. It may submit and cancel."""
        steps = self._worker._steps
        by_kind = steps.by_kind

        def with_action(work):
            action()
            return by_kind(work)

        steps.by_kind = with_action

    def check(self):
        """The accounts, while the thread does not run."""
        worker = self._worker
        assert not self.thread.is_alive()
        assert all(generation.done for generation in self.generations)
        assert not worker._requests
        assert not worker._cancel_events
        assert not worker._scheduler.waiting
        assert not worker._scheduler.running
        assert worker._scheduler.waiting_tokens == 0
        stats = self.slots.stats()
        assert stats.available == stats.total, "a block is in use, but nothing runs"
        if isinstance(self.slots, PagedCacheManager):
            check_accounts(self.slots)
        stats = self.stats()
        assert (stats.waiting, stats.running, stats.sequences, stats.blocks_used) == (0, 0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks
