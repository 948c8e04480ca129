"""Run a batch over replicas.

Every replica has a few chunks at a time, so that its engine never runs out of lines. A result counts once it is on
disk. A replica that dies is replaced, and its chunks are retried on any free replica. After two deaths, a chunk is set
aside, and its lines are finally served one by one, each alone on its replica. A line that then kills three replicas
gets an error as its result, and the batch continues without it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from onward.batches.line import BatchInput, BatchLine
from onward.batches.replica import Replica, ReplicaDiedError, failure
from onward.batches.results import BatchResults, LineResult
from onward.errors import EngineError, OnwardError, RequestError

# Lines per chunk, and chunks that each replica has at a time.
_CHUNK, _AHEAD = 32, 3
# Replica deaths after which a chunk's lines are suspects, a line alone is to blame, and loading is given up.
_MAX_CHUNK_DEATHS, _MAX_LINE_DEATHS, _MAX_LOAD_DEATHS = 2, 3, 3
_LIMIT_INTERVAL = 0.02  # seconds between readings of the limit of chunks


@dataclass
class Progress:
    """Counts of lines (total, done in earlier runs, served, failed), and of tokens and bytes of results in this run."""

    lines: int
    done_before: int = 0
    served: int = 0
    failed: int = 0
    tokens: int = 0
    nbytes: int = 0

    @property
    def over(self) -> int:
        """Finished lines."""
        return self.done_before + self.served + self.failed

    def add(self, result: LineResult) -> None:
        self.served += not result.failed
        self.failed += result.failed
        self.tokens += result.tokens
        self.nbytes += len(result.text)


class _Slot:
    """A place for a replica, which is replaced after it died. fingerprint: of the job, once known."""

    def __init__(self, start: Callable[[], Replica], fingerprint: str | None = None) -> None:
        self.fingerprint = fingerprint
        self._start = start
        self._replica: Replica | None = None
        self._starting = asyncio.Lock()

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        replica = await self.ready()
        try:
            return await replica.serve(lines)
        except ReplicaDiedError:
            if self._replica is replica:
                self.close()
            raise

    async def ready(self) -> Replica:
        """Return the loaded replica. Raises `EngineError`: several in a row died while loading. Raises `RequestError`:
        its results would differ."""
        async with self._starting:
            death: Exception | None = None
            for _ in range(_MAX_LOAD_DEATHS):
                if self._replica is not None:
                    return self._replica
                replica = self._start()
                try:
                    fingerprint = await replica.load()
                except ReplicaDiedError as error:
                    death = error
                    replica.close()
                    continue
                if self.fingerprint not in (None, fingerprint):
                    message = "replicas would give different results: their models, versions or instruction sets differ"
                    raise RequestError(f"{message}; run all of them on the same kind of machine")
                self.fingerprint, self._replica = fingerprint, replica
                return replica
            raise EngineError(f"{_MAX_LOAD_DEATHS} replicas in a row died while loading: {death}")

    def close(self) -> None:
        if self._replica is not None:
            self._replica.close()
            self._replica = None


class BatchJob:
    """One run of a batch over replicas.

    start: makes a replica; also called to replace one. chunk: lines sent to a replica together. ahead: chunks that each
    replica has at a time, which should be more lines than its engine runs at once. limit: returns the number of chunks
    that may be served now, at least 1; when it falls, the newest are interrupted. show: called after each chunk.
    """

    def __init__(
        self,
        batch: BatchInput,
        results: BatchResults,
        start: Callable[[], Replica],
        replicas: int = 1,
        *,
        chunk: int = _CHUNK,
        ahead: int = _AHEAD,
        limit: Callable[[], int] | None = None,
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._batch, self._results, self._show = batch, results, show
        self._chunk, self._ahead, self._limit = chunk, ahead, limit
        self._stopped = False
        self._serving: list[asyncio.Task[list[LineResult]]] = []  # the oldest first
        self._slots = [_Slot(start) for _ in range(replicas)]
        # Chunks, with the number of replicas that died serving them.
        self._retries: deque[tuple[list[BatchLine], int]] = deque()
        self._suspects: deque[BatchLine] = deque()
        self.progress = Progress(batch.count)

    async def run(self) -> Progress:
        """Serve all unfinished lines, and write the output. Raises `OnwardError`: replicas cannot be started, or
        results cannot be written. Finished lines are stored for the next run."""
        self._results.finish(await self.serve())
        return self.progress

    def stop(self) -> None:
        """Begin no more chunks, so that `serve` returns once the running ones are complete. Any thread may call it."""
        self._stopped = True

    async def serve(self) -> str:
        """Serve all unfinished lines, and return the fingerprint of the results. Raises `OnwardError`: as `run`."""
        watching: asyncio.Task[None] | None = None
        try:
            await self._slots[0].ready()
            self._fingerprint = str(self._slots[0].fingerprint)
            for slot in self._slots:
                slot.fingerprint = self._fingerprint
            chunks = self._chunks()
            watching = asyncio.ensure_future(self._interrupt_excess())
            await _run_all(self._serve_chunks(slot, chunks) for slot in self._slots for _ in range(self._ahead))
            await _run_all(self._serve_suspects(slot) for slot in self._slots)
        finally:
            if watching is not None:
                watching.cancel()
            for slot in self._slots:
                slot.close()
        return self._fingerprint

    def _chunks(self) -> Iterator[list[BatchLine]]:
        """The unfinished lines, read lazily."""
        chunk: list[BatchLine] = []
        for line in self._batch.lines():
            if line.error is not None:
                self.progress.failed += 1
            elif self._results.has(line.id(self._fingerprint)):
                self.progress.done_before += 1
            else:
                chunk.append(line)
            if len(chunk) == self._chunk:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    async def _serve_chunks(self, slot: _Slot, chunks: Iterator[list[BatchLine]]) -> None:
        """Serve one chunk at a time until there are no more."""
        while not self._stopped:
            if self._limit is not None and len(self._serving) >= self._limit():
                await asyncio.sleep(_LIMIT_INTERVAL)
                continue
            lines, deaths = self._retries.popleft() if self._retries else (next(chunks, []), 0)
            if not lines:
                return
            try:
                results = await self._serve(slot, lines)
                if results is None:
                    self._retries.appendleft((lines, deaths))
                else:
                    self._add(results)
            except ReplicaDiedError:
                if deaths + 1 < _MAX_CHUNK_DEATHS:
                    self._retries.append((lines, deaths + 1))
                else:
                    self._suspects.extend(lines)

    async def _serve(self, slot: _Slot, lines: Sequence[BatchLine]) -> list[LineResult] | None:
        """The results of a chunk; None if it was interrupted."""
        serving = asyncio.ensure_future(slot.serve(lines))
        self._serving.append(serving)
        try:
            await asyncio.wait([serving])
        finally:
            self._serving.remove(serving)
            serving.cancel()
        return None if serving.cancelled() else serving.result()

    async def _interrupt_excess(self) -> None:
        """Keep the limit."""
        while self._limit is not None:
            for serving in self._serving[self._limit() :]:
                serving.cancel()
            await asyncio.sleep(_LIMIT_INTERVAL)

    async def _serve_suspects(self, slot: _Slot) -> None:
        while self._suspects and not self._stopped:
            line = self._suspects.popleft()
            death: Exception | None = None
            for _ in range(_MAX_LINE_DEATHS):
                try:
                    self._add(await slot.serve([line]))
                    break
                except ReplicaDiedError as error:
                    death = error
            else:
                failed = OnwardError(f"{_MAX_LINE_DEATHS} replicas died while serving this line alone: {death}")
                self._add([failure(line, line.id(self._fingerprint), failed)])

    def _add(self, results: Sequence[LineResult]) -> None:
        self._results.add(results)
        for result in results:
            self.progress.add(result)
        self._show(self.progress)


async def _run_all(work: Iterator[Awaitable[None]]) -> None:
    """Wait for all; if one raises, cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
