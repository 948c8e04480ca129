"""Replicas of a batch as actors of Ray, which comes with `onward[cluster]`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.batches.job import EngineReplica, ReplicaDiedError
from onward.batches.line import BatchLine
from onward.batches.results import LineResult
from onward.engine import Engine
from onward.errors import OnwardError, one_line
from onward.protocols import BodyReader

# Seconds between two looks at whether a replica is alive, and that it has to say so.
_LOOK, _PATIENCE = 10.0, 60.0


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
    """An actor as the job sees it."""

    def __init__(self, make: Callable[[], BodyReader], limits: Mapping[str, Any]) -> None:
        import ray

        # It is not restarted by Ray: the job starts another one, which has to load first.
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 64, "scheduling_strategy": "SPREAD"}
        self._actor: Any = ray.remote(_Actor).options(**options).remote(make, dict(limits))

    async def load(self) -> str:
        loaded: str | OnwardError = await self._answer(self._actor.load.remote())
        if isinstance(loaded, OnwardError):
            raise loaded
        return loaded

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        answer = asyncio.ensure_future(self._answer(self._actor.serve.remote(list(lines))))
        while not (await asyncio.wait([answer], timeout=_LOOK))[0]:
            try:
                await asyncio.wait_for(self._answer(self._actor.step_seconds.remote()), _PATIENCE)
            except (TimeoutError, ReplicaDiedError) as error:
                answer.cancel()
                raise ReplicaDiedError(f"it does not answer: {error}") from error
        served: list[LineResult] = await answer
        return served

    def close(self) -> None:
        import ray

        ray.kill(self._actor)

    async def _answer(self, reference: Any) -> Any:
        """Raises ReplicaDiedError, whatever the process or its engine died of."""
        from ray.exceptions import RayError

        try:
            return await reference
        except RayError as error:
            raise ReplicaDiedError(one_line(error)) from error
