"""A failing copy or an interrupt in the middle of any change leaves all slots in the state before or after it."""

import signal
import sys
import threading
from pathlib import Path

import pytest
from written_blocks import WrittenBlocks

import onward.cache
from block_accounts import check_accounts
from onward.cache import PagedCacheManager
from onward.util.process import sigint_deferred

FOLDER = str(Path(onward.cache.__file__).parent)
SIZE = 4
TEXT = list(range(11))


def text(ids):
    return [tuple(ids[: at + 1]) for at in range(len(ids))]


class House:
    """Two rows that share blocks, a pin and cached blocks, in a memory that is nearly full."""

    def __init__(self, window=None):
        self.memory = WrittenBlocks(11, SIZE)
        if window is not None:
            self.memory.windows = WrittenBlocks(11, SIZE)
            self.memory.windows.window = window
        self.slots = PagedCacheManager(self.memory, max_len=32, cached_blocks=2, warm_blocks=1, block=SIZE)
        self.slots.release(self.row([7] * 6), [7] * 6)
        self.pin = self.row([5] * 6)
        self.slots.release(self.pin, [5] * 6, pin=True)
        self.one = self.row(TEXT)
        self.two = self.slots.fork(self.one, 10, 12)

    def row(self, ids):
        slot, reused = self.slots.acquire(ids, len(ids))
        self.slots.view([slot], [reused], len(ids) - reused)
        for at in range(reused, len(ids)):
            self.memory.write(slot, at, tuple(ids[: at + 1]))
            if self.memory.windows is not None:
                self.memory.windows.texts[slot.windows[at // SIZE]][at % SIZE] = tuple(ids[: at + 1])
        return slot

    def check(self, changed=None):
        """All slots are whole. changed: one that the change may have released."""
        slots, memory = self.slots, self.memory
        check_accounts(slots)
        for slot, ids in ((self.one, TEXT[:10]), (self.two, TEXT[:10]), (self.pin, [5] * 6)):
            if slot in slots._slots and (slot is not changed or slot.length):
                assert memory.read(slot, len(ids)) == text(ids)
                self.check_window(slot, ids)
            else:
                assert slot is changed
        live = [slot for slot in (self.two, self.one) if slot in slots._slots]
        table = slots.view(live, [0] * len(live), 0).cache
        table = table if memory.windows is None else table[0]
        assert table.tolist() == [slot.blocks + [memory.count] * (8 - len(slot.blocks)) for slot in live]
        for ids in ([*TEXT, 1], [7] * 7):
            slot, reused = slots.acquire(ids, 8) or (None, 0)
            if slot is not None:
                assert memory.read(slot, reused) == text(ids)[:reused]
                self.check_window(slot, ids[:reused])
                slots.release(slot)
        for slot in list(slots._slots):  # also a slot that its caller never received
            slots.release(slot, TEXT[: min(slot.length, 4)] if slot in (self.one, self.two) else ())
            check_accounts(slots)
        slots.clear()
        stats = slots.stats()
        assert stats.available == stats.total
        check_accounts(slots)

    def check_window(self, slot, ids):
        """The slot has the entries that a token after these ids attends to."""
        window = 0 if self.memory.windows is None else self.memory.windows.window
        for at in range(max(0, len(ids) - window + 1), len(ids)) if window else ():
            texts = self.memory.windows.texts[slot.windows[at // SIZE]]
            assert texts[at % SIZE] == tuple(ids[: at + 1])


# Each with the slot that it may release.
CHANGES = {
    "acquire": (lambda house: house.slots.acquire([7, 7, 7, 7, 7, 8, 8], 16), None),
    "turn": (lambda house: house.slots.acquire([5, 5, 5, 5, 5, 8, 8], 16, pin=house.pin), "pin"),
    "fork": (lambda house: house.slots.fork(house.one, 7, 16), None),
    "reserve": (lambda house: house.slots.reserve(house.two, 20), None),
    "commit": (lambda house: house.slots.commit(house.one, 11, lambda first, last: TEXT[first:last]), None),
    "release": (lambda house: house.slots.release(house.one, TEXT), "one"),
    "pin": (lambda house: house.slots.release(house.one, TEXT[:10], pin=True), "one"),
    "view": (lambda house: house.slots.view([house.two, house.two], [0, 0], 0), None),
    "use": (lambda house: house.slots.set_weights_version("another"), "pin"),
    "clear": (lambda house: house.slots.clear(), "pin"),
}


def interrupted(call, line) -> tuple[bool, bool]:
    """Run `call` with SIGINT at a line of the cache's code: whether it raised, and whether that line exists."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    handler, before = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True, True
    finally:
        sys.settrace(before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, handler)
    return False, lines >= line


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("window", [None, 6])
def test_an_interrupt_at_any_line_loses_nothing(change, window):
    call, changed = CHANGES[change]
    for line in range(1, 10000):
        house = House(window)
        raised, more = interrupted(lambda house=house: call(house), line)
        assert raised == more
        house.check(None if changed is None else getattr(house, changed))
        if not more:
            break
    assert line > 10


COPIES = {
    "acquire": lambda house: house.slots.acquire([5, 5, 5, 5, 5, 8, 8], 8),
    "turn": lambda house: house.slots.acquire([5, 5, 5, 5, 5, 8, 8], 8, pin=house.pin),
    "fork": lambda house: house.slots.fork(house.one, 7, 8),
}


@pytest.mark.parametrize("change", COPIES)
@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_copy_changes_no_slot(change, at):
    house = House(6)
    memory = (house.memory, house.memory.windows)[at]
    memory.fails = True
    before = house.slots.stats()
    with pytest.raises(MemoryError):
        COPIES[change](house)
    after = house.slots.stats()
    assert house.slots.pinned(house.pin) == 6
    assert after.available == before.available
    assert after.cached <= before.cached
    assert (after.hits, after.lookups) == (before.hits, before.lookups)
    house.check()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("length", "left"), [(8, 6), (24, 6), (28, 4)])
def test_a_pinned_prefix_survives_a_failed_copy(window, length, left):
    """All of it if the new slot has other room; its first block if the second one is needed."""
    house, ids = House(window), [5, 5, 5, 5, 5, 8, 8]
    slots, pin = house.slots, house.pin
    house.memory.fails = True
    with pytest.raises(MemoryError):
        slots.acquire(ids, length, pin=pin)
    check_accounts(slots)
    assert slots.pinned(pin) == left
    assert house.memory.read(pin, left) == text([5] * left)
    house.check_window(pin, [5] * left)
    slot, reused = slots.acquire(ids, length, pin=pin)
    assert reused == min(left, 5)
    assert house.memory.read(slot, reused) == text(ids)[:reused]
    house.check_window(slot, ids[:reused])


class Interrupts:
    def __init__(self):
        self.count = 0

    def __call__(self, number, frame):
        self.count += 1
        raise KeyboardInterrupt


@pytest.fixture
def interrupts():
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    assert signal.getsignal(signal.SIGINT) is handler, "the handler from before is there again"
    signal.signal(signal.SIGINT, before)


def test_interrupts_are_deferred_to_the_end_of_the_block(interrupts):
    done = []

    def work():
        with sigint_deferred():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                done.append(interrupts.count)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (done, interrupts.count) == ([0, 0, 0], 1)


def test_interrupts_in_nested_blocks_are_deferred_to_the_outer_end(interrupts):
    done = []

    def work():
        with sigint_deferred():
            with sigint_deferred():
                signal.raise_signal(signal.SIGINT)
            done.append(interrupts.count)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (done, interrupts.count) == ([0], 1)


def test_an_error_in_the_block_is_the_context_of_its_interrupt(interrupts):
    def work():
        with sigint_deferred():
            signal.raise_signal(signal.SIGINT)
            raise LookupError

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, LookupError)


def test_a_handler_installed_in_the_block_stays(interrupts):
    def other(number, frame): ...

    with sigint_deferred():
        signal.signal(signal.SIGINT, other)
    assert signal.signal(signal.SIGINT, interrupts) is other


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_nothing_is_deferred_without_a_python_handler(action):
    before = signal.signal(signal.SIGINT, action)
    try:
        with sigint_deferred():
            assert signal.getsignal(signal.SIGINT) is action
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone(interrupts):
    seen = []

    def work():
        with sigint_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [interrupts]
