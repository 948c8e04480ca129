"""Recurrent states with calls in any order: rows and nodes have the states after their texts."""

import pickle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from rows_in_any_order import MAX_LEN, RowsInAnyOrder
from written_blocks import WrittenBlocks, fail

from onward.cache.manager import PagedCacheManager

SIZE, PAGE = 4, 2  # positions of a block, and of a page of states
# Most begin as another does.
TEXTS = st.builds(
    lambda cut, own: [0] * cut + own, st.integers(0, 20), st.lists(st.integers(0, 1), min_size=1, max_size=4)
)


class WrittenStates:
    """A double of `RecurrentStatePool`. pages: two for each slot, each with the number of its block of positions,
    counted from 1, the text before it, and the texts up to each of its positions."""

    def __init__(self, count, nbytes):
        self.count, self.nbytes, self.block_nbytes = count, nbytes, 1
        self.pages = [[(0, None, [])] * 2 for _ in range(count)]
        self.fails = False

    def clear(self, slot):
        fail(self)
        self.pages[slot] = [(0, None, [])] * 2

    def copy(self, source, to):
        fail(self)
        assert source != to
        self.pages[to] = [(number, before, list(texts)) for number, before, texts in self.pages[source]]

    def dump(self, slot):
        return memoryview(pickle.dumps(self.pages[slot]))

    def writable(self, slot):
        return None

    def load(self, slot, content):
        self.pages[slot] = pickle.loads(content)

    def holds(self, slot, positions):
        return positions == 0 or -(-positions // PAGE) in [number for number, _, _ in self.pages[slot]]

    def read(self, slot, positions):
        """The text before the page of the last of so many positions, and the texts on it up to there."""
        number = -(-positions // PAGE)
        before, texts = next((before, texts) for page, before, texts in self.pages[slot] if page == number)
        return before, texts[: positions - (number - 1) * PAGE]

    def write(self, slot, first, texts):
        """A piece of a text: what it begins with, and where it ends (`onward.ops.recurrent_state.places`)."""
        pages, known = self.pages[slot], first == 0 or self.holds(slot, first)
        assert known, "what lay before a piece is there"
        before, last = -(-first // PAGE), -(-(first + len(texts)) // PAGE)
        source = 0 if first == 0 or pages[0][0] == before else 1
        number, prefix, earlier = pages[source] if first else (0, None, [])
        earlier, begun = earlier[: first - (number - 1) * PAGE] if first else [], {}
        for at, text in enumerate(texts, first):
            if at % PAGE == 0:
                number, prefix, earlier = at // PAGE + 1, (earlier[-1] if earlier else None), []
            earlier.append(text)
            begun[number] = number, prefix, list(earlier)
        if before in begun:
            pages[source] = begun[before]
        pages[source if first == 0 or last == before else 1 - source] = begun[last]


class AnyOrderOfStates(RowsInAnyOrder):
    @initialize(
        count=st.integers(6, 30),
        states=st.integers(2, 12),
        price=st.integers(1, 3),
        share=st.floats(0.4, 1),
        cached=st.integers(0, 90),
    )
    def start(self, count, states, price, share, cached):
        self.memory = WrittenBlocks(count, SIZE)
        self.memory.states = WrittenStates(states, price)
        nbytes = round(share * (count + states * price))
        self.slots = PagedCacheManager(
            self.memory, max_len=MAX_LEN, cached_blocks=cached, warm_blocks=count, block=SIZE, nbytes=nbytes
        )
        self.begin(SIZE)

    @rule(ids=TEXTS, more=st.integers(-4, 12), reuse=st.booleans() | st.just(True))
    def acquire(self, ids, more, reuse):
        self.acquired(ids, more, reuse)

    @rule(ids=TEXTS, chunk=st.integers(1, 24), leaves=st.booleans())
    def serve(self, ids, chunk, leaves):
        """A prompt from its beginning to its end."""
        rows = len(self.rows)
        self.acquired(ids, 2, True)
        for row in self.rows[rows:]:
            self.complete(row, chunk)
            if leaves:
                self.rows.remove(row)
                self.slots.release(row.slot, row.ids)

    def complete(self, row, chunk=8):
        while len(row.written) < len(row.ids):
            self.extend(row, min(chunk, len(row.ids) - len(row.written)), 0, 0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 14), token=st.integers(0, 1), drafted=st.integers(0, PAGE - 1))
    def step(self, data, count, token, drafted):
        """A piece of a prompt, or new ids with others that are taken back."""
        row = self.pick(data)
        count = min(count, row.slot.length - len(row.written))
        if count > 0:
            self.extend(row, count, token, drafted)

    def extend(self, row, count, token, drafted):
        first = len(row.written)
        piece = self.slots.max_chunk(row.slot, first, count)
        assert 1 <= piece <= count
        for at in range(first, first + piece):
            if at == len(row.ids):
                row.ids.append(token)
            row.written.append(self.text(row.ids[: at + 1]))
            self.memory.write(row.slot, at, row.written[-1])
        # At most a page can be removed at once (`PagedCacheManager.room`).
        wrong = ["a draft"] * max(0, min(drafted, PAGE - piece, row.slot.length - first - piece))
        for at in range(len(wrong)):
            self.memory.write(row.slot, first + piece + at, "a draft")
        self.memory.states.write(row.slot.state, first, row.written[first:] + wrong)
        self.slots.commit(row.slot, first + piece, lambda low, high: row.ids[low:high])

    @rule()
    def clear(self):
        self.slots.clear()
        self.drop_pins()

    def expected(self, written, positions):
        begins = (positions - 1) // PAGE * PAGE
        return written[begins - 1] if begins else None, written[begins:positions]

    @invariant()
    def every_row_has_its_text_and_states(self):
        for row in getattr(self, "rows", ()):
            count = len(row.written)
            assert self.memory.read(row.slot, count) == row.written
            if count:
                assert self.memory.states.read(row.slot.state, count) == self.expected(row.written, count)

    @invariant()
    def every_node_keeps_the_states_of_its_text(self):
        if not hasattr(self, "slots"):
            return
        found = list(self.found_texts())
        for node, ids, written in found:
            state = node.blocks[1]
            if state is None:
                continue
            for positions in range(len(ids) - len(node.tokens) + 1, node.state_end + 1):
                if self.memory.states.holds(state, positions):
                    assert self.memory.states.read(state, positions) == self.expected(written, positions)


TestAnyOrderOfStates = AnyOrderOfStates.TestCase
TestAnyOrderOfStates.settings = settings(stateful_step_count=50, max_examples=50)
