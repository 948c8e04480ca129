"""Slots with calls in any order: a row reads what was written for its text, and no block is lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from rows_in_any_order import Row, RowsInAnyOrder
from written_blocks import WrittenBlocks

from block_accounts import check_accounts, counts
from onward.cache.manager import PagedCacheManager
from onward.errors import ContextOverflowError

MAX_LEN = 20
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def common_length(text, other):
    return next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


class AnyOrder(RowsInAnyOrder):
    @initialize(
        count=st.integers(1, 14),
        size=st.integers(2, 4),
        cached=st.integers(0, 14),
        warm=st.integers(0, 3),
    )
    def start(self, count, size, cached, warm):
        self.memory = WrittenBlocks(count, size)
        self.slots = PagedCacheManager(self.memory, max_len=MAX_LEN, cached_blocks=cached, warm_blocks=warm, block=size)
        self.begin(size)

    @rule(ids=TEXTS, more=st.integers(-4, 8), reuse=st.booleans() | st.just(True))
    def acquire(self, ids, more, reuse):
        length = min(max(len(ids) + more, 0), MAX_LEN)
        if not self.slots.can_hold(length):
            with pytest.raises(ContextOverflowError):
                self.slots.acquire(ids, length)
            return
        before = self.slots.stats()
        room = self.slots.stats().available
        limit = min(len(ids) - 1, length)
        longest = max((common_length(text, ids[:limit]) for _, text, _ in self.found_texts()), default=0)
        acquired = self.slots.acquire(ids, length, reuse=reuse)
        if acquired is None:
            assert self.slots.stats() == before
            assert room < self.slots.cost(length)
            return
        slot, reused = acquired
        assert reused == (longest if reuse else 0)
        assert slot.length == length
        written = [self.text(ids[: at + 1]) for at in range(reused)]
        assert self.memory.read(slot, reused) == written
        self.rows.append(Row(slot, ids, written))
        self.restore(self.rows[-1])

    def least_reused(self, pin, pinned):
        return pinned // self.memory.size * self.memory.size  # there may be no room for a copy of the last one

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 6), token=st.integers(0, 1), note=st.booleans())
    def compute(self, data, count, token, note):
        """A step: ids that are pending, or a new one."""
        row = self.pick(data)
        for _ in range(count):
            at = len(row.written)
            if at == row.slot.length:
                break
            if at == len(row.ids):
                row.ids.append(token)
            row.written.append(self.text(row.ids[: at + 1]))
            self.memory.write(row.slot, at, row.written[-1])
        if note:
            self.slots.commit(row.slot, len(row.written), lambda first, last: row.ids[first:last])

    def complete(self, row):
        for at in range(len(row.written), min(len(row.ids), row.slot.length)):
            row.written.append(self.text(row.ids[: at + 1]))
            self.memory.write(row.slot, at, row.written[-1])
        self.slots.commit(row.slot, len(row.written), lambda first, last: row.ids[first:last])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def draft(self, data):
        """Positions past what is computed are written with ids that are taken back."""
        row = self.pick(data)
        for at in range(len(row.written), row.slot.length):
            self.memory.write(row.slot, at, "a draft")

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(0, 6))
    def fork(self, data, more):
        row = self.pick(data)
        positions = data.draw(st.integers(0, len(row.written)))
        length = min(positions + more, MAX_LEN)
        if not self.slots.can_hold(length):
            return
        before, room = self.slots.stats(), self.slots.stats().available
        slot = self.slots.fork(row.slot, positions, length)
        if slot is None:
            assert self.slots.stats() == before
            assert room < self.slots.cost(length) - positions // self.memory.size
        else:
            self.rows.append(Row(slot, row.ids[:positions], row.written[:positions]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(0, MAX_LEN))
    def reserve(self, data, length):
        row = self.pick(data)
        if not self.slots.can_hold(length):
            with pytest.raises(ContextOverflowError):
                self.slots.reserve(row.slot, length)
            return
        before, room = self.slots.stats(), self.slots.stats().available
        missing = self.slots.cost(length) - len(row.slot.blocks)
        fits = self.slots.reserve(row.slot, length)
        assert fits == (missing <= room)
        assert row.slot.length >= length if fits else self.slots.stats() == before

    @rule(key=st.integers(0, 2))
    def use(self, key):
        is_new = key != self.slots.weights_version
        self.slots.set_weights_version(key)
        if is_new:
            assert not list(self.found_texts())
            self.drop_pins()
        self.key = key
        self.use_store()

    @rule()
    def clear(self):
        count = len({block for row in self.rows for block in row.slot.blocks})
        self.slots.clear()
        self.drop_pins()
        assert counts(self.slots)[1:] == (0, count)
        assert not self.slots._kinds[0].warm

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def view(self, data):
        rows = data.draw(st.lists(st.sampled_from(self.rows), unique=True))
        table = self.slots.view([row.slot for row in rows], [0] * len(rows), 0).cache.tolist()
        width = self.slots.cost(MAX_LEN)
        assert table == [row.slot.blocks + [self.memory.count] * (width - len(row.slot.blocks)) for row in rows]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), ids=TEXTS)
    def fail(self, data, ids):
        """A copy fails: no slot has gained or lost a block."""
        row, used_blocks, slots = self.pick(data), counts(self.slots)[2], list(self.slots._slots)
        positions = data.draw(st.integers(0, len(row.written)))
        self.memory.fails = True
        try:
            if data.draw(st.booleans()):
                fork = self.slots.fork(row.slot, positions, positions)
            else:
                ids = [*row.ids[:positions], *ids]
                fork, _ = self.slots.acquire(ids, len(ids)) or (None, 0) if self.slots.can_hold(len(ids)) else (None, 0)
            if fork is not None:
                self.slots.release(fork)
        except MemoryError:
            pass
        self.memory.fails = False
        assert counts(self.slots)[2] == used_blocks
        assert list(self.slots._slots) == slots

    @invariant()
    def every_row_has_its_text(self):
        for row in getattr(self, "rows", ()):
            assert self.memory.read(row.slot, len(row.written)) == row.written
        for pin in getattr(self, "pins", ()):
            assert self.memory.read(pin.slot, pin.pinned) == pin.written[: pin.pinned]

    @invariant()
    def cached_texts_equal_written_ones(self):
        if hasattr(self, "slots"):
            for node, _, written in self.found_texts():
                positions = len(node.tokens)
                assert self.memory.texts[node.blocks[0]][:positions] == written[-positions:]

    @invariant()
    def slots_have_all_blocks_in_use(self):
        if hasattr(self, "slots"):
            used = {block for row in [*self.rows, *self.pins] for block in row.slot.blocks}
            assert counts(self.slots)[2] == len(used)
            assert self.slots.stats().total == self.memory.count

    def teardown(self):
        super().teardown()
        if not hasattr(self, "slots"):
            return
        self.slots.clear()
        check_accounts(self.slots)
        assert counts(self.slots)[0] == self.memory.count
        assert self.memory.texts == [[None] * self.memory.size] * self.memory.count, "all memory was given back"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=50)
