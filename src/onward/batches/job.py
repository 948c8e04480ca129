"""Chunks of lines over replicas. It knows nothing of Ray: tests run it over replicas that they let die.

Every replica has a few chunks at a time, so that its engine is never short of lines. What a replica answers is on the
disk before it counts. A replica that dies is replaced, and its chunks are served again, by whoever is free. A chunk
over which two replicas died is set aside. In the end its lines are served one by one, each alone on its replica; one
that then ends three replicas is answered with an error: it is the line's doing, and the batch goes on without it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from onward.batches.results import BatchResults
from onward.batches.serving import Served
from onward.errors import EngineError, OnwardError, RequestError
from onward.openai import BatchInput, BatchLine

# Lines of a chunk, and chunks that a replica has at a time.
_CHUNK, _AHEAD = 32, 3
# Deaths of replicas: of a chunk until its lines are suspects; of a line that was alone; in a row, while loading.
_OF_A_CHUNK, _OF_A_LINE, _WHILE_LOADING = 2, 3, 3


class ReplicaDiedError(Exception):
    """A replica answers no longer, whatever the reason."""


class Replica(Protocol):
    """An engine somewhere else. Every method may raise `ReplicaDiedError`."""

    async def load(self) -> str:
        """Load the model; the fingerprint under which its results count."""

    async def serve(self, lines: Sequence[BatchLine]) -> list[Served]:
        """A result for each line, in order."""

    def end(self) -> None:
        """Make sure that it does nothing more."""


@dataclass
class Progress:
    """Counts of lines: in all, done before, served and failed now; and of tokens generated now."""

    lines: int
    done_before: int = 0
    served: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def over(self) -> int:
        """Lines that nothing is left to do for."""
        return self.done_before + self.served + self.failed

    def took(self, served: Served) -> None:
        """Count a line that is over."""
        self.served += not served.failed
        self.failed += served.failed
        self.tokens += served.tokens


class _Place:
    """Where a replica runs, and another one once it has died. fingerprint: of the job, as soon as it is known."""

    def __init__(self, start: Callable[[], Replica], fingerprint: str | None = None) -> None:
        self.fingerprint = fingerprint
        self._start = start
        self._replica: Replica | None = None
        self._starting = asyncio.Lock()

    async def serve(self, lines: Sequence[BatchLine]) -> list[Served]:
        replica = await self.ready()
        try:
            return await replica.serve(lines)
        except ReplicaDiedError:
            if self._replica is replica:
                self.end()
            raise

    async def ready(self) -> Replica:
        """The replica that runs, loaded.

        Raises:
            EngineError: several died one after the other while they loaded. RequestError: its results would be others.
        """
        async with self._starting:
            died: Exception | None = None
            for _ in range(_WHILE_LOADING):
                if self._replica is not None:
                    return self._replica
                replica = self._start()
                try:
                    self._check(await replica.load())
                except ReplicaDiedError as error:
                    died = error
                    replica.end()
                    continue
                self._replica = replica
            if self._replica is None:
                raise EngineError(f"{_WHILE_LOADING} replicas died one after the other while they loaded: {died}")
            return self._replica

    def end(self) -> None:
        if self._replica is not None:
            self._replica.end()
            self._replica = None

    def _check(self, fingerprint: str) -> None:
        if self.fingerprint not in (None, fingerprint):
            raise RequestError(
                "two replicas would not give the same answers: their models, versions or instruction sets differ; let "
                "all run on machines that are alike"
            )
        self.fingerprint = fingerprint


class BatchJob:
    """One run of a batch over replicas.

    start: makes a replica. show: called after each chunk.
    """

    def __init__(
        self,
        batch: BatchInput,
        results: BatchResults,
        start: Callable[[], Replica],
        replicas: int,
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._batch, self._results, self._show = batch, results, show
        self._places = [_Place(start) for _ in range(replicas)]
        self._again: deque[tuple[list[BatchLine], int]] = deque()  # chunks with how many replicas died over them
        self._suspects: deque[BatchLine] = deque()
        self.progress = Progress(batch.count)

    async def run(self) -> Progress:
        """Serve all lines that are not done, and write the output.

        Raises:
            OnwardError: replicas cannot be had, or results cannot be written. What is done is kept for the next run.
        """
        try:
            await self._places[0].ready()
            self._fingerprint = str(self._places[0].fingerprint)
            for place in self._places:
                place.fingerprint = self._fingerprint
            chunks = self._chunks()
            await _all(self._serve_chunks(place, chunks) for place in self._places for _ in range(_AHEAD))
            await _all(self._serve_suspects(place) for place in self._places)
        finally:
            for place in self._places:
                place.end()
        self._results.finish(self._fingerprint)
        return self.progress

    def _chunks(self) -> Iterator[list[BatchLine]]:
        """What is not done, read as it is asked for."""
        chunk: list[BatchLine] = []
        for line in self._batch.lines():
            if line.error is not None:
                self.progress.failed += 1
            elif self._results.has(line.id(self._fingerprint)):
                self.progress.done_before += 1
            else:
                chunk.append(line)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    async def _serve_chunks(self, place: _Place, chunks: Iterator[list[BatchLine]]) -> None:
        """One of the chunks that a replica has at a time, and the next when it is done."""
        while True:
            lines, deaths = self._again.popleft() if self._again else (next(chunks, []), 0)
            if not lines:
                return
            try:
                self._took(await place.serve(lines))
            except ReplicaDiedError:
                if deaths + 1 < _OF_A_CHUNK:
                    self._again.append((lines, deaths + 1))
                else:
                    self._suspects.extend(lines)

    async def _serve_suspects(self, place: _Place) -> None:
        while self._suspects:
            line = self._suspects.popleft()
            died: Exception | None = None
            for _ in range(_OF_A_LINE):
                try:
                    self._took(await place.serve([line]))
                    break
                except ReplicaDiedError as death:
                    died = death
            else:
                error = OnwardError(f"{_OF_A_LINE} replicas died, each while it served this line alone: {died}")
                self._took([Served(line.failed(line.id(self._fingerprint), error), True)])

    def _took(self, answers: Sequence[Served]) -> None:
        self._results.add(served.result for served in answers)
        for served in answers:
            self.progress.took(served)
        self._show(self.progress)


async def _all(work: Iterator[Awaitable[None]]) -> None:
    """Wait for all; what one raises ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
