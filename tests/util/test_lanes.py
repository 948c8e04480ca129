"""Lanes: clients take turns, a cancelled call is dropped, and threads end with their process."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial

import pytest

from onward.util.lanes import Lane

SECONDS = 60


class Blocked:
    """Calls that block until they are released."""

    def __init__(self) -> None:
        self.started, self.end = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.started.release()
        assert self.end.wait(SECONDS)


def test_clients_take_turns() -> None:
    order: list[str] = []
    lane, blocked = Lane("test", 1), Blocked()
    first = lane.submit(blocked, "a")
    assert blocked.started.acquire(timeout=SECONDS)
    calls = [lane.submit(partial(order.append, name), name[0]) for name in ("a1", "a2", "a3", "b1", "c1")]
    assert (len(lane), lane.running) == (5, 1)
    blocked.end.set()
    for call in (first, *calls):
        call.result(SECONDS)
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_one_client_leaves_a_thread_to_the_others() -> None:
    lane, blocked = Lane("test", 3), Blocked()
    slow = [lane.submit(blocked, "a") for _ in range(5)]
    for _ in range(2):
        assert blocked.started.acquire(timeout=SECONDS)
    assert lane.submit(lambda: 5, "b").result(SECONDS) == 5
    assert lane.running == 2
    blocked.end.set()
    for call in slow:
        call.result(SECONDS)


def test_concurrent_calls_run_at_once() -> None:
    lane, blocked = Lane("test", 3), Blocked()
    lane.submit(lambda: 1).result(SECONDS)  # a thread is idle, and is notified once
    calls = [lane.submit(blocked, client) for client in "abc"]
    for _ in range(3):
        assert blocked.started.acquire(timeout=SECONDS)
    blocked.end.set()
    for call in calls:
        call.result(SECONDS)


def test_a_cancelled_call_is_dropped_with_its_arguments() -> None:
    class Body:
        pass

    lane, blocked = Lane("test", 1), Blocked()
    running = lane.submit(blocked)
    assert blocked.started.acquire(timeout=SECONDS)
    body = Body()
    known = weakref.ref(body)
    queued = lane.submit(partial(id, body))
    assert not running.cancel()
    assert queued.cancel()
    assert len(lane) == 0
    del body
    gc.collect()
    assert known() is None
    blocked.end.set()
    running.result(SECONDS)
    with pytest.raises(CancelledError):
        queued.result(0)


def test_errors_are_raised_and_the_thread_continues() -> None:
    lane = Lane("test", 1)
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 // 0).result(SECONDS)
    assert lane.submit(threading.get_ident).result(SECONDS) == lane.submit(threading.get_ident).result(SECONDS)
    assert lane.running == 0


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.util.lanes._IDLE_SECONDS", 0.01)
    lane = Lane("idle-test", 2)
    thread = lane.submit(threading.current_thread).result(SECONDS)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert lane.submit(lambda: 1).result(SECONDS) == 1


def test_many_calls_from_many_threads() -> None:
    lane, counts = Lane("test", 3), []
    threads = [
        threading.Thread(
            target=lambda: counts.append(sum(lane.submit(lambda: 1, str(at % 7)).result(SECONDS) for at in range(200)))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert counts == [200] * 8
    assert (len(lane), lane.running) == (0, 0)


def test_a_forked_child_has_its_own_threads() -> None:
    lane = Lane("test", 1)
    lane.submit(lambda: 1).result(SECONDS)
    if not (child := os.fork()):
        os._exit(0 if lane.submit(lambda: 1).result(SECONDS) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_call_does_not_keep_the_process_alive() -> None:
    program = "import time; from onward.util.lanes import Lane; Lane('x', 1).submit(lambda: time.sleep(1000))"
    assert subprocess.run([sys.executable, "-c", program], timeout=SECONDS, check=False).returncode == 0
