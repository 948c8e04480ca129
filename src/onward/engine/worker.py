"""`EngineWorker`: the thread behind an engine, which runs the decode loop, and what other threads may ask of it.

One lock guards the requests and the policy. The thread holds it between two steps only, and may then take the lock of
the slots and that of a `Generation`; nobody who holds one of these asks for this one.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from collections import abc
from typing import Any, Literal

from onward.decoding import CacheManager, FinishReason, ScheduledSequence, Sequence, Step, decode_loop
from onward.decoding.loop import StepOutput
from onward.decoding.step import Emitted
from onward.engine.generation import LoopNotifier
from onward.engine.request import EngineRequest, Row
from onward.engine.scheduler import Scheduler
from onward.engine.stats import EngineStats, Seconds, block_counts
from onward.errors import ContextOverflowError, EngineBusyError, EngineError, one_line
from onward.language_model.runner import StepRouter
from onward.models import ModelRun
from onward.models.model import computation
from onward.util.process import renew_in_forks

# Seconds between two looks at the events by which callers cancel what waits.
_WATCH = 0.02
# Seconds that the end of the interpreter waits for the step that runs.
_AT_EXIT = 10.0


class EngineWorker:
    """Serves tickets in a thread of its own until it is told to stop.

    The thread holds this object and not the engine. So an engine that nobody holds any more is collected, and `abandon`
    lets the thread end.
    """

    def __init__(self, run: ModelRun, slots: CacheManager, policy: Scheduler[EngineRequest]) -> None:
        self.run, self.slots = run, slots
        self.watches = LoopNotifier()
        self._policy = policy
        self._steps = StepRouter(run, slots, self._failed)
        self._lock = threading.RLock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may come from a finalizer, a lock's not
        self._tickets: dict[EngineRequest, None] = {}  # all that have not ended
        self._cancelled: list[EngineRequest] = []  # since the last step
        self._watched: dict[EngineRequest, threading.Event] = {}  # those that have a `cancel` of the caller's
        self._next_watch = 0.0  # when to look at these
        self._of_sequence: dict[Sequence, EngineRequest] = {}  # of those that run
        self._state: Literal["open", "draining", "closed"] = "open"
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._blocks = block_counts(slots)
        self._seconds = Seconds()
        self._steps_run = self._output_tokens = 0
        self._busy_since: float | None = None  # when the thread last came to decide on a step; None while it waits
        self._weights_seen = -1  # the number of steps when the weights were looked at
        renew_in_forks(self)
        self._thread = threading.Thread(target=self._serve, name="onward-engine", daemon=True)
        self._thread.start()
        _alive.add(self)

    # ── for callers, from any thread ────────────────────────────────────────────────────────────────────────────

    def check_open(self) -> None:
        """Raise `EngineError` unless requests are taken."""
        if os.getpid() != self._process:
            raise EngineError("this engine's thread is in the parent process: make an engine in this one")
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {one_line(self._failure)}") from self._failure
        if self._state != "open":
            raise EngineError("the engine is closed: make another one")

    def offer(self, ticket: EngineRequest) -> None:
        """Queue a request. Raises `EngineBusyError`: the queue is full. Raises `EngineError`: the engine is closed."""
        with self._lock:
            self.check_open()
            refusal = self._policy.offer(ticket, time.monotonic())
            if refusal is not None:
                raise EngineBusyError(
                    f"the engine is busy: {refusal.reason}; try again in {refusal.seconds:.1f} s", refusal.seconds
                )
            self._tickets[ticket] = None
            cancel = ticket.job.request.options.cancel
            if cancel is not None:
                self._watched[ticket] = cancel
        self._wakes.put(None)

    def cancel(self, ticket: EngineRequest) -> None:
        """End a request between two steps."""
        with self._lock:
            self._cancelled.append(ticket)

    def stats(self) -> EngineStats:
        """The counts as they were when the step that runs began."""
        with self._lock:
            policy, seconds = self._policy, self._seconds
            return EngineStats(
                waiting=policy.waiting,
                running=len(policy.running),
                sequences=len(self._of_sequence),
                waiting_tokens=policy.waiting_tokens,
                tokens_per_second=policy.throughput.output,
                prompt_tokens_per_second=policy.throughput.prompt,
                steps=self._steps_run,
                tokens=self._output_tokens,
                preemptions=policy.preemptions,
                seconds=Seconds(seconds.schedule, seconds.step, seconds.give_out),
                **self._blocks,
            )

    @property
    def seconds_since_step(self) -> float:
        """See `Engine`."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, drain: bool, timeout: float | None = None) -> None:
        """Take no more requests, and wait until the thread has ended. timeout: for so many seconds at most."""
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
        """Nobody holds the engine any more: serve what was submitted, then end. It takes no lock, for the collector may
        call it in a thread that holds one."""
        if self._state == "open":
            self._state = "draining"
        self._wakes.put(None)

    def renew(self) -> None:
        """In a forked child, which does not have the thread. The generations say so by themselves."""
        self._lock = threading.RLock()
        self._state = "closed"
        self._tickets, self._cancelled, self._watched = {}, [], {}

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            for emission in decode_loop(self._step, self._schedule, self.slots, self._failed):
                self._give_out(emission)
                del emission  # the next one may come much later
        except BaseException as error:
            self._failure = error
        finally:
            self._end_all()
            self._busy_since = None

    def _schedule(self) -> list[ScheduledSequence]:
        """What the next step does. Waits as long as there is nothing to do; empty when the thread is to end."""
        while True:
            began = time.perf_counter()
            self._busy_since = time.monotonic()
            while not self._wakes.empty():
                self._wakes.get()
            with self._lock:
                work = self._next_work()
                self._blocks = block_counts(self.slots)
                assert work or not self._tickets, "a request waits, and nothing runs that could make room for it"
                over = not work and self._state != "open"
                self._seconds.schedule += time.perf_counter() - began
            self.watches.notify()
            if work or over:
                return work
            self._busy_since = None
            self._wakes.get()

    def _next_work(self) -> list[ScheduledSequence]:
        """End what has ended, let others join, and plan a step."""
        while True:
            self._end_some(time.monotonic())
            for ticket in self._policy.admit(self._begin):
                self._join(ticket)
            work = self._plan()
            if work or not any(ticket.error is not None for ticket in self._policy.running):
                return work

    def _plan(self) -> list[ScheduledSequence]:
        """What every row does in the next step. The newest give way where there are too few blocks."""
        while True:
            running = self._policy.running
            for ticket in running:
                try:
                    ticket.fork_siblings()
                except Exception as error:
                    ticket.error = error
            rows = [row for ticket in running if ticket.error is None for row in ticket.rows()]
            planned = self._policy.plan(rows)
            if all(self._has_room(row, tokens) for row, tokens in planned):
                return [
                    ScheduledSequence(row.sequence, self.slots.max_chunk(row.sequence.slot, row.computed, tokens))
                    for row, tokens in planned
                    if self._of_sequence[row.sequence].error is None
                ]
            victim = self._policy.preempt()
            if victim is None:
                running[0].error = ContextOverflowError("the text has outgrown the engine's whole cache")
                return []
            self._remove(victim)
            victim.preempt()

    def _begin(self, ticket: EngineRequest, new_tokens: int) -> bool:
        """Give a request slots. One that fails here runs too, so that it ends as others do."""
        try:
            if self._weights_seen != self._steps_run:  # reading them all takes a millisecond: once before a step
                self.slots.set_weights_version(computation(self.run.model))
                self._weights_seen = self._steps_run
            return ticket.begin(new_tokens, self._available())
        except Exception as error:
            ticket.error = error
            return True

    def _join(self, ticket: EngineRequest) -> None:
        self._of_sequence.update(dict.fromkeys(ticket.job.sequences, ticket))
        try:
            self._steps.join(ticket.job.sequences, ticket.job.request.options.draft)
        except Exception as error:
            ticket.error = error

    def _has_room(self, row: Row, tokens: int) -> bool:
        sequence = row.sequence
        if sequence.slot is None:  # a search, which has all that it may need
            return True
        slots, slot = self.slots, sequence.slot
        drafted = self._of_sequence[sequence].longest_draft
        length = min(row.computed + tokens + drafted, sequence.longest)
        try:
            more = slots.blocks_for(length) - slots.blocks_of([slot])
            return (more <= 0 or more <= self._available()) and slots.reserve(slot, length)
        except Exception as error:
            self._failed(sequence, error)
            return True

    def _available(self) -> int:
        """Blocks that nobody holds and that are promised to nobody who runs."""
        return self.slots.available - sum(ticket.promised_blocks for ticket in self._policy.running)

    def _step(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        for step, indices in self._steps.by_kind(work):
            for index, tokens in zip(indices, self._tried(step, [work[at] for at in indices]), strict=True):
                emitted[index] = tokens
        return emitted

    def _tried(self, step: Step, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        """The step; where it fails, its parts, until what fails is alone. The others' tokens do not depend on that."""
        try:
            return step(work)
        except BaseException as error:
            if len(work) == 1:
                self._failed(work[0].sequence, error)
                return [[]]
            half = len(work) // 2
            return [*self._tried(step, work[:half]), *self._tried(step, work[half:])]

    def _failed(self, sequence: Sequence, error: BaseException) -> None:
        self._of_sequence[sequence].error = error

    def _give_out(self, emission: StepOutput) -> None:
        """Hand on what a step emitted."""
        began = time.perf_counter()
        pieces: dict[EngineRequest, list[Any]] = {}
        for ticket in dict.fromkeys(self._of_sequence.values()):
            ticket.job.record_step(emission.seconds)
            self._give_out_replayed(ticket)
        for sequence, token, text, drafted in emission.pieces:
            ticket = self._of_sequence[sequence]
            try:
                piece = ticket.job.next_piece(sequence, token, text, drafted)
            except BaseException as error:  # of a message format of the caller's own
                self._failed(sequence, error)
                continue
            pieces.setdefault(ticket, []).append(piece)
        now = time.monotonic()
        for ticket, new in pieces.items():
            ticket.generation.add(new, now)
        with self._lock:
            self._policy.note(emission.seconds, len(emission.pieces))
            self._steps_run += 1
            self._output_tokens += len(emission.pieces)
            self._seconds.step += emission.seconds
            self._seconds.give_out += time.perf_counter() - began

    def _give_out_replayed(self, ticket: EngineRequest) -> None:
        """Hand on what waited for logprobs that the step has brought."""
        try:
            if ticket.job.replays and (pieces := ticket.job.replayed_pieces()):
                ticket.generation.add(pieces, None)
        except Exception as error:  # of a message format of the caller's own
            ticket.error = error

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_some(self, now: float) -> None:
        """End the requests that are over, cancelled, late or failed. What waits costs nothing here."""
        if self._state == "closed":
            for ticket in list(self._tickets):
                self._end(ticket, "cancelled")
        for ticket in self._policy.expire(now):
            self._end(ticket, "time")
        cancelled, self._cancelled = self._cancelled, []
        if now >= self._next_watch:  # texts that run look at their own with every token
            cancelled += [ticket for ticket, cancel in self._watched.items() if cancel.is_set()]
            self._next_watch = now + _WATCH
        for ticket in cancelled:
            self._end(ticket, "cancelled")
        for ticket in self._policy.running:
            if ticket.error is not None or ticket.job.has_ended:
                self._end(ticket)
            elif ticket.deadline <= now and not ticket.job.has_tokens:
                self._end(ticket, "time")
            else:
                ticket.release_ended()

    def _end(self, ticket: EngineRequest, reason: FinishReason | None = None) -> None:
        """End a request, once. reason: of texts that go on."""
        if ticket not in self._tickets:
            return
        del self._tickets[ticket]
        self._watched.pop(ticket, None)
        self._policy.ended(ticket)
        self._remove(ticket)
        ticket.end(reason)

    def _remove(self, ticket: EngineRequest) -> None:
        """A request runs no longer."""
        for sequence in ticket.job.sequences:
            self._of_sequence.pop(sequence, None)
        self._steps.leave(ticket.job.sequences)

    def _end_all(self) -> None:
        """When the thread ends, everything ends: as cancelled, or with the error that ended the thread."""
        with self._lock:
            self._state = "closed"
            for ticket in list(self._tickets):
                if self._failure is not None:
                    ticket.error = EngineError(f"the engine has failed: {one_line(self._failure)}")
                    ticket.error.__cause__ = self._failure
                self._end(ticket, "cancelled")
            self._blocks = block_counts(self.slots)
        self.watches.notify()


_alive: weakref.WeakSet[EngineWorker] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """End the threads before the interpreter is taken apart under them."""
    for serving in list(_alive):
        serving.close(drain=False, timeout=_AT_EXIT)
