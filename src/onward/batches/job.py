"""A batch over replicas. An engine of this process is one; tests have some that they let die.

Every replica has a few chunks at a time, so that its engine is never short of lines. A result is on the disk before it
counts. A replica that dies is replaced, and its chunks are served again, by whichever is free. A chunk over which two
replicas died is set aside. In the end its lines are served one by one, each alone on its replica; one that then ends
three replicas gets an error for its result: the line is to blame, and the batch goes on without it.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import onward
from onward.batches.line import BatchInput, BatchLine, result_line
from onward.batches.results import BatchResults, LineResult
from onward.engine import Engine, Generation
from onward.engine.fingerprint import bits_fingerprint
from onward.errors import EngineBusyError, EngineError, OnwardError, RequestError, one_line
from onward.language_model import Request
from onward.protocols import BodyReader, ResponseKey, answer_body

# Lines of a chunk, and chunks that a replica has at a time.
_CHUNK, _AHEAD = 32, 3
# Deaths of replicas: of a chunk until its lines are suspects; of a line that was alone; in a row, while loading.
_OF_A_CHUNK, _OF_A_LINE, _WHILE_LOADING = 2, 3, 3


class ReplicaDiedError(Exception):
    """A replica answers no longer, whatever the reason."""


class Replica(Protocol):
    """An engine somewhere. Every method may raise `ReplicaDiedError`."""

    async def load(self) -> str:
        """Load the model; the fingerprint under which its results count."""

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """A result for each line, in order."""

    def close(self) -> None:
        """Make sure that it does nothing more."""


class EngineReplica:
    """An engine of this process, for one asyncio loop. It never dies: an engine that has failed ends the batch."""

    def __init__(self, engine: Engine, reader: BodyReader) -> None:
        self._engine, self._reader = engine, reader
        self._fingerprint = fingerprint_of(reader)
        self._running: set[asyncio.Task[None]] = set()
        assert reader.lm.tokenizer is not None, "a batch needs one"
        self._tokenizer = reader.lm.tokenizer

    async def load(self) -> str:
        """The fingerprint."""
        return self._fingerprint

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """A result for each line, in order. The engine gets their requests in that order, as soon as it takes them.

        Raises:
            EngineError: the engine has failed. Any other error is of a line alone, a defect too.
        """
        return await asyncio.gather(*map(self._serve, lines))

    def close(self) -> None:
        """Nothing: the engine is its owner's."""

    async def _serve(self, line: BatchLine) -> LineResult:
        id = line.id(self._fingerprint)
        generations: list[Generation] = []
        try:
            body = self._reader.read(line.url, line.body, ResponseKey.new(line.created), line.seed)
            for request in body.requests:
                generations.append(await self._submitted(request))
            completions = [await generation for generation in generations]
            answer = answer_body(body, completions, self._tokenizer, onward.__version__)
            text = result_line(line.served(id, answer))
        except EngineError:
            raise
        except Exception as error:
            for generation in generations:
                generation.cancel()
            return _failure(line, id, error)
        return LineResult(id, text, False, answer["usage"]["completion_tokens"])

    async def _submitted(self, request: Request) -> Generation:
        """Submit a request as soon as the engine takes it."""
        while True:
            try:
                generation = self._engine.submit(request)
                break
            except EngineBusyError as error:
                if self._running:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(error.retry_after)
        task = asyncio.ensure_future(_end_of(generation))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return generation


async def _end_of(generation: Generation) -> None:
    with suppress(Exception):  # its line has it
        await generation


def _failure(line: BatchLine, id: str, error: Exception) -> LineResult:
    if not isinstance(error, OnwardError):
        error = OnwardError(f"the text could not be finished: {type(error).__name__}: {one_line(error)}")
    return LineResult(id, result_line(line.failed(id, error)), True)


def fingerprint_of(reader: BodyReader) -> str:
    """A hash of all that a line's answer follows from beside the line: the model, what runs it, and the settings."""
    lm = reader.lm
    parts = {
        "version": onward.__version__,
        "bits": bits_fingerprint(lm.model),
        "adapters": {name: bits_fingerprint(lm.model, loaded) for name, loaded in lm.adapters.items()},
        "defaults": repr(lm.defaults),
        "name": reader.model,
        "options": reader.options,
        "variables": reader.variables,
    }
    content = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.blake2b(content.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


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

    def add(self, result: LineResult) -> None:
        """Count a line that is over."""
        self.served += not result.failed
        self.failed += result.failed
        self.tokens += result.tokens


class _Place:
    """Where a replica runs, and another one once it has died. fingerprint: of the job, as soon as it is known."""

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
        """The replica that runs, loaded. Raises `EngineError`: several died one after the other while they loaded.
        Raises `RequestError`: its results would be others."""
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
                    replica.close()
                    continue
                self._replica = replica
            if self._replica is None:
                raise EngineError(f"{_WHILE_LOADING} replicas died one after the other while they loaded: {died}")
            return self._replica

    def close(self) -> None:
        if self._replica is not None:
            self._replica.close()
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

    start: makes a replica; called again where one has died. chunk: lines that a replica is sent, and gives back, in one
    piece. ahead: chunks that each has at a time; it wants more lines than its engine runs at once. show: called after
    each chunk.
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
        show: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._batch, self._results, self._show = batch, results, show
        self._chunk, self._ahead = chunk, ahead
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
            await _all(self._serve_chunks(place, chunks) for place in self._places for _ in range(self._ahead))
            await _all(self._serve_suspects(place) for place in self._places)
        finally:
            for place in self._places:
                place.close()
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
            if len(chunk) == self._chunk:
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
                self._add(await place.serve(lines))
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
                    self._add(await place.serve([line]))
                    break
                except ReplicaDiedError as death:
                    died = death
            else:
                error = OnwardError(f"{_OF_A_LINE} replicas died, each while it served this line alone: {died}")
                self._add([_failure(line, line.id(self._fingerprint), error)])

    def _add(self, results: Sequence[LineResult]) -> None:
        self._results.add(results)
        for result in results:
            self.progress.add(result)
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
