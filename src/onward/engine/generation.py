"""What `Engine.submit` returns: one request's pieces as they come, and its completion, for threads and for asyncio."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import NamedTuple

from onward.errors import EngineError
from onward.language_model import Completion, Piece, Request
from onward.util.process import renew_in_forks


class Listener(NamedTuple):
    """Who wants `changed()` called in a loop. pieces: also for new pieces, not for the end alone."""

    loop: asyncio.AbstractEventLoop
    changed: Callable[[], None]
    pieces: bool


class LoopNotifier:
    """What the engine's thread has to tell when a step is over. Only that thread uses it.

    A call into a loop wakes its thread, which then competes with this one for the interpreter. So there is one a step,
    made when this thread has nothing left to do but to run the model.
    """

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, dict[Callable[[], None], None]] = {}

    def note(self, watches: Iterable[Listener], *, ended: bool) -> None:
        """Something has changed for these. ended: it was the end."""
        for loop, changed, pieces in watches:
            if pieces or ended:
                self._due.setdefault(loop, {})[changed] = None

    def notify(self) -> None:
        """Call all that are due."""
        if not self._due:
            return
        due, self._due = self._due, {}
        for loop, changed in due.items():
            try:
                loop.call_soon_threadsafe(_call, changed)
            except RuntimeError:  # the loop is closed: nobody waits there any more
                continue


def _call(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


class Generation:
    """A request that an engine serves. It ends in exactly one way: with a `Completion`, or with an error.

        for piece in generation: …        # the pieces as they come, from the first on
        completion = generation.result()

        async for piece in generation: …
        completion = await generation

    Any number of threads and tasks may wait for it.

    request: what was asked for, with all options.
    submitted: when, in seconds on the clock `time.monotonic`.
    arrivals: (when, how many tokens) for each step that brought it tokens, on the same clock.
    """

    def __init__(self, request: Request, cancel: Callable[[], None], watches: LoopNotifier | None = None) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.arrivals: list[tuple[float, int]] = []
        self._cancel: Callable[[], None] | None = cancel  # until the end: whoever keeps what ended keeps no engine
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._watches = LoopNotifier() if watches is None else watches
        self._watching: list[Listener] = []
        renew_in_forks(self)

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._error is not None else "done"
        return f"Generation({len(self._pieces)} tokens, {state})"

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """End it with its next step: `finish_reason` is then "cancelled". After its end this does nothing."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the completion. timeout: seconds.

        Raises:
            TimeoutError: it has not ended by then. It goes on.
            OnwardError: what made the request fail.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the generation has not ended within {timeout} s")
        return self._ended()

    def __iter__(self) -> Iterator[Piece]:
        """The pieces from the first on, as they come. Raises what made the request fail."""
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

    def pieces(self, start: int = 0) -> list[Piece]:
        """The pieces that there are now, from the one numbered `start` on."""
        return self._pieces[start:]

    def emitted(self) -> list[list[int]]:
        """The ids that came so far, a list for each text: what `Engine.resume` goes on from."""
        ids: list[list[int]] = [[] for _ in range(self.request.options.n)]
        for piece in self.pieces():
            ids[piece.choice].append(piece.token_id)
        return ids

    def watch(self, changed: Callable[[], None], *, pieces: bool = True) -> Callable[[], None]:
        """Have `changed()` called in the running asyncio loop after each step that brings pieces, and after the end.

        All that a step changes, for however many generations, reaches a loop in one call into it. Pieces that are there
        already are not told of: look for them after this call. The end is, if it has come.

        pieces: False for the end alone.

        Returns:
            A function that ends the watch.
        """
        watch = Listener(asyncio.get_running_loop(), changed, pieces)
        with self._changed:
            self._watching.append(watch)
            if self.done:
                watch.loop.call_soon(changed)

        def end() -> None:
            with self._changed:
                if watch in self._watching:
                    self._watching.remove(watch)

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
        """Wait in this task's loop for the end, or for the piece numbered `at` where that comes before."""
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

    # ── for the engine ──────────────────────────────────────────────────────────────────────────────────────────

    def renew(self) -> None:
        """In a forked child: a new lock. Nothing more will come."""
        self._changed, self._watching, self._cancel = threading.Condition(), [], None
        if not self.done:
            self._error = EngineError(
                "this request is served in the parent process: submit it to an engine in this one"
            )

    def add(self, pieces: list[Piece], now: float | None) -> None:
        """The engine tells those who watch, when the step is over. now: None for tokens that no step brought."""
        with self._changed:
            self._pieces += pieces
            if now is not None:
                self.arrivals.append((now, len(pieces)))
            self._changed.notify_all()
            self._watches.note(self._watching, ended=False)

    def end(self, outcome: Completion | BaseException) -> None:
        """outcome: the completion, or what made the request fail."""
        with self._changed:
            assert not self.done, "a generation ends once"
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._completion = outcome
            self._cancel = None
            self._changed.notify_all()
            self._watches.note(self._watching, ended=True)
