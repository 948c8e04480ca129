"""Replicas of a batch: an engine of this process, or Ray actors (extra `onward[cluster]`)."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import onward
from onward.batches.line import BatchLine, result_line
from onward.batches.results import LineResult
from onward.engine import Engine, Generation
from onward.errors import EngineBusyError, EngineError, OnwardError, one_line
from onward.language_model import Request
from onward.language_model.fingerprint import bits_fingerprint
from onward.protocols import BodyReader

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
    """An engine of this process, for one asyncio loop. It never dies: if the engine fails, the batch ends. client: the
    name of its requests in the engine."""

    def __init__(self, engine: Engine, reader: BodyReader, client: str | None = None) -> None:
        self._engine, self._reader, self._client = engine, reader, client
        self._fingerprint = fingerprint_of(reader)
        self._running: set[asyncio.Task[None]] = set()
        self._emitted: dict[str, list[list[list[int]]]] = {}  # by the requests of lines that were interrupted

    async def load(self) -> str:
        return self._fingerprint

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        """Return the result of each line, in order. The engine gets their requests in that order, as soon as it takes
        them. If it is cancelled, a later call continues the lines where they were. Raises `EngineError`: the engine has
        failed. Any other error becomes the result of its line."""
        return await asyncio.gather(*map(self._serve, lines))

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""

    async def _serve(self, line: BatchLine) -> LineResult:
        id = line.id(self._fingerprint)
        generations: list[Generation] = []
        try:
            body = self._reader.read(line.url, line.body, line.key(id), line.seed)
            emitted = self._emitted.pop(id, [])
            for at, request in enumerate(body.requests):
                generations.append(await self._submit(request, emitted[at] if at < len(emitted) else []))
            completions = [await generation for generation in generations]
            if any(completion.finish_reason == "cancelled" for completion in completions):
                raise EngineError("the engine was closed before the line was complete")
            uncached = [replace(completion, cached_tokens=0) for completion in completions]  # it depends on the run
            answer = body.protocol.answer(body, uncached)
            text = result_line(line.served(id, answer))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._emitted[id] = [generation.emitted() for generation in generations]
            for generation in generations:
                generation.cancel()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            return failure(line, id, error)
        tokens = sum(len(choice.token_ids) for completion in completions for choice in completion.choices)
        return LineResult(id, text, False, tokens)

    async def _submit(self, request: Request, emitted: list[list[int]]) -> Generation:
        """Submit a request as soon as the engine takes it. emitted: ids of its texts, if it was interrupted."""
        while True:
            try:
                if any(emitted) and request.options.beams == 1:
                    generation = self._engine.resume(request, emitted=emitted, client=self._client)
                else:
                    generation = self._engine.submit(request, client=self._client)
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


def failure(line: BatchLine, id: str, error: Exception) -> LineResult:
    """The result of a line that has failed."""
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
