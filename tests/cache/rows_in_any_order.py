"""Calls of slots in any order: shared code of the state machines for every kind of memory."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stored_blocks import StoredBlocks

from block_accounts import check_accounts, check_private, counts
from onward.cache.disk import CurrentStore

MAX_LEN = 32


class Row:
    """A text in a slot. ids: all of it. written: what was written at each position that was computed."""

    def __init__(self, slot, ids, written):
        self.slot, self.ids, self.written = slot, list(ids), list(written)


class RowsInAnyOrder(RuleBasedStateMachine):
    """`start` of a machine sets memory and slots, and calls `begin`. pins: rows whose slots are pinned prefixes.
    stores: one of each key of the weights."""

    def begin(self, size):
        self.rows, self.pins, self.key = [], [], 0
        self.stores = [StoredBlocks(size) for _ in range(3)]
        self.has_store = True
        self.use_store()

    def use_store(self):
        key = self.key
        current = CurrentStore(self.stores[key], lambda: self.key == key) if self.has_store else None
        self.slots.set_store(current)
        if self.slots.disk is not None:
            self.slots.disk.stop()  # `write` is called here

    @rule(ids=st.lists(st.integers(0, 1), min_size=4, max_size=14), writes=st.booleans() | st.just(True))
    def come_and_go(self, ids, writes):
        """A whole text, which is cached and written."""
        before = len(self.rows)
        self.acquire(ids, 2, True)
        for row in self.rows[before:]:
            self.complete(row)
            self.rows.remove(row)
            self.slots.release(row.slot, row.ids[: len(row.written)])
        if writes:
            self.write_behind(20)

    @precondition(lambda self: self.has_store and self.stores[self.key].paths)
    @rule(data=st.data(), own=st.lists(st.integers(0, 1), min_size=1, max_size=4), empties=st.booleans())
    def read(self, data, own, empties):
        """A text that begins as a stored one comes, and memory may have been emptied before."""
        _, ids = data.draw(st.sampled_from(sorted(self.stores[self.key].paths)))
        if empties:
            self.slots.clear()
            self.drop_pins()
        self.acquire([*ids, *own], 2, True)

    @rule(has_store=st.booleans() | st.just(True))
    def store(self, has_store):
        if has_store != self.has_store:
            self.has_store = has_store
            self.use_store()

    @rule(most=st.integers(1, 5))
    def write_behind(self, most):
        """The thread writes some blocks."""
        for _ in range(most):
            if self.slots.disk is not None:
                self.slots.disk.write()

    @rule(right=st.none() | st.integers(0, 3))
    def damage(self, right):
        """From now on only the first parts of each read are right."""
        for store in self.stores:
            store.right = right

    def restore(self, row):
        """The part of a new row's text that is on disk and not in memory."""
        before = counts(self.slots)[2]
        restoration = self.slots.restoration(row.slot)
        if restoration is None:
            return
        restoration.read()
        positions = self.slots.finish(restoration)
        assert self.slots.restoration(row.slot) is None
        assert counts(self.slots)[2] == before, "a row has what it has reserved"
        if positions:
            assert len(row.written) < positions < len(row.ids)
            row.written = [self.text(row.ids[: at + 1]) for at in range(positions)]

    def text(self, ids):
        """What a row of these ids writes at the last of them: the weights count as much as the ids before."""
        return (self.key, *ids)

    def pick(self, data):
        return data.draw(st.sampled_from(self.rows))

    def acquired(self, ids, more, reuse, pin=None):
        length = min(max(len(ids) + more, 0), MAX_LEN)
        if not self.slots.can_hold(length):
            return None
        before = counts(self.slots)
        pinned = 0 if pin is None else self.slots.pinned(pin.slot)
        acquired = self.slots.acquire(ids, length, reuse=reuse, pin=None if pin is None else pin.slot)
        if acquired is None:
            assert self.rows or len(self.pins) > (pin is not None), "an empty cache has room for any valid request"
            assert counts(self.slots) == before
            assert pin is None or self.slots.pinned(pin.slot) == pinned
            return None
        if pin is not None:
            self.pins.remove(pin)
        slot, reused = acquired
        assert reused <= min(len(ids) - 1, length)
        assert reuse or not reused
        row = Row(slot, ids, [self.text(ids[: at + 1]) for at in range(reused)])
        self.rows.append(row)
        self.restore(row)
        return row

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(0, 6))
    def fork(self, data, more):
        row = self.pick(data)
        positions = data.draw(st.integers(0, len(row.written)) | st.just(len(row.written)))
        length = min(positions + more, MAX_LEN)
        if not self.slots.can_hold(length):
            return
        before = counts(self.slots)
        fork = self.slots.fork(row.slot, positions, length)
        if fork is None:
            assert counts(self.slots) == before
        else:
            self.rows.append(Row(fork, row.ids[:positions], row.written[:positions]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(0, MAX_LEN))
    def reserve(self, data, length):
        row = self.pick(data)
        if self.slots.can_hold(length) and self.slots.reserve(row.slot, length):
            assert row.slot.length >= length

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0))
    def release(self, data, part):
        row = self.pick(data)
        self.rows.remove(row)
        self.slots.release(row.slot, row.ids[: round(part * len(row.written))])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0))
    def pin(self, data, part):
        row = self.pick(data)
        del row.written[round(part * len(row.written)) :]
        row.ids = row.ids[: len(row.written)]
        self.rows.remove(row)
        self.slots.release(row.slot, row.ids, pin=True)
        row.pinned = self.slots.pinned(row.slot)
        assert row.pinned <= len(row.ids)
        self.pins.append(row)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        row = data.draw(st.sampled_from(self.pins))
        self.pins.remove(row)
        self.slots.release(row.slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0), own=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def next_turn(self, data, part, own):
        """A row of a pinned text, cut and continued."""
        pin = data.draw(st.sampled_from(self.pins))
        cut = round(part * len(pin.ids))
        pinned, is_whole = self.slots.pinned(pin.slot), part == 1.0
        row = self.acquired([*pin.ids[:cut], *own], 2, True, pin)
        if row is not None and is_whole:
            assert len(row.written) >= self.least_reused(pin, pinned)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0), own=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def next_turn_fails(self, data, part, own):
        """A copy for a turn fails: no slot has gained or lost a block, unless the end of the pin has made room."""
        pin, slots = data.draw(st.sampled_from(self.pins)), self.slots
        ids = [*pin.ids[: round(part * len(pin.ids))], *own]
        memory = data.draw(
            st.sampled_from([each for each in (self.memory, self.memory.windows, self.memory.states) if each])
        )
        match = slots._index.match(ids, len(ids) - 1, pin.slot.root)
        has_room = slots._allocator.fits(slots._allocator.prefix(match), -(-(len(ids) + 2) // slots.block))
        before, stats = list(slots._slots), slots.stats()
        memory.fails = True
        try:
            self.acquired(ids, 2, True, pin)
        except MemoryError:
            after = slots.stats()
            pinned = slots.pinned(pin.slot)
            assert (after.hits, after.lookups) == (stats.hits, stats.lookups)
            assert pinned == pin.pinned if has_room else pinned <= pin.pinned
            assert after.available == stats.available if pinned == pin.pinned else after.available > stats.available
            assert list(slots._slots) == before
            pin.pinned = pinned
        memory.fails = False

    def least_reused(self, pin, pinned):
        """The least positions that the next turn of a pin reuses: there may be other rows' blocks for the same text."""
        return 0

    @rule(key=st.integers(0, 1))
    def use(self, key):
        is_new = key != self.slots.weights_version
        self.slots.set_weights_version(key)
        if is_new:
            self.drop_pins()
        self.key = key
        self.use_store()

    def drop_pins(self):
        for pin in self.pins:
            assert self.slots.pinned(pin.slot) == 0
            pin.pinned = 0

    def found_texts(self):
        """Each node that can be found, with the ids up to its end and what a row wrote at each of them."""
        for node in self.slots._index:
            ids, above = node.tokens, node.parent
            while above is not None:
                ids, above = above.tokens + ids, above.parent
            yield node, ids, [self.text(ids[: at + 1]) for at in range(len(ids))]

    @invariant()
    def blocks_add_up(self):
        if not hasattr(self, "slots"):
            return
        check_accounts(self.slots)
        assert min(counts(self.slots)) >= 0
        for row in self.rows:
            check_private(self.slots, row.slot, len(row.written))
        for pin in self.pins:
            assert self.slots.pinned(pin.slot) == pin.pinned, "a pinned prefix was evicted"

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        for row in self.rows:
            self.slots.release(row.slot, row.ids[: len(row.written)])
            check_accounts(self.slots)
        for pin in self.pins:
            self.slots.release(pin.slot)
            check_accounts(self.slots)
        assert counts(self.slots)[2] == 0
