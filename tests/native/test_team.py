"""The team of threads: forks, resizes, concurrent callers."""

import os
import threading
import time
from pathlib import Path

import torch
from packed import Packed

from onward import native
from onward.native.interface import Format


def small_product() -> tuple[Packed, torch.Tensor, torch.Tensor]:
    """A product of many chunks, and its result."""
    weight = Packed.random(Format.INT8, 4000, 256, torch.Generator().manual_seed(0))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    return weight, x, weight.linear(x)


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def end(threads: set[str]) -> bool:
    """Whether these threads are gone within 10 s: a thread that was joined stays in /proc for a moment."""
    deadline = time.monotonic() + 10
    while threads & threads_of_this_process():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_the_number_of_threads_changes_at_any_time(isa: str) -> None:
    weight, x, want = small_product()
    for count in (1, 4, 2, 3, 1, 2):
        native.set_num_threads(count)
        assert native.num_threads() == count
        for _ in range(20):
            assert torch.equal(weight.linear(x), want)


def test_workers_leave_when_another_library_is_chosen(isa: str) -> None:
    native.set_num_threads(1)
    before = threads_of_this_process()
    native.set_num_threads(4)
    weight, x, want = small_product()
    workers = threads_of_this_process() - before
    assert len(workers) == 3
    native.select_isa("none")
    assert end(workers)
    native.select_isa(isa)
    assert torch.equal(weight.linear(x), want)


def test_a_forked_child_gets_its_own_team(isa: str) -> None:
    native.set_num_threads(2)
    weight, x, want = small_product()
    for _ in range(5):
        child = os.fork()
        if child == 0:
            before = threads_of_this_process()  # this one, and those of an emulator
            same = native.num_threads() == 2 and all(torch.equal(weight.linear(x), want) for _ in range(20))
            os._exit(0 if same and len(threads_of_this_process() - before) == 1 else 1)
        assert torch.equal(weight.linear(x), want)
        assert os.waitpid(child, 0)[1] == 0


def test_concurrent_callers_take_turns(isa: str) -> None:
    native.set_num_threads(2)
    weight, x, want = small_product()
    wrong: list[int] = []

    def call_often(caller: int) -> None:
        for _ in range(100):
            if not torch.equal(weight.linear(x), want):
                wrong.append(caller)

    callers = [threading.Thread(target=call_often, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for _ in range(20):  # and a resize between any two of their calls
        native.set_num_threads(1)
        native.set_num_threads(3)
    for caller in callers:
        caller.join()
    assert not wrong


def test_sleeping_workers_wake_up(isa: str) -> None:
    native.set_num_threads(2)
    weight, x, want = small_product()
    for _ in range(5):
        threading.Event().wait(0.01)  # far longer than the workers spin
        assert torch.equal(weight.linear(x), want)
