"""An interrupt at any line of any change: rows keep their text, no block is lost, and the next call works."""

import sys
from pathlib import Path

import pytest
from written_blocks import WrittenBlocks

import onward.cache
from block_accounts import check_accounts
from onward.cache import PagedCacheManager

FOLDER = str(Path(onward.cache.__file__).parent)
SIZE = 4


class Interrupted(BaseException):
    pass


def interrupted(call, line) -> bool:
    """Run `call`, but raise `Interrupted` at the n-th line of the cache's code; whether there are so many."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def text(ids):
    return [tuple(ids[: at + 1]) for at in range(len(ids))]


class House:
    """Two rows that share blocks, and cached blocks, in a memory that is nearly full."""

    def __init__(self, window=None):
        self.memory = WrittenBlocks(9, SIZE)
        if window is not None:
            self.memory.windows = WrittenBlocks(9, SIZE)
            self.memory.windows.window = window
        self.slots = PagedCacheManager(self.memory, max_len=32, cached_blocks=2, warm_blocks=1, block=SIZE)
        cached = self.row([7, 7, 7, 7, 7, 7])
        self.slots.release(cached, [7] * 6)
        self.ids = list(range(11))
        self.one = self.row(self.ids)
        self.two = self.slots.fork(self.one, 10, 12)
        self.memory.copies.clear()

    def row(self, ids):
        slot, reused = self.slots.acquire(ids, len(ids))
        self.slots.ensure_writable([slot], [reused], len(ids) - reused)
        for at in range(reused, len(ids)):
            self.memory.write(slot, at, tuple(ids[: at + 1]))
            if self.memory.windows is not None:
                self.memory.windows.texts[slot.windows[at // SIZE]][at % SIZE] = tuple(ids[: at + 1])
        return slot

    def assert_window(self, slot, ids):
        """The slot has what a token after these ids sees."""
        window = 0 if self.memory.windows is None else self.memory.windows.window
        for at in range(max(0, len(ids) - window + 1), len(ids)) if window else ():
            texts = self.memory.windows.texts[slot.windows[at // SIZE]]
            assert texts[at % SIZE] == tuple(ids[: at + 1])


CHANGES = {
    "acquire": lambda house: house.slots.acquire([7, 7, 7, 7, 7, 8, 8], 16),
    "fork": lambda house: house.slots.fork(house.one, 7, 16),
    "reserve": lambda house: house.slots.reserve(house.two, 20),
    "truncate": lambda house: house.slots.truncate(house.two, 5),
    "note": lambda house: house.slots.note(house.one, house.ids),
    "release": lambda house: house.slots.release(house.one, house.ids),
    "view": lambda house: house.slots.view([house.two, house.two]),
    "use": lambda house: house.slots.set_weights_version("another"),
    "clear": lambda house: house.slots.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("window", [None, 6])
def test_a_change_that_is_cut_short_at_any_line_loses_nothing(change, window):
    line = 0
    while True:
        line += 1
        house = House(window)
        slots, memory = house.slots, house.memory
        more = interrupted(lambda house=house: CHANGES[change](house), line)
        check_accounts(slots)
        for slot in (house.one, house.two):
            if slot in slots._slots:
                kept = min(slot.length, 10)
                assert memory.read(slot, kept) == text(house.ids)[:kept]
                if slots.holds(slot, kept):
                    house.assert_window(slot, house.ids[:kept])
                else:
                    assert change == "truncate", "only what was cut may lack its window"
        table = slots.view([house.two, house.two])
        table = table if window is None else table[0]
        assert table.tolist() == [house.two.blocks + [memory.count] * (8 - len(house.two.blocks))] * 2
        for ids in ([*range(11), 1], [7] * 7):
            slot, reused = slots.acquire(ids, 8) or (None, 0)
            if slot is not None:
                assert memory.read(slot, reused) == text(ids)[:reused]
                house.assert_window(slot, ids[:reused])
                slots.release(slot)
        for slot in list(slots._slots):  # what was made, and whose maker never learnt of it, too
            slots.release(slot, house.ids[: min(slot.length, 4)] if slot in (house.one, house.two) else ())
            check_accounts(slots)
        slots.clear()
        assert slots.free == slots.total
        check_accounts(slots)
        if not more:
            break
    assert line > 10
