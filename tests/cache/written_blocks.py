"""A double of block memory that records, for each position of each block, the text that was written."""

import pickle

import torch


def fail(memory):
    """Fail if the next copy is to fail."""
    if memory.fails:
        memory.fails = False
        raise MemoryError("a copy that fails")


class WrittenBlocks:
    """A double of the memory that slots lie in.

    texts: for each block and position all ids up to there that a row had when it wrote; None where nothing is.
    """

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.device = torch.device("cpu")
        self.texts = [[None] * size for _ in range(count)]
        self.copies, self.given_back, self.tables = [], [], []
        self.fails = False
        self.states = self.windows = None
        self.block_nbytes = 1

    def view(self, table, *more):
        self.tables.append(table)
        return (table, *more) if more else table

    def copy(self, source, to, positions):
        fail(self)
        assert source != to
        assert 0 < positions < self.size
        self.copies.append((source, to, positions))
        self.texts[to][:positions] = self.texts[source][:positions]

    def dump(self, block, positions=None):
        texts = self.texts[block][:positions]
        return memoryview(pickle.dumps(texts + [None] * (self.size - len(texts))))

    def writable(self, block):
        return None

    def load(self, block, content):
        self.texts[block] = pickle.loads(content)

    def give_back(self, blocks):
        assert len(set(blocks)) == len(blocks) > 0
        self.given_back.append(list(blocks))
        for block in blocks:
            self.texts[block] = [None] * self.size

    def write(self, slot, position, text):
        self.texts[slot.blocks[position // self.size]][position % self.size] = text

    def read(self, slot, positions):
        return [self.texts[slot.blocks[at // self.size]][at % self.size] for at in range(positions)]
