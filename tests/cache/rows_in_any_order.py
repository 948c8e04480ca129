"""Calls of slots in any order: what machines of every kind of memory have in common."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from block_accounts import check_accounts
from onward.errors import ContextOverflowError

MAX_LEN = 32


class Row:
    """A text in a slot. ids: all of it. written: what was written at each position that was computed."""

    def __init__(self, slot, ids, written):
        self.slot, self.ids, self.written = slot, list(ids), list(written)


class RowsInAnyOrder(RuleBasedStateMachine):
    """`start` of a machine sets memory, slots, rows and key."""

    def text(self, ids):
        """What a row of these ids writes at the last of them: the weights count as much as the ids before."""
        return (self.key, *ids)

    def pick(self, data):
        return data.draw(st.sampled_from(self.rows))

    def acquired(self, ids, more, reuse):
        length = min(max(len(ids) + more, 0), MAX_LEN)
        if not self.slots.can_hold(length):
            return
        before = self.slots.free, self.slots.cached, self.slots.held
        acquired = self.slots.acquire(ids, length, reuse=reuse)
        if acquired is None:
            assert self.rows, "where nobody holds anything there is room for whatever can be held"
            assert (self.slots.free, self.slots.cached, self.slots.held) == before
            return
        slot, reused = acquired
        assert reused <= min(len(ids) - 1, length)
        assert reuse or not reused
        self.rows.append(Row(slot, ids, [self.text(ids[: at + 1]) for at in range(reused)]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(0, 6))
    def fork(self, data, more):
        row = self.pick(data)
        positions = data.draw(st.integers(0, len(row.written)) | st.just(len(row.written)))
        length = min(positions + more, MAX_LEN)
        if not self.slots.can_hold(length):
            return
        held = self.slots.holds(row.slot, positions)
        fork = self.slots.fork(row.slot, positions, length)
        assert held or fork is None
        if fork is not None:
            self.rows.append(Row(fork, row.ids[:positions], row.written[:positions]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(0, MAX_LEN))
    def reserve(self, data, length):
        row = self.pick(data)
        if self.slots.can_hold(length) and self.slots.reserve(row.slot, length):
            assert row.slot.length >= length

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data):
        row = self.pick(data)
        positions = data.draw(st.integers(0, len(row.written)))
        if not self.slots.holds(row.slot, positions):
            return
        try:
            self.slots.truncate(row.slot, positions)
        except ContextOverflowError:
            return
        del row.written[positions:], row.ids[positions:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), part=st.floats(0, 1) | st.just(1.0))
    def release(self, data, part):
        row = self.pick(data)
        self.rows.remove(row)
        self.slots.release(row.slot, row.ids[: round(part * len(row.written))])

    @rule(key=st.integers(0, 1))
    def use(self, key):
        self.slots.set_weights_version(key)
        self.key = key

    def found_texts(self):
        """Each node that can be found, with the ids up to its end and what a row wrote at each of them."""
        for node in self.slots._pool.trie:
            ids, above = node.tokens, node.parent
            while above is not None:
                ids, above = above.tokens + ids, above.parent
            yield node, ids, [self.text(ids[: at + 1]) for at in range(len(ids))]

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "slots"):
            slots = self.slots
            check_accounts(slots)
            assert slots.free + slots.cached + slots.held == slots.total
            assert min(slots.free, slots.cached, slots.held) >= 0

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        for row in self.rows:
            self.slots.release(row.slot, row.ids[: len(row.written)])
            check_accounts(self.slots)
        assert self.slots.held == 0
