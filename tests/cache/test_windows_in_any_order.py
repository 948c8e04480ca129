"""Sliding layers with calls in any order: a row finds its window, and no block of either kind is lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from rows_in_any_order import MAX_LEN, RowsInAnyOrder
from written_blocks import WrittenBlocks

from block_accounts import check_accounts, counts
from onward.cache.manager import PagedCacheManager

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class AnyOrderOfWindows(RowsInAnyOrder):
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
        self.slots = PagedCacheManager(
            self.memory, max_len=MAX_LEN, cached_blocks=cached, warm_blocks=warm, block=size, nbytes=nbytes
        )
        self.begin(size)

    def write(self, slot, at, text):
        self.memory.write(slot, at, text)
        self.memory.windows.texts[slot.windows[at // self.size]][at % self.size] = text

    @rule(ids=TEXTS, more=st.integers(-4, 12), reuse=st.booleans() | st.just(True))
    def acquire(self, ids, more, reuse):
        self.acquired(ids, more, reuse)

    def complete(self, row):
        while len(row.written) < min(len(row.ids), row.slot.length):
            self.extend(row, len(row.ids) - len(row.written), 0, 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 14), token=st.integers(0, 1), drafted=st.integers(0, 4))
    def step(self, data, count, token, drafted):
        """A piece of a prompt, or new ids with others that are taken back."""
        self.extend(self.pick(data), count, token, drafted)

    def extend(self, row, count, token, drafted):
        first = len(row.written)
        count = min(count, row.slot.length - first)
        if count < 1:
            return
        piece = self.slots.max_chunk(row.slot, first, count)
        assert min(count, self.size) <= piece <= count
        tokens = min(piece + drafted, max(piece, self.slots.room([row.slot], [first])), row.slot.length - first)
        self.slots.view([row.slot], [first], tokens)
        for at in range(first, first + piece):
            if at == len(row.ids):
                row.ids.append(token)
            row.written.append(self.text(row.ids[: at + 1]))
            self.write(row.slot, at, row.written[-1])
        for at in range(first + piece, first + tokens):
            self.write(row.slot, at, "a draft")
        self.slots.commit(row.slot, first + piece, lambda low, high: row.ids[low:high])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fail(self, data):
        """A copy fails: no slot has gained or lost a block."""
        row, used_blocks, slots = self.pick(data), counts(self.slots)[2], list(self.slots._slots)
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
        assert counts(self.slots)[2] == used_blocks
        assert list(self.slots._slots) == slots

    @invariant()
    def every_row_has_its_text_and_window(self):
        for row in getattr(self, "rows", ()):
            count = len(row.written)
            assert self.memory.read(row.slot, count) == row.written
            texts, windows = self.memory.windows.texts, row.slot.windows
            for at in range(max(0, count - self.window + 1), count):
                assert texts[windows[at // self.size]][at % self.size] == row.written[at]

    @invariant()
    def cached_texts_equal_written_ones(self):
        if not hasattr(self, "slots"):
            return
        for node, _, written in self.found_texts():
            expected = written[len(written) - len(node.tokens) :]
            assert self.memory.texts[node.blocks[0]][: len(node.tokens)] == expected
            if node.blocks[1] is not None:
                assert self.memory.windows.texts[node.blocks[1]][: len(node.tokens)] == expected

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def view(self, data):
        slots = [row.slot for row in data.draw(st.lists(st.sampled_from(self.rows), unique=True))]
        table, of_windows = (each.tolist() for each in self.slots.view(slots, [0] * len(slots), 0).cache)
        width, spare = -(-MAX_LEN // self.size), self.memory.windows.count
        assert table == [slot.blocks + [self.memory.count] * (width - len(slot.blocks)) for slot in slots]
        assert of_windows == [[slot.windows.get(index, spare) for index in range(width)] for slot in slots]

    def teardown(self):
        super().teardown()
        if not hasattr(self, "slots"):
            return
        self.slots.clear()
        check_accounts(self.slots)
        free, _, _ = counts(self.slots)
        assert free == self.slots.stats().total
        for memory in (self.memory, self.memory.windows):
            assert memory.texts == [[None] * self.size] * memory.count, "all memory was given back"


TestAnyOrderOfWindows = AnyOrderOfWindows.TestCase
TestAnyOrderOfWindows.settings = settings(stateful_step_count=50)
