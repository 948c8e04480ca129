"""What `Engine.submit` returns: one request's pieces as they come, and its completion, for threads and for asyncio."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from onward.completion import Completion, Piece
from onward.errors import EngineError
from onward.forks import renew_in_forks
from onward.requests import Request


class Generation:
    """A request that an engine serves. It ends in exactly one way: with a `Completion`, or with an error.

        for piece in generation: …        # the pieces as they come, from the first on
        completion = generation.result()

        async for piece in generation: …
        completion = await generation

    Any number of threads and tasks may wait for it.

    request: what was asked for, with all options.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self._cancel: Callable[[], None] | None = cancel  # until the end: whoever keeps what ended keeps no engine
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], None]] = []
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

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._until(functools.partial(self._has_more, at))
            new = self._pieces[at:]
            if not new:
                self._ended()
                return
            for piece in new:
                yield piece
            at += len(new)

    def __await__(self) -> Generator[None, None, Completion]:
        yield from self._until(lambda: self.done).__await__()
        return self._ended()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait in this task's loop until `condition`, which the engine's thread makes true."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        while True:
            with self._changed:
                if condition():
                    return
                woken.clear()
                if wake not in self._wakers:
                    self._wakers.append(wake)
            try:
                await woken.wait()
            finally:
                with self._changed:
                    if wake in self._wakers:
                        self._wakers.remove(wake)

    def _has_more(self, at: int) -> bool:
        return self.done or len(self._pieces) > at

    def _ended(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None, "it has ended"
        return self._completion

    # ── for the engine ──────────────────────────────────────────────────────────────────────────────────────────

    def renew(self) -> None:
        """In a forked child: a new lock. Nothing more will come."""
        self._changed, self._wakers, self._cancel = threading.Condition(), [], None
        if not self.done:
            self._error = EngineError(
                "this request is served in the parent process: submit it to an engine in this one"
            )

    def add(self, pieces: list[Piece]) -> None:
        with self._changed:
            self._pieces += pieces
            self._wake()

    def end(self, completion: Completion) -> None:
        with self._changed:
            assert not self.done, "a generation ends once"
            self._completion, self._cancel = completion, None
            self._wake()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            assert not self.done, "a generation ends once"
            self._error, self._cancel = error, None
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            try:
                wake()
            except RuntimeError:  # its loop is closed: nobody waits there any more
                continue
