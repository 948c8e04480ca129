"""Slots by example: reuse, copies, evictions, and the cost of each."""

import os
import threading
import time
import weakref

import pytest
import torch
from written_blocks import WrittenBlocks

from block_accounts import check_accounts, counts
from onward.cache.manager import PagedCacheManager
from onward.errors import ContextOverflowError, RequestError
from onward.ops.heads import BLOCK

SIZE = 4


def slots_over(count=16, *, cached=16, max_len=40, warm=2, size=SIZE):
    memory = WrittenBlocks(count, size)
    return memory, PagedCacheManager(memory, max_len=max_len, cached_blocks=cached, warm_blocks=warm, block=size)


def filled(slots, ids, length=None):
    """A slot whose text is `ids`, computed and noted."""
    slot, reused = slots.acquire(ids, length or len(ids))
    for at in range(reused, len(ids)):
        slots._memory.write(slot, at, tuple(ids[: at + 1]))
    note(slots, slot, ids)
    return slot


def note(slots, slot, ids):
    """The positions of `ids` are final."""
    slots.commit(slot, len(ids), lambda first, last: ids[first:last])


def cache(slots, ids):
    """Put `ids` into the index, without references."""
    slots.release(filled(slots, ids), ids)
    check_accounts(slots)


def reused(slots, ids):
    """How many positions of `ids` are found now."""
    slot, positions = slots.acquire(ids, len(ids))
    slots.release(slot)
    return positions


@pytest.mark.parametrize("length", range(1, 14))
def test_prefixes_of_any_length_are_reused_exactly(length):
    memory, slots = slots_over()
    text = list(range(13))
    cache(slots, text)
    slot, positions = slots.acquire([*text[:length], 77, 78], length + 2)
    assert positions == length
    assert memory.read(slot, positions) == [tuple(text[: at + 1]) for at in range(length)]


def test_the_last_id_is_computed_even_if_all_are_cached():
    memory, slots = slots_over()
    text = list(range(8))
    cache(slots, text)
    slot, positions = slots.acquire(text, 12)
    assert positions == 7
    ((source, to, part),) = memory.copies
    assert (to, part) == (slot.blocks[1], 3)
    assert source != slot.blocks[1], "what the row writes is its own block"


def test_running_rows_share_noted_blocks():
    _, slots = slots_over()
    text = list(range(9))
    first = filled(slots, text)
    second, positions = slots.acquire(text, 9)
    assert positions == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert counts(slots)[2] == 4


def test_the_second_of_two_equal_rows_extends_the_first_after_release():
    _, slots = slots_over()
    text = list(range(12))
    (one, _), (two, _) = slots.acquire(text, 12), slots.acquire(text, 12)
    note(slots, one, text[:8])
    blocks = list(two.blocks)
    note(slots, two, text)
    assert two.blocks == blocks
    third, positions = slots.acquire([*text, 1], 13)
    assert (positions, third.blocks[:2]) == (8, one.blocks[:2])
    slots.release(third)
    slots.release(two, text)
    fourth, positions = slots.acquire([*text, 1], 13)
    assert positions == 12
    assert fourth.blocks[:3] == [*one.blocks[:2], blocks[2]]
    check_accounts(slots)


def test_a_block_of_a_fork_is_not_found_through_another_rows_block():
    """Otherwise the fork would use it without its parents, which could then be evicted first."""
    _, slots = slots_over()
    text = list(range(12))
    (one, _), (two, _) = slots.acquire(text, 12), slots.acquire(text, 12)
    note(slots, one, text[:4])
    fork = slots.fork(two, 12, 12)
    slots.release(two, text)
    check_accounts(slots)
    slots.release(one)
    check_accounts(slots)
    assert reused(slots, [*text, 1]) == 4
    slots.release(fork, text)
    check_accounts(slots)
    assert reused(slots, [*text, 1]) == 12


def test_a_longer_row_replaces_its_partial_block():
    _, slots = slots_over()
    cache(slots, [1, 2])
    assert counts(slots)[1] == 1
    cache(slots, [1, 2, 3])
    assert counts(slots)[1] == 1
    cache(slots, [1, 2, 3, 4])
    assert counts(slots)[1] == 1
    cache(slots, [1, 2])
    assert counts(slots)[1] == 1
    cache(slots, [1, 2, 4])
    assert counts(slots)[1] == 2
    assert reused(slots, [1, 2, 3, 4, 5]) == 4
    assert reused(slots, [1, 2, 4, 5]) == 3


def test_blocks_are_compared_by_tokens():
    """-1 and -2 have the same hash in CPython, and so have the tuples of them."""
    assert hash((-1,) * SIZE) == hash((-2,) * SIZE)
    _, slots = slots_over()
    cache(slots, [-1] * SIZE)
    assert reused(slots, [-2] * 6) == 0
    assert reused(slots, [-1] * 6) == SIZE


def test_a_failed_allocation_changes_nothing():
    _, slots = slots_over(4)
    row = filled(slots, list(range(6)))
    cache(slots, [9, 9, 9, 9])
    before = slots.stats()
    assert counts(slots) == (1, 1, 2)
    assert slots.acquire([9, 9, 9, 9, 1], 12) is None
    assert slots.acquire([5], 12) is None
    assert slots.fork(row, 6, 16) is None
    assert slots.stats() == before
    assert slots.acquire([9, 9, 9, 9, 1], 8) is not None, "the block that is found counts as room"
    assert counts(slots) == (0, 0, 4)
    assert not slots.reserve(row, 9)
    assert slots.reserve(row, 8)
    assert len(row.blocks) == 2


def test_requests_larger_than_the_cache_are_an_error():
    _, slots = slots_over(4, max_len=40)
    row, _ = slots.acquire([1], 4)
    assert slots.can_hold(16)
    assert not slots.can_hold(17)
    for call in (lambda: slots.acquire([1], 17), lambda: slots.fork(row, 0, 41), lambda: slots.reserve(row, 17)):
        with pytest.raises(ContextOverflowError, match=r"4 blocks together hold 16"):
            call()
    check_accounts(slots)


@pytest.mark.parametrize("options", [{"cached_blocks": -1}, {"max_len": 0}, {"warm_blocks": 1.5}])
def test_sizes_are_checked(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        PagedCacheManager(WrittenBlocks(2, BLOCK), **{"max_len": 8, "cached_blocks": 0, **options})


def test_least_recently_used_texts_are_evicted_from_their_end():
    _, slots = slots_over(cached=4)
    old, new = list(range(10, 18)), list(range(20, 28))
    cache(slots, old)
    cache(slots, new)
    assert reused(slots, [*old, 0]) == 8  # and so used
    cache(slots, [30, 31, 32, 33])
    assert counts(slots)[1] == 4
    assert reused(slots, [*new, 0]) == 4
    assert reused(slots, [*old, 0]) == 8


def test_using_part_of_a_block_marks_it_as_used():
    _, slots = slots_over(cached=2)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    cache(slots, old)
    cache(slots, new)
    assert reused(slots, [1, 2, 0]) == 2
    cache(slots, [9])
    assert reused(slots, [*old, 0]) == 4
    assert reused(slots, [*new, 0]) == 0


def test_the_cached_block_budget_favors_the_start_of_a_text():
    _, slots = slots_over(cached=3)
    text = list(range(30))
    cache(slots, text)
    assert counts(slots)[1] == 3
    assert reused(slots, text) == 12


def test_with_a_zero_budget_only_running_rows_share():
    _, slots = slots_over(cached=0)
    text = list(range(8))
    row = filled(slots, text)
    assert reused(slots, [*text, 1]) == 8
    slots.release(row, text)
    assert counts(slots) == (16, 0, 0)
    assert reused(slots, [*text, 1]) == 0


def test_cached_blocks_are_evicted_for_new_rows():
    memory, slots = slots_over(4)
    cache(slots, list(range(16)))
    assert counts(slots)[:2] == (0, 4)
    slot, positions = slots.acquire([0, 1, 2, 3, 4, 9, 9], 16)
    assert positions == 5
    assert memory.read(slot, 5) == [tuple(range(end)) for end in range(1, 6)]
    assert counts(slots)[2] == 4


def test_short_requests_release_no_memory():
    memory, slots = slots_over(cached=0, warm=2)
    for _ in range(10):
        slots.release(filled(slots, list(range(16))), range(16))
    assert memory.given_back == []
    slots.release(filled(slots, list(range(40))), range(40))
    (batch,) = memory.given_back
    assert batch == sorted(batch)
    assert len(batch) == 8
    slots.clear()
    assert sorted(block for batch in memory.given_back for block in batch) == list(range(10))


def test_forks_share_full_blocks_and_copy_the_rest():
    memory, slots = slots_over()
    text = list(range(10))
    row = filled(slots, text, 16)
    forks = [slots.fork(row, 10, 16) for _ in range(3)]
    assert all(fork.blocks[:2] == row.blocks[:2] for fork in forks)
    assert len({fork.blocks[2] for fork in [*forks, row]}) == 4
    assert [part for _, _, part in memory.copies] == [2, 2, 2]
    assert counts(slots)[2] == 2 + 4 * 2
    slots.release(row)
    assert memory.read(forks[1], 10) == [tuple(text[: at + 1]) for at in range(10)]


def test_a_pinned_prefix_is_reused_without_a_cache_budget():
    memory, slots = slots_over(cached=0)
    text = list(range(10))
    pin = filled(slots, text, 16)
    slots.release(pin, text, pin=True)
    assert slots.pinned(pin) == 10
    assert counts(slots) == (13, 0, 3)
    assert memory.read(pin, 10) == [tuple(range(end)) for end in range(1, 11)]
    memory.copies.clear()
    slot, positions = slots.acquire([*text, 99], 12, pin=pin)
    assert positions == 10
    assert [part for _, _, part in memory.copies] == [2]
    assert counts(slots) == (13, 0, 3), "what the pin had is the slot's or free"
    with pytest.raises(AssertionError, match="released"):
        slots.release(pin)
    slots.release(slot)
    assert counts(slots) == (16, 0, 0)


def test_two_pins_of_one_text_and_a_longer_one():
    _, slots = slots_over(cached=0)
    text = list(range(10))
    pins = [filled(slots, each, 12) for each in (text, text, [*text, 10, 11])]
    for pin, length in zip(pins, (10, 10, 12), strict=True):
        slots.release(pin, list(range(length)), pin=True)
        check_accounts(slots)
    assert [slots.pinned(pin) for pin in pins] == [10, 10, 12]
    assert reused(slots, [*range(12), 50]) == 12
    slots.release(pins[0])
    assert reused(slots, [*text, 50]) == 10
    slots.release(pins[2])
    assert reused(slots, [*text, 50]) == 10
    slots.release(pins[1])
    assert counts(slots) == (16, 0, 0)


def test_an_edited_text_reuses_the_room_of_its_pin():
    _, slots = slots_over(3, cached=0)
    pin = filled(slots, list(range(12)))
    slots.release(pin, list(range(12)), pin=True)
    assert slots.acquire([*range(4), 50], 12) is None
    assert slots.acquire([*range(4), 50], 12, reuse=False) is None
    assert slots.pinned(pin) == 12
    slot, positions = slots.acquire([*range(6), 50], 12, pin=pin)
    assert positions == 6
    check_accounts(slots)
    slots.release(slot, list(range(6)), pin=True)
    assert slots.pinned(slot) == 6
    check_accounts(slots)


def test_a_pin_survives_when_a_longer_turn_has_no_room():
    _, slots = slots_over(4, cached=0)
    other, pin = filled(slots, [7] * 8), filled(slots, list(range(6)))
    slots.release(pin, list(range(6)), pin=True)
    before = slots.stats()
    assert slots.acquire([*range(6), 50], 12, pin=pin) is None
    assert slots.stats() == before
    assert slots.pinned(pin) == 6
    slots.release(other)
    assert slots.acquire([*range(6), 50], 12, pin=pin)[1] == 6


def test_a_pin_is_dropped_when_the_weights_change():
    _, slots = slots_over()
    slots.set_weights_version("a")
    pin = filled(slots, list(range(6)))
    slots.release(pin, list(range(6)), pin=True)
    slots.set_weights_version("b")
    assert slots.pinned(pin) == 0
    assert counts(slots) == (16, 0, 0)
    slot, positions = slots.acquire([*range(6), 50], 8, pin=pin)
    assert positions == 0
    slots.set_weights_version("c")
    slots.release(slot, list(range(6)), pin=True)
    assert slots.pinned(slot) == 0
    slots.release(slot)


def test_a_finalizer_may_pin_and_release_during_a_change():
    memory, slots = slots_over(8)
    slot, other = filled(slots, [1, 2, 3, 4, 5], 12), filled(slots, [7, 8, 9])
    copy = memory.copy

    def leaving_copy(source, to, positions):
        copy(source, to, positions)
        slots.release(slot, [1, 2, 3, 4, 5], pin=True)
        slots.release(other)

    memory.copy = leaving_copy
    fork = slots.fork(other, 1, 8)
    memory.copy = copy
    assert slots.pinned(slot) == 5
    assert counts(slots)[2] == 2 + len(fork.blocks)
    check_accounts(slots)


def test_a_new_weights_version_forgets_cached_and_running_rows():
    _, slots = slots_over()
    text = list(range(8))
    slots.set_weights_version("a")
    cache(slots, text)
    row, _ = slots.acquire([5] * 8, 12)
    slots.set_weights_version("a")
    assert reused(slots, [*text, 1]) == 8
    slots.set_weights_version("b")
    assert reused(slots, [*text, 1]) == 0
    note(slots, row, [5] * 8)
    fork = slots.fork(row, 8, 8)
    slots.release(row, [5] * 8)
    slots.release(fork, [5] * 8)
    assert counts(slots)[1] == 0
    assert reused(slots, [5] * 9) == 0
    slots.set_weights_version("a")
    assert reused(slots, [*text, 1]) == 0


def test_blocks_have_64_positions():
    memory, slots = slots_over(8, max_len=512, size=BLOCK)
    text = list(range(200))
    cache(slots, text)
    slot, positions = slots.acquire([*text[:130], 7], 131)
    assert positions == 130
    assert len(slot.blocks) == 3
    assert [part for _, _, part in memory.copies] == [2]
    assert repr(slots) == "<PagedCacheManager: 8 blocks of 64 positions, 3 free, 2 cached, 3 held>"


def test_hits_count_positions():
    _, slots = slots_over()
    cache(slots, list(range(8)))
    slots.acquire([*range(6), 99], 8)
    slots.acquire([*range(6), 99], 8, reuse=False)
    assert slots.stats()[3:] == (6, 8 + 7)


def test_a_block_table_is_reused_and_only_changed_rows_are_written():
    memory, slots = slots_over()
    rows = [filled(slots, [ids] * 6, 8) for ids in range(3)]
    table = slots.view(rows, [0] * len(rows), 0).cache
    assert table.dtype == torch.int32
    assert table.shape == (3, 10)
    assert table[:, :2].tolist() == [row.blocks for row in rows]
    table.fill_(-7)  # so that what is written shows
    note(slots, rows[0], [0] * 7)
    slots.reserve(rows[2], 8)
    assert slots.view(rows, [0] * len(rows), 0).cache is table
    assert (table == -7).all(), "nothing changed, nothing is written"
    slots.reserve(rows[1], 12)
    assert slots.view(rows, [0] * len(rows), 0).cache is table
    assert table[1].tolist() == rows[1].blocks + [16] * 7
    assert (table[[0, 2]] == -7).all()
    slots.release(rows[0])
    assert slots.view([rows[2], rows[1]], [0, 0], 0).cache is not table
    assert len(memory.tables) == 2


def test_rows_that_end_one_by_one_share_tables():
    memory, slots = slots_over(100, max_len=8)
    rows = [slots.acquire([number], 8)[0] for number in range(50)]
    while rows:
        table = slots.view(rows, [0] * len(rows), 0).cache
        assert table.tolist() == [row.blocks for row in rows]
        slots.release(rows.pop(len(rows) // 2))
    assert len(memory.tables) == 50
    assert len({table.untyped_storage().data_ptr() for table in memory.tables}) == 7, "of 1, 2, 4 … 64 rows"


def test_a_table_on_another_device_is_copied():
    memory = WrittenBlocks(4, SIZE)
    memory.device = torch.device("meta")
    slots = PagedCacheManager(memory, max_len=8, cached_blocks=0, block=SIZE)
    slot, _ = slots.acquire([1], 8)
    assert slots.view([slot], [0], 0).cache.device.type == "meta"
    assert slots._tables._tables[1].host.tolist() == [slot.blocks]


def test_a_released_slot_is_refused():
    _, slots = slots_over()
    slot, _ = slots.acquire([1], 8)
    slots.view([slot], [0], 0)
    slots.release(slot)
    for call in (slots.release, lambda slot: slots.view([slot], [0], 0), lambda slot: slots.reserve(slot, 9)):
        with pytest.raises(AssertionError, match="released"):
            call(slot)
    check_accounts(slots)


class Counted(list):
    """A list of ids that counts how often it is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_ids_are_read_only_when_a_block_fills_up():
    _, slots = slots_over()
    slot, _ = slots.acquire([1], 40)
    ids, reads = Counted(), []
    for token in range(16):
        ids.append(token)
        note(slots, slot, ids)
        reads.append(ids.reads)
    assert reads == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_an_unused_block_counts_among_the_warm_ones():
    _, slots = slots_over(64, warm=2)
    longer, _ = slots.acquire([0, 0, 1, 2], 16)
    cache(slots, [0, 0])
    for slot in [slots.acquire([5], SIZE)[0] for _ in range(4)]:
        slots.release(slot)  # as many as may keep their memory
    note(slots, longer, [0, 0, 1, 2])
    check_accounts(slots)


def test_memory_is_freed_with_its_slots():
    memory, slots = slots_over()
    slots.release(filled(slots, [1, 2, 3]), [1, 2, 3])
    reference = weakref.ref(memory)
    del memory, slots
    assert reference() is None, "it does not wait for the collector"


def test_threads_share_without_losing_blocks():
    memory, slots = slots_over(64, cached=10, max_len=16)
    failures = []

    def requests(number):
        try:
            for turn in range(150):
                ids = [turn % 3, number % 2, *range(turn % 10)]
                acquired = slots.acquire(ids, 16)
                assert acquired is not None, "8 threads of 4 blocks"
                slot, positions = acquired
                assert memory.read(slot, positions) == [tuple(ids[: at + 1]) for at in range(positions)]
                for at in range(positions, len(ids)):
                    memory.write(slot, at, tuple(ids[: at + 1]))
                    note(slots, slot, ids[: at + 1])
                    slots.view([slot], [0], 0)
                fork = slots.fork(slot, len(ids) // 2, 16)
                assert memory.read(slot, len(ids)) == [tuple(ids[: at + 1]) for at in range(len(ids))]
                slots.release(slot, ids)
                slots.release(fork, ids[: len(ids) // 4], pin=True)
                assert slots.pinned(fork) == len(ids) // 4
                slots.release(fork)
                check_accounts(slots)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=requests, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counts(slots)[2] == 0
    check_accounts(slots)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_keeps_only_its_own_slots():
    _, slots = slots_over()
    mine = filled(slots, list(range(8)))
    others, locked, over = [], threading.Event(), threading.Event()

    def hold():
        with slots.lock:  # as in a forward
            others.append(filled(slots, list(range(20, 32))))
            locked.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_accounts(slots)
            assert counts(slots)[2] == 2
            assert reused(slots, [*range(8), 1]) == 8
            assert reused(slots, [*range(20, 32), 1]) == 12
            slots.release(mine, list(range(8)))
            with pytest.raises(AssertionError, match="forked"):
                slots.view(others, [0] * len(others), 0)
            code = 0
        finally:
            os._exit(code)
    try:
        until = time.monotonic() + 60
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.005)
        assert status[0] == child, "the child hangs"
        assert os.waitstatus_to_exitcode(status[1]) == 0
    finally:
        over.set()
        thread.join()
    assert counts(slots)[2] == 5


def test_a_child_forked_during_a_change_starts_without_slots():
    """As `os.fork` calls `renew` in the child while another thread of the parent was in a change."""
    _, slots = slots_over()
    mine, pin = filled(slots, list(range(8))), filled(slots, [5] * 6)
    slots.release(pin, [5] * 6, pin=True)
    slots._changing = True
    slots.renew()
    assert counts(slots) == (16, 0, 0)
    assert slots.pinned(pin) == 0
    with pytest.raises(AssertionError, match="forked"):
        slots.view([mine], [0], 0)
    slots.release(mine, list(range(8)))
    slot, positions = slots.acquire([5] * 7, 8, pin=pin)
    assert positions == 0
    slots.release(slot)
    check_accounts(slots)
    assert not slots._slots


def test_an_abandoned_slot_is_freed_by_the_next_call():
    """As the garbage collector leaves one, which may come in the midst of another method."""
    memory, slots = slots_over(8)
    slot, _ = slots.acquire([1, 2, 3, 4, 5], 12)
    copy = memory.copy

    def leaving_copy(source, to, positions):
        copy(source, to, positions)
        slots.release(slot, [1, 2, 3, 4, 5])

    other, _ = slots.acquire([7, 8, 9], 8)
    memory.copy = leaving_copy
    fork = slots.fork(other, 1, 8)
    memory.copy = copy
    check_accounts(slots)
    assert counts(slots)[2] == len(other.blocks) + len(fork.blocks)
    for each in (other, fork):
        slots.release(each)
    assert counts(slots)[2] == 0
    assert reused(slots, [1, 2, 3, 4, 5, 6]) == 5


class Adapter:
    def __init__(self, digest):
        self.index, self.digest = 1, digest


def test_unused_adapters_leave_nothing_in_the_index():
    _, slots = slots_over()
    slot, _ = slots.acquire([1, 2, 3, 4], 4, adapter=Adapter("kept"))
    slots.release(slot, [1, 2, 3, 4])
    for number in range(50):
        slot, positions = slots.acquire([1, 2, 3, 4, 5], 5, adapter=Adapter(f"adapter {number}"))
        assert positions == 0
        slots.release(slot)
    slot, positions = slots.acquire([1, 2, 3, 4, 5], 5, adapter=Adapter("kept"))
    assert positions == 4
    assert len(slots._index._roots) == 2
