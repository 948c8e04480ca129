"""`EngineWorker`: the thread of an engine, which runs the decode loop.

One lock guards the requests and the scheduler. The thread holds it only between two steps, and may then take the lock
of the slots and that of a `Generation`; holders of those never ask for this one.
"""

import asyncio
import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from onward.decoding import CacheManager, FinishReason, ScheduledSequence, StepRouter, decode_loop
from onward.engine.request import EngineRequest, Listener, Row
from onward.engine.scheduler import Scheduler
from onward.errors import ContextOverflowError, EngineBusyError, EngineError, one_line
from onward.models import Run
from onward.models.model import computation
from onward.util.process import renew_in_forks

# Seconds between two checks of the `cancel` events of waiting requests.
_CANCEL_INTERVAL = 0.02
# Seconds to wait for the current step when the interpreter exits.
_EXIT_TIMEOUT = 10.0


@dataclass
class Seconds:
    """Seconds spent so far: schedule: planning steps; step: running the model and sampling; give_out: delivering
    tokens."""

    schedule: float = 0.0
    step: float = 0.0
    give_out: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine, and its counts since it was created.

    waiting, running: requests. sequences: the running sequences. waiting_tokens: prompt tokens in the queue.
    blocks: all blocks of the cache; blocks_used: those of running sequences; blocks_cached: those of the prefix cache;
        blocks_free: the others. A block has 64 positions; without paging it is a row, and for models with sliding or
        recurrent layers it is a unit of memory.
    hit_rate: the share of prompt ids that were found in the cache.
    tokens_per_second, prompt_tokens_per_second: over the last half minute of work.
    steps, tokens, preemptions: counts. seconds: for each part of a step.
    """

    waiting: int
    running: int
    sequences: int
    waiting_tokens: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    hit_rate: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    steps: int
    tokens: int
    preemptions: int
    seconds: Seconds = field(default_factory=Seconds)


def block_counts(slots: CacheManager) -> dict[str, Any]:
    """The fields of `EngineStats` that describe the cache."""
    total, available, cached, hits, lookups = slots.stats()
    return {
        "blocks": total,
        "blocks_used": total - available,
        "blocks_cached": cached,
        "blocks_free": available - cached,
        "hit_rate": hits / lookups if lookups else 0.0,
    }


class LoopNotifier:
    """Collects the callbacks that are due after a step. Only the engine's thread uses it.

    A call into a loop wakes its thread, which then competes with this one for the interpreter. So each step makes one,
    when this thread has nothing left to do but run the model.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, dict[Callable[[], None], None]] = {}

    def add(self, listeners: Iterable[Listener]) -> None:
        for loop, changed, _ in listeners:
            self._due.setdefault(loop, {})[changed] = None

    def notify(self) -> None:
        due, self._due = self._due, {}
        for loop, changed in due.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_call, changed)


def _call(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


class EngineWorker:
    """Serves requests in a thread of its own until it is closed.

    The thread references this object but not the engine, so that an unused engine is garbage-collected, and `abandon`
    ends the thread.
    """

    def __init__(self, run: Run, slots: CacheManager, scheduler: Scheduler[EngineRequest], max_len: int) -> None:
        self.run, self.slots = run, slots
        self.notifier = LoopNotifier()
        self._scheduler = scheduler
        self._steps = StepRouter(run, slots, rows=scheduler.max_sequences, max_len=max_len, isolates=True)
        self._lock = threading.RLock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may call its `put`, but take no lock
        self._requests: dict[EngineRequest, None] = {}  # all that have not ended
        self._cancelled: list[EngineRequest] = []  # since the last step
        self._cancel_events: dict[EngineRequest, threading.Event] = {}  # set by callers
        self._next_cancel_check = 0.0
        self._state: Literal["open", "draining", "closed"] = "open"
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._blocks = block_counts(slots)
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
            if (cancel := request.state.request.options.cancel) is not None:
                self._cancel_events[request] = cancel
        self._wakes.put(None)

    def cancel(self, request: EngineRequest) -> None:
        """End a request between two steps."""
        with self._lock:
            self._cancelled.append(request)

    def stats(self) -> EngineStats:
        """The statistics as of the beginning of the current step."""
        with self._lock:
            scheduler, seconds = self._scheduler, self._seconds
            return EngineStats(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                sequences=sum(len(request.state.sequences) for request in scheduler.running),
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
                self._blocks = block_counts(self.slots)
                assert work or not self._requests, "a request waits, and nothing runs that could make room for it"
                done = not work and self._state != "open"
                self._seconds.schedule += time.perf_counter() - began
            self.notifier.notify()
            if work or done:
                return work
            self._busy_since = None
            self._wakes.get()

    def _next_work(self) -> list[ScheduledSequence]:
        while True:
            self._end_some(time.monotonic())
            self._admit()
            work = self._plan()
            if work or not any(request.error is not None for request in self._scheduler.running):
                return work

    def _admit(self) -> None:
        """Start requests of the queue, and preempt those of other clients where fairness asks for it."""
        while True:
            for request in self._scheduler.admit(self._begin):
                try:
                    self._steps.join(request.state.sequences, request.state.request.options.draft)
                except Exception as error:
                    request.error = error
            if (victim := self._scheduler.make_room()) is None:
                return
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
            victim.preempt()

    def _begin(self, request: EngineRequest, new_tokens: int) -> bool:
        """Give a request slots. One that fails here runs too, so that it ends like the others."""
        try:
            if self._weights_seen != self._steps_run:  # this takes a millisecond, so once a step
                self.slots.set_weights_version(computation(self.run.model))
                self._weights_seen = self._steps_run
            return request.begin(new_tokens, self._available())
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
        began, now, tokens = time.perf_counter(), time.monotonic(), 0
        for request in self._scheduler.running:
            try:
                tokens += request.deliver(seconds, now)
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
            if request.error is not None or request.state.has_ended:
                self._end(request)
            elif request.deadline <= now and not request.state.has_tokens:
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
            self._blocks = block_counts(self.slots)
        self.notifier.notify()


_alive: weakref.WeakSet[EngineWorker] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for worker in list(_alive):
        worker.close(drain=False, timeout=_EXIT_TIMEOUT)
