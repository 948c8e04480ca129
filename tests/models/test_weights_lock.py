"""The lock of a model's weights: forwards together, updates alone."""

import os
import pickle
import threading

import pytest

from onward.errors import RequestError
from onward.models.live_weights import WeightsLock


def started(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_forwards_run_together_and_an_update_waits_for_them():
    lock, inside, events = WeightsLock(), threading.Barrier(3), []
    end = [threading.Event(), threading.Event()]

    def forward(number):
        with lock.reading():
            inside.wait(60)
            end[number].wait(60)
            events.append(number)

    def update():
        with lock.writing():
            events.append("update")

    forwards = [started(lambda number=number: forward(number)) for number in range(2)]
    inside.wait(60)
    updating = started(update)
    for number in range(2):
        end[number].set()
        forwards[number].join(60)
    updating.join(60)
    assert events == [0, 1, "update"]


def test_forwards_wait_for_an_update_but_nested_ones_do_not():
    lock, events = WeightsLock(), []
    is_running, may_nest = threading.Event(), threading.Event()

    def nested():
        with lock.reading():
            is_running.set()
            may_nest.wait(60)
            with lock.reading():
                events.append("nested")

    def update():
        with lock.writing():
            events.append("update")

    def after():
        with lock.reading():
            events.append("after")

    forward = started(nested)
    is_running.wait(60)
    updating = started(update)
    while not lock._is_awaited:
        pass
    late = started(after)
    may_nest.set()
    for thread in (forward, updating, late):
        thread.join(60)
    assert events == ["nested", "update", "after"]


def test_an_update_inside_a_forward_is_refused():
    lock = WeightsLock()
    with lock.reading(), lock.reading(), pytest.raises(RequestError, match="inside a forward"), lock.writing():
        pass
    with lock.writing():
        pass
    with lock.reading():
        lock = pickle.loads(pickle.dumps(lock))
    lock.check_outside()  # a copy is another lock


def test_a_failed_update_lets_forwards_run():
    lock = WeightsLock()
    with lock.reading():
        pass
    with pytest.raises(ValueError), lock.writing():  # noqa: PT011 - of this test
        raise ValueError
    done = []
    started(lambda: [done.append(1) for _ in [0] if lock.reading().acquire(timeout=60)]).join(60)
    with lock.reading():
        assert done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_the_parents_threads():
    lock, is_writing, end = WeightsLock(), threading.Event(), threading.Event()
    with lock.reading():
        pass

    def update():
        with lock.writing():
            is_writing.set()
            end.wait(60)

    updating = started(update)
    is_writing.wait(60)
    if (child := os.fork()) == 0:
        with lock.reading():
            pass
        with lock.writing():
            os._exit(7)
    end.set()
    updating.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
