"""Run a batch over replicas: an engine of this process, or Ray actors (extra `onward[cluster]`).

Every replica has a few chunks at a time, so that its engine never runs out of lines. A result counts once it is on
disk. A replica that dies is replaced, and its chunks are retried on any free replica. After two deaths, a chunk is set
aside, and its lines are finally served one by one, each alone on its replica. A line that then kills three replicas
gets an error as its result, and the batch continues without it.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import onward
from onward.batches.line import BatchInput, BatchLine, result_line
from onward.batches.results import BatchResults, LineResult
from onward.engine import Engine, Generation
from onward.engine.fingerprint import bits_fingerprint
from onward.errors import EngineBusyError, EngineError, OnwardError, RequestError, one_line
from onward.language_model import Request
from onward.protocols import BodyReader, ResponseKey

# Lines per chunk, and chunks that each replica has at a time.
_CHUNK, _AHEAD = 32, 3
# Replica deaths after which a chunk's lines are suspects, a line alone is to blame, and loading is given up.
_MAX_CHUNK_DEATHS, _MAX_LINE_DEATHS, _MAX_LOAD_DEATHS = 2, 3, 3
# Seconds between checks that an actor is alive, and for it to respond.
_CHECK_INTERVAL, _CHECK_TIMEOUT = 10.0, 60.0


class ReplicaDiedError(Exception):
    """A replica does not answer any more, for any reason."""


class Replica(Protocol):
    """An engine, possibly in another process. Every method may raise `ReplicaDiedError`."""

    async def load(self) -> str:
        """Load the model, and return the fingerprint of its results."""

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """Return the result of each line, in order."""

    def close(self) -> None:
        """Make sure that it does nothing more."""


class EngineReplica:
    """An engine of this process, for one asyncio loop. It never dies: if the engine fails, the batch ends."""

    def __init__(self, engine: Engine, reader: BodyReader) -> None:
        self._engine, self._reader = engine, reader
        self._fingerprint = fingerprint_of(reader)
        self._running: set[asyncio.Task[None]] = set()
        assert reader.lm.tokenizer is not None, "a batch needs a tokenizer"
        self._tokenizer = reader.lm.tokenizer

    async def load(self) -> str:
        return self._fingerprint

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """Return the result of each line, in order. The engine gets their requests in that order, as soon as it takes
        them. Raises `EngineError`: the engine has failed. Any other error becomes the result of its line."""
        return await asyncio.gather(*map(self._serve, lines))

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""

    async def _serve(self, line: BatchLine) -> LineResult:
        id = line.id(self._fingerprint)
        generations: list[Generation] = []
        try:
            body = self._reader.read(line.url, line.body, ResponseKey.new(line.created), line.seed)
            for request in body.requests:
                generations.append(await self._submit(request))
            completions = [await generation for generation in generations]
            answer = body.protocol.answer(body, completions, self._tokenizer, onward.__version__)
            text = result_line(line.served(id, answer))
        except EngineError:
            raise
        except Exception as error:
            for generation in generations:
                generation.cancel()
            return _failure(line, id, error)
        tokens = sum(len(choice.token_ids) for completion in completions for choice in completion.choices)
        return LineResult(id, text, False, tokens)

    async def _submit(self, request: Request) -> Generation:
        """Submit a request as soon as the engine takes it."""
        while True:
            try:
                generation = self._engine.submit(request)
            except EngineBusyError as error:
                if self._running:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(error.retry_after)
                continue
            task = asyncio.ensure_future(_wait(generation))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return generation


async def _wait(generation: Generation) -> None:
    with suppress(Exception):  # reported by its line
        await generation


def _failure(line: BatchLine, id: str, error: Exception) -> LineResult:
    if not isinstance(error, OnwardError):
        error = OnwardError(f"the request failed: {type(error).__name__}: {one_line(error)}")
    return LineResult(id, result_line(line.failed(id, error)), True)


class _Actor:
    """Runs in the replica's process. make: loads the model. limits: of the engine."""

    def __init__(self, make: Callable[[], BodyReader], limits: Mapping[str, Any]) -> None:
        self._make, self._limits = make, limits

    async def load(self) -> str | OnwardError:
        try:
            reader = self._make()
            self._engine = Engine(reader.lm, **self._limits)
            self._replica = EngineReplica(self._engine, reader)
        except OnwardError as error:
            return error
        return await self._replica.load()

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        return await self._replica.serve(lines)

    async def step_seconds(self) -> float:
        return self._engine.seconds_since_step


class RayReplica:
    """The job's side of an actor."""

    def __init__(self, make: Callable[[], BodyReader], limits: Mapping[str, Any]) -> None:
        import ray

        # Ray doesn't restart it: the job starts another one, which has to load first.
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 64, "scheduling_strategy": "SPREAD"}
        self._actor: Any = ray.remote(_Actor).options(**options).remote(make, dict(limits))

    async def load(self) -> str:
        loaded = await self._result(self._actor.load.remote())
        if isinstance(loaded, OnwardError):
            raise loaded
        return str(loaded)

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        result = asyncio.ensure_future(self._result(self._actor.serve.remote(list(lines))))
        while not (await asyncio.wait([result], timeout=_CHECK_INTERVAL))[0]:
            try:
                await asyncio.wait_for(self._result(self._actor.step_seconds.remote()), _CHECK_TIMEOUT)
            except (TimeoutError, ReplicaDiedError) as error:
                result.cancel()
                raise ReplicaDiedError(f"it does not respond: {error}") from error
        return await result  # type: ignore[no-any-return]

    def close(self) -> None:
        import ray

        ray.kill(self._actor)

    async def _result(self, reference: Any) -> Any:
        """Raises `ReplicaDiedError`, however the process or its engine died."""
        from ray.exceptions import RayError

        try:
            return await reference
        except RayError as error:
            raise ReplicaDiedError(one_line(error)) from error


def fingerprint_of(reader: BodyReader) -> str:
    """A hash of everything besides its line that a result depends on: the model, the software and the settings."""
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
    """Counts of lines (total, done in earlier runs, served, failed), and of tokens generated in this run."""

    lines: int
    done_before: int = 0
    served: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def over(self) -> int:
        """Finished lines."""
        return self.done_before + self.served + self.failed

    def add(self, result: LineResult) -> None:
        self.served += not result.failed
        self.failed += result.failed
        self.tokens += result.tokens


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
    replica has at a time, which should be more lines than its engine runs at once. show: called after each chunk.
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
        self._slots = [_Slot(start) for _ in range(replicas)]
        self._retries: deque[tuple[list[BatchLine], int]] = (
            deque()
        )  # chunks, with the number of replicas that died serving them
        self._suspects: deque[BatchLine] = deque()
        self.progress = Progress(batch.count)

    async def run(self) -> Progress:
        """Serve all unfinished lines, and write the output. Raises `OnwardError`: replicas cannot be started, or
        results cannot be written. Finished lines are stored for the next run."""
        try:
            await self._slots[0].ready()
            self._fingerprint = str(self._slots[0].fingerprint)
            for slot in self._slots:
                slot.fingerprint = self._fingerprint
            chunks = self._chunks()
            await _run_all(self._serve_chunks(slot, chunks) for slot in self._slots for _ in range(self._ahead))
            await _run_all(self._serve_suspects(slot) for slot in self._slots)
        finally:
            for slot in self._slots:
                slot.close()
        self._results.finish(self._fingerprint)
        return self.progress

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
        while True:
            lines, deaths = self._retries.popleft() if self._retries else (next(chunks, []), 0)
            if not lines:
                return
            try:
                self._add(await slot.serve(lines))
            except ReplicaDiedError:
                if deaths + 1 < _MAX_CHUNK_DEATHS:
                    self._retries.append((lines, deaths + 1))
                else:
                    self._suspects.extend(lines)

    async def _serve_suspects(self, slot: _Slot) -> None:
        while self._suspects:
            line = self._suspects.popleft()
            death: Exception | None = None
            for _ in range(_MAX_LINE_DEATHS):
                try:
                    self._add(await slot.serve([line]))
                    break
                except ReplicaDiedError as error:
                    death = error
            else:
                failure = OnwardError(f"{_MAX_LINE_DEATHS} replicas died while serving this line alone: {death}")
                self._add([_failure(line, line.id(self._fingerprint), failure)])

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
