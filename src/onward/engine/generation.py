"""The `Generation` of a request, for callers in threads and asyncio, whose loops are woken after a step."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from onward.errors import EngineError
from onward.language_model import Completion, Piece, Request
from onward.util.process import renew_in_forks


class Listener(NamedTuple):
    """A callback `changed` in an asyncio loop. pieces: call it for new pieces too, not only for the end."""

    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    pieces: bool


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


class Generation:
    """A request that an engine serves. It ends exactly once, with a `Completion` or with an error.

        for piece in generation: …        # the pieces as they come, from the first on
        completion = generation.result()

        async for piece in generation: …
        completion = await generation

    Any number of threads and tasks may wait for it.

    request: the prompt with all options.
    submitted: the time of submission, on the clock `time.monotonic`.
    started: when it first left the queue, on the same clock; None before.
    arrivals: (time, number of tokens) of each step that brought tokens, on the same clock.
    """

    def __init__(self, request: Request, cancel: Callable[[], None], notify: Callable[[list[Listener]], None]) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.arrivals: list[tuple[float, int]] = []
        self._cancel: Callable[[], None] | None = cancel  # None after the end, so that no engine is kept alive
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._notify = notify  # when the step is over
        self._listeners: list[Listener] = []
        renew_in_forks(self)

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._error is not None else "done"
        return f"Generation({len(self._pieces)} tokens, {state})"

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """End it with the next step, with `finish_reason` "cancelled". Does nothing after the end."""
        if (cancel := self._cancel) is not None:
            cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the completion. timeout: seconds.

        Raises:
            TimeoutError: it has not ended by then. It continues.
            OnwardError: the error that ended the request.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the generation has not ended within {timeout} s")
        return self._ended()

    def __iter__(self) -> Iterator[Piece]:
        """All pieces, as they arrive. Raises the error that ended the request."""
        at = 0
        while True:
            with self._changed:
                while not self._has_more(at):
                    self._changed.wait()
                new = self._pieces[at:]
            if not new:
                self._ended()
                return
            at += len(new)
            yield from new

    @property
    def tokens(self) -> int:
        """The number of pieces so far."""
        return len(self._pieces)

    def pieces(self, start: int = 0) -> list[Piece]:
        """The pieces so far, from index `start` on."""
        return self._pieces[start:]

    def emitted(self) -> list[list[int]]:
        """The ids so far, a list for each text, for `Engine.resume`."""
        ids: list[list[int]] = [[] for _ in range(self.request.options.n)]
        for piece in self.pieces():
            ids[piece.choice].append(piece.token_id)
        return ids

    def watch(self, changed: Callable[[], None], *, pieces: bool = True) -> Callable[[], None]:
        """Call `changed()` in the running asyncio loop after each step that brings pieces, and after the end.

        Each step makes one call into a loop for all generations together. Earlier pieces are not reported, so look for
        them after this call; an earlier end is. pieces: False reports the end only.

        Returns:
            A function that removes the callback.
        """
        listener = Listener(asyncio.get_running_loop(), changed, pieces)
        with self._changed:
            self._listeners.append(listener)
            if self.done:
                listener.loop.call_soon(changed)

        def end() -> None:
            with self._changed, suppress(ValueError):
                self._listeners.remove(listener)

        return end

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._until(at)
            new = self._pieces[at:]
            if not new:
                self._ended()
                return
            at += len(new)
            for piece in new:
                yield piece

    def __await__(self) -> Generator[None, None, Completion]:
        yield from self._until().__await__()
        return self._ended()

    async def _until(self, at: int | None = None) -> None:
        """Wait in this task's loop for the end, or for piece number `at` if that comes first."""
        changed = asyncio.Event()
        end = self.watch(changed.set, pieces=at is not None)
        try:
            while not self._has_more(at):
                await changed.wait()
                changed.clear()
        finally:
            end()

    def _has_more(self, at: int | None) -> bool:
        return self.done or (at is not None and len(self._pieces) > at)

    def _ended(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None, "it has ended"
        return self._completion

    def renew(self) -> None:
        """In a forked child: make a new lock. No more pieces will come."""
        self._changed, self._listeners, self._cancel = threading.Condition(), [], None
        if not self.done:
            self._error = EngineError(
                "this request is served in the parent process: submit it to an engine in this one"
            )

    def add(self, pieces: list[Piece], now: float | None) -> None:
        """Add pieces; listeners are called when the step is over. now: None for tokens that no step brought."""
        if not pieces:
            return
        with self._changed:
            self._pieces += pieces
            if now is not None:
                self.arrivals.append((now, len(pieces)))
            self._changed.notify_all()
            self._notify([listener for listener in self._listeners if listener.pieces])

    def end(self, outcome: Completion | BaseException) -> None:
        """outcome: the completion, or the error that ended the request."""
        with self._changed:
            assert not self.done, "a generation ends once"
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._completion = outcome
            self._cancel = None
            self._changed.notify_all()
            self._notify(self._listeners)
