"""`EngineWorker`: the thread of an engine, which runs the decode loop.

One lock guards the requests and the scheduler. The thread holds it only between two steps, and may then take the lock
of the slots and that of a `Generation`; holders of those never ask for this one.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from functools import partial
from typing import Any, Literal

from onward.cache.disk import EXIT_SECONDS, DiskCounts
from onward.cache.manager import PagedCacheManager
from onward.decoding import CacheManager, FinishReason, ScheduledSequence, StepRouter, decode_loop
from onward.decoding.shared_cache import StoreOf
from onward.engine.generation import LoopNotifier
from onward.engine.request import EngineRequest, Restorer, Row
from onward.engine.scheduler import Scheduler
from onward.engine.stats import EngineStats, Seconds
from onward.engine.updates import PendingUpdate, Updates
from onward.errors import ContextOverflowError, EngineBusyError, EngineError, one_line
from onward.models import Run
from onward.models.model import computation
from onward.util.process import renew_in_forks

# Seconds between two checks of the `cancel` events of waiting requests.
_CANCEL_INTERVAL = 0.02
# Seconds to wait for the current step when the interpreter exits.
_EXIT_TIMEOUT = 10.0


class EngineWorker:
    """Serves requests in a thread of its own until it is closed.

    The thread references this object but not the engine, so that an unused engine is garbage-collected, and `abandon`
    ends the thread.
    """

    def __init__(
        self,
        run: Run,
        slots: CacheManager,
        scheduler: Scheduler[EngineRequest],
        max_len: int,
        store: StoreOf | None = None,
    ) -> None:
        self.run, self.slots, self._store = run, slots, store
        self.notifier = LoopNotifier()
        self._scheduler = scheduler
        self._steps = StepRouter(run, slots, rows=scheduler.max_sequences, max_len=max_len, isolates=True)
        self._lock = threading.RLock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may call its `put`, but take no lock
        self._restorer = Restorer(partial(self._wakes.put, None))
        self._updates = Updates(run, slots, scheduler, self._preempt)
        self._requests: dict[EngineRequest, None] = {}  # all that have not ended
        self._cancelled: list[EngineRequest] = []  # since the last step
        self._cancel_events: dict[EngineRequest, threading.Event] = {}  # set by callers
        self._next_cancel_check = 0.0
        self._state: Literal["open", "draining", "closed"] = "open"
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._blocks = _block_counts(slots)
        self._seconds = Seconds()
        self._steps_run = self._output_tokens = 0
        self._busy_since: float | None = None  # when the thread began to plan the current step; None while it waits
        self._weights_seen = -1  # the number of steps at the last check of the weights
        renew_in_forks(self)
        self._thread = threading.Thread(target=self._serve, name="onward-engine", daemon=True)
        self._thread.start()
        _alive.add(self)

    def check_open(self) -> None:
        """Raise `EngineError` unless requests are taken."""
        if os.getpid() != self._process:
            raise EngineError("this engine's thread is in the parent process: make an engine in this one")
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {one_line(self._failure)}") from self._failure
        if self._state != "open":
            raise EngineError("the engine is closed: make another one")

    def offer(self, request: EngineRequest) -> None:
        """Queue a request. Raises `EngineBusyError` if the queue is full, and `EngineError` if the engine is closed."""
        with self._lock:
            self.check_open()
            if (rejected := self._scheduler.offer(request, time.monotonic())) is not None:
                raise EngineBusyError(
                    f"the engine is busy: {rejected.reason}; try again in {rejected.seconds:.1f} s", rejected.seconds
                )
            self._requests[request] = None
            if (cancel := request.options.cancel) is not None:
                self._cancel_events[request] = cancel
        self._wakes.put(None)

    def cancel(self, request: EngineRequest) -> None:
        """End a request between two steps."""
        with self._lock:
            self._cancelled.append(request)

    def check_outside(self) -> None:
        """Raise `EngineError` in the engine's thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise EngineError("a function that the engine calls cannot update its weights: call from another thread")

    def update(self, pending: PendingUpdate) -> int:
        """Have the thread apply an update, and return the version. Raises `EngineError` if the engine is closed."""
        with self._lock:
            self.check_open()
            self._updates.add(pending)
        self._wakes.put(None)
        try:
            return pending.result()
        finally:
            with self._lock:
                self._updates.withdraw(pending)

    def stats(self) -> EngineStats:
        """The statistics as of the beginning of the current step."""
        with self._lock:
            scheduler, seconds = self._scheduler, self._seconds
            return EngineStats(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                sequences=sum(len(request.sequences) for request in scheduler.running),
                waiting_tokens=scheduler.waiting_tokens,
                tokens_per_second=scheduler.throughput.output,
                prompt_tokens_per_second=scheduler.throughput.prompt,
                steps=self._steps_run,
                tokens=self._output_tokens,
                preemptions=scheduler.preemptions,
                seconds=Seconds(seconds.schedule, seconds.step, seconds.give_out),
                **self._blocks,
            )

    @property
    def seconds_since_step(self) -> float:
        """See `Engine`."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, drain: bool, timeout: float | None = None) -> None:
        """Reject further requests, and wait until the thread has ended, for at most `timeout` seconds."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not drain:
                self._state = "closed"
            elif self._state == "open":
                self._state = "draining"
        self._wakes.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if isinstance(self.slots, PagedCacheManager) and self.slots.disk is not None and timeout is None:
                self.slots.disk.flush(EXIT_SECONDS)

    def abandon(self) -> None:
        """Finish the queued requests, then end the thread. Takes no lock, since the garbage collector may call it in a
        thread that holds one."""
        if self._state == "open":
            self._state = "draining"
        self._wakes.put(None)

    def renew(self) -> None:
        """In a forked child, which does not have the thread: close. The generations fail by themselves."""
        self._lock = threading.RLock()
        self._state = "closed"
        self._requests, self._cancelled, self._cancel_events = {}, [], {}

    def _serve(self) -> None:
        try:
            for seconds in decode_loop(self._steps, self._schedule, self.slots, isolates=True):
                self._deliver(seconds)
        except BaseException as error:
            self._failure = error
        finally:
            self._end_all()
            self._busy_since = None

    def _schedule(self) -> list[ScheduledSequence]:
        """The work of the next step. Waits while there is none; empty when the thread is to end."""
        while True:
            began = time.perf_counter()
            self._busy_since = time.monotonic()
            while not self._wakes.empty():
                self._wakes.get()
            with self._lock:
                work = self._next_work()
                self._blocks = _block_counts(self.slots)
                idle = not work and not self._restorer
                assert not idle or not self._requests, "a request waits, and nothing runs that could make room for it"
                done = idle and self._state != "open"
                self._seconds.schedule += time.perf_counter() - began
            self.notifier.notify()
            if work or done:
                return work
            self._busy_since = None
            self._wakes.get()

    def _next_work(self) -> list[ScheduledSequence]:
        while True:
            self._end_some(time.monotonic())
            self._admit(new=not self._updates.apply(self._requests))
            self._restorer.advance()
            work = self._plan()
            if work or not any(request.error is not None for request in self._scheduler.running):
                return work

    def _admit(self, new: bool) -> None:
        """Start requests of the queue, and preempt those of other clients where fairness asks for it. new: also
        requests that have not run before."""
        while True:
            for request in self._scheduler.admit(self._begin, new=new):
                try:
                    self._steps.join(request.sequences, request.options.draft)
                except Exception as error:
                    request.error = error
            if not new or (victim := self._scheduler.make_room()) is None:
                return
            self._preempt(victim)

    def _preempt(self, victim: EngineRequest) -> None:
        self._restorer.cancel(victim)
        victim.preempt()

    def _plan(self) -> list[ScheduledSequence]:
        """The work of each row in the next step. The newest requests are preempted if there are too few blocks."""
        while True:
            running = self._scheduler.running
            for request in running:
                try:
                    request.fork_siblings()
                except Exception as error:
                    request.error = error
            rows = [row for request in running if request.error is None for row in request.rows()]
            planned = self._scheduler.plan(rows)
            if all(self._has_room(row, tokens) for row, tokens in planned):
                return [
                    ScheduledSequence(row.sequence, self.slots.max_chunk(row.sequence.slot, row.computed, tokens))
                    for row, tokens in planned
                    if row.request.error is None
                ]
            victim = self._scheduler.preempt()
            if victim is None:
                running[0].error = ContextOverflowError("the text has outgrown the engine's whole cache")
                return []
            self._preempt(victim)

    def _begin(self, request: EngineRequest, new_tokens: int) -> bool:
        """Give a request slots. One that fails here runs too, so that it ends like the others."""
        try:
            if self._weights_seen != self._steps_run:  # this takes a millisecond, so once a step
                version = computation(self.run.model)
                self.slots.set_weights_version(version)
                if isinstance(self.slots, PagedCacheManager) and self._store is not None:
                    self.slots.set_store(self._store(self.run.model, version))
                self._weights_seen = self._steps_run
            has_begun = request.begin(new_tokens, self._available())
            if has_begun:
                self._restorer.add(request)
            return has_begun
        except Exception as error:
            request.error = error
            return True

    def _has_room(self, row: Row, tokens: int) -> bool:
        slots, sequence = self.slots, row.sequence
        length = min(row.computed + tokens + row.request.longest_draft, sequence.longest)
        if sequence.slot is None or length <= sequence.reserved:  # a beam search has reserved all its blocks
            return True
        try:
            more = slots.cost(length) - slots.cost_of([sequence.slot])
            if (more > 0 and more > self._available()) or not slots.reserve(sequence.slot, length):
                return False
            sequence.reserved = length
            return True
        except Exception as error:
            row.request.error = error
            return True

    def _available(self) -> int:
        """The number of free blocks that are not reserved for running requests."""
        return self.slots.stats().available - sum(request.promised_blocks for request in self._scheduler.running)

    def _deliver(self, seconds: float) -> None:
        began, now, tokens, version = time.perf_counter(), time.monotonic(), 0, self.run.model.weights_lock.version
        for request in self._scheduler.running:
            try:
                tokens += request.deliver(seconds, now, version)
            except BaseException as error:  # from the caller's own message format
                request.error = error
        with self._lock:
            self._scheduler.record_step(seconds, tokens)
            self._steps_run += 1
            self._output_tokens += tokens
            self._seconds.step += seconds
            self._seconds.give_out += time.perf_counter() - began

    def _end_some(self, now: float) -> None:
        """End requests that are finished, cancelled, late or failed."""
        if self._state == "closed":
            for request in list(self._requests):
                self._end(request, "cancelled")
        for request in self._scheduler.expire(now):
            self._end(request, "time")
        cancelled, self._cancelled = self._cancelled, []
        if now >= self._next_cancel_check:  # running sequences check theirs with every token
            cancelled += [request for request, event in self._cancel_events.items() if event.is_set()]
            self._next_cancel_check = now + _CANCEL_INTERVAL
        for request in cancelled:
            self._end(request, "cancelled")
        for request in self._scheduler.running:
            if request.error is not None or request.has_ended:
                self._end(request)
            elif request.deadline <= now and not request.has_tokens:
                self._end(request, "time")
            else:
                request.release_ended()

    def _end(self, request: EngineRequest, reason: FinishReason | None = None) -> None:
        """End a request, once. reason: the finish reason of unfinished texts."""
        if request not in self._requests:
            return
        del self._requests[request]
        self._cancel_events.pop(request, None)
        self._scheduler.ended(request)
        self._restorer.cancel(request)
        request.end(reason)

    def _end_all(self) -> None:
        """End all requests with the thread, as cancelled or with the error that ended it."""
        with self._lock:
            self._state = "closed"
            for request in list(self._requests):
                if self._failure is not None:
                    request.error = EngineError(f"the engine has failed: {one_line(self._failure)}")
                    request.error.__cause__ = self._failure
                self._end(request, "cancelled")
            self._updates.end(self._failure)
            self._blocks = _block_counts(self.slots)
        self.notifier.notify()


def _block_counts(slots: CacheManager) -> dict[str, Any]:
    """The fields of `EngineStats` that describe the cache."""
    total, available, cached, hits, lookups = slots.stats()
    disk = slots.disk_counts if isinstance(slots, PagedCacheManager) else DiskCounts()
    return {
        "restored_tokens": disk.restored,
        "blocks_written": disk.written,
        "blocks_dropped": disk.dropped,
        "blocks": total,
        "blocks_used": total - available,
        "blocks_cached": cached,
        "blocks_free": available - cached,
        "hit_rate": hits / lookups if lookups else 0.0,
    }


_alive: weakref.WeakSet[EngineWorker] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for worker in list(_alive):
        worker.close(drain=False, timeout=_EXIT_TIMEOUT)
