"""Slots with sliding layers in any order of calls: a row finds its window, and every block of both kinds is counted."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from written_blocks import WrittenBlocks

from onward.cache.slots import PagedSlots
from onward.errors import ContextOverflowError

MAX_LEN = 32
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Row:
    """A text in a slot. ids: all of it. written: what was written at each position that was computed."""

    def __init__(self, slot, ids, written):
        self.slot, self.ids, self.written = slot, list(ids), list(written)


class AnyOrderOfWindows(RuleBasedStateMachine):
    @initialize(
        count=st.integers(1, 20),
        windows=st.integers(1, 20),
        size=st.integers(2, 4),
        window=st.integers(1, 9),
        price=st.sampled_from([(1, 1), (2, 3), (0, 1), (5, 2)]),
        share=st.floats(0.2, 1),
        cached=st.integers(0, 60),
        warm=st.integers(0, 3),
    )
    def start(self, count, windows, size, window, price, share, cached, warm):
        self.memory = WrittenBlocks(count, size)
        self.memory.windows = WrittenBlocks(windows, size)
        self.memory.windows.window, self.window, self.size = window, window, size
        self.memory.block_nbytes, self.memory.windows.block_nbytes = price
        nbytes = round(share * (count * price[0] + windows * price[1]))
        self.slots = PagedSlots(
            self.memory, max_len=MAX_LEN, cached_blocks=cached, warm_blocks=warm, block=size, nbytes=nbytes
        )
        self.rows, self.key = [], 0

    def text(self, ids):
        return (self.key, *ids)

    def pick(self, data):
        return data.draw(st.sampled_from(self.rows))

    def write(self, slot, at, text):
        self.memory.write(slot, at, text)
        self.memory.windows.texts[slot.windows[at // self.size]][at % self.size] = text

    @rule(ids=TEXTS, more=st.integers(-4, 12), reuse=st.booleans() | st.just(True))
    def acquire(self, ids, more, reuse):
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
        self.rows.append(Row(slot, ids, [self.text(ids[: at + 1]) for at in range(reused)]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 14), token=st.integers(0, 1), drafted=st.integers(0, 4))
    def step(self, data, count, token, drafted):
        """A piece of a prompt, or new ids with others that are taken back."""
        row = self.pick(data)
        first = len(row.written)
        count = min(count, row.slot.length - first)
        if count < 1:
            return
        piece = self.slots.piece(row.slot, first, count)
        assert min(count, self.size) <= piece <= count
        tokens = min(piece + drafted, max(piece, self.slots.room([row.slot], [first])), row.slot.length - first)
        self.slots.ready([row.slot], [first], tokens)
        for at in range(first, first + piece):
            if at == len(row.ids):
                row.ids.append(token)
            row.written.append(self.text(row.ids[: at + 1]))
            self.write(row.slot, at, row.written[-1])
        for at in range(first + piece, first + tokens):
            self.write(row.slot, at, "a draft")
        self.slots.advance(row.slot, first + piece, lambda low, high: row.ids[low:high])

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
        self.slots.use(key)
        self.key = key

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fail(self, data):
        """A copy fails in the middle of a change: the other rows keep what they have, and no block is lost."""
        row = self.pick(data)
        positions = data.draw(st.integers(0, len(row.written)))
        memory = data.draw(st.sampled_from([self.memory, self.memory.windows]))
        memory.fails = True
        try:
            fork = self.slots.fork(row.slot, positions, positions) if self.slots.can_hold(positions) else None
            if fork is not None:
                self.slots.release(fork)
        except MemoryError:
            pass
        memory.fails = False

    @invariant()
    def every_row_holds_its_text_and_its_window(self):
        for row in getattr(self, "rows", ()):
            count = len(row.written)
            assert self.memory.read(row.slot, count) == row.written
            texts, windows = self.memory.windows.texts, row.slot.windows
            for at in range(max(0, count - self.window + 1), count):
                assert texts[windows[at // self.size]][at % self.size] == row.written[at]

    @invariant()
    def what_can_be_found_is_what_was_written(self):
        if not hasattr(self, "slots"):
            return
        for node in self.slots._pool.trie:
            ids, above = node.tokens, node.parent
            while above is not None:
                ids, above = above.tokens + ids, above.parent
            wanted = [self.text(ids[:end]) for end in range(len(ids) - len(node.tokens) + 1, len(ids) + 1)]
            assert self.memory.texts[node.block][: len(node.tokens)] == wanted
            if node.window is not None:
                assert self.memory.windows.texts[node.window][: len(node.tokens)] == wanted

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "slots"):
            slots = self.slots
            slots.check()
            assert slots.free + slots.cached + slots.held == slots.total
            assert min(slots.free, slots.cached, slots.held) >= 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def view(self, data):
        slots = [row.slot for row in data.draw(st.lists(st.sampled_from(self.rows), unique=True))]
        table, of_windows = (each.tolist() for each in self.slots.view(slots))
        width, spare = -(-MAX_LEN // self.size), self.memory.windows.count
        assert table == [slot.blocks + [self.memory.count] * (width - len(slot.blocks)) for slot in slots]
        assert of_windows == [[slot.windows.get(index, spare) for index in range(width)] for slot in slots]

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        for row in self.rows:
            self.slots.release(row.slot, row.ids[: len(row.written)])
            self.slots.check()
        assert self.slots.held == 0
        self.slots.clear()
        self.slots.check()
        assert self.slots.free == self.slots.total
        for memory in (self.memory, self.memory.windows):
            assert memory.texts == [[None] * self.size] * memory.count, "all memory was given back"


TestAnyOrderOfWindows = AnyOrderOfWindows.TestCase
TestAnyOrderOfWindows.settings = settings(stateful_step_count=50)
