"""Batch replicas as Ray actors (extra `onward[cluster]`)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.batches.job import EngineReplica, ReplicaDiedError
from onward.batches.line import BatchLine
from onward.batches.results import LineResult
from onward.engine import Engine
from onward.errors import OnwardError, one_line
from onward.protocols import BodyReader

# Seconds between checks that a replica is alive, and for it to respond.
_CHECK_INTERVAL, _CHECK_TIMEOUT = 10.0, 60.0


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
