"""Replicas of a batch as actors of Ray, which comes with `onward[cluster]`."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onward.batches.job import ReplicaDiedError
from onward.batches.serving import LineServer, Served, fingerprint_of
from onward.engine import Engine
from onward.errors import EngineError, OnwardError, RequestError, one_line
from onward.openai import BatchLine, BodyReader

# Bytes of Ray's object store, through which lines and results pass: a few chunks a replica.
_STORE = 128 * 2**20
# Seconds between two looks at whether a replica is alive, and that it has to say so.
_LOOK, _PATIENCE = 10.0, 60.0
# Seconds that the address of a cluster has to take a connection.
_CONNECT = 5.0


class _Actor:
    """Runs in the replica's process. make: loads the model. limits: of the engine."""

    def __init__(self, make: Callable[[], BodyReader], limits: Mapping[str, Any]) -> None:
        self._make, self._limits = make, limits

    async def load(self) -> str | OnwardError:
        try:
            reader = self._make()
            self._fingerprint = fingerprint_of(reader)
            self._engine = Engine(reader.lm, **self._limits)
        except OnwardError as error:
            return error
        self._server = LineServer(self._engine, reader, self._fingerprint)
        return self._fingerprint

    async def serve(self, lines: Sequence[BatchLine]) -> list[Served]:
        begun = [await self._server.begin(line) for line in lines]
        return [await result for result in begun]

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

    async def serve(self, lines: Sequence[BatchLine]) -> list[Served]:
        answer = asyncio.ensure_future(self._answer(self._actor.serve.remote(list(lines))))
        while not (await asyncio.wait([answer], timeout=_LOOK))[0]:
            try:
                await asyncio.wait_for(self._answer(self._actor.step_seconds.remote()), _PATIENCE)
            except (TimeoutError, ReplicaDiedError) as error:
                answer.cancel()
                raise ReplicaDiedError(f"it does not answer: {error}") from error
        served: list[Served] = await answer
        return served

    def end(self) -> None:
        import ray

        ray.kill(self._actor)

    async def _answer(self, reference: Any) -> Any:
        """Raises ReplicaDiedError, whatever the process or its engine died of."""
        from ray.exceptions import RayError

        try:
            return await reference
        except RayError as error:
            raise ReplicaDiedError(one_line(error)) from error


@contextmanager
def ray_cluster(address: str | None, replicas: int) -> Iterator[None]:
    """Ray, while the block runs. address: of a cluster that runs; None starts one on this machine, for this block.

    Raises:
        RequestError: Ray is not installed. EngineError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise RequestError("replicas run on Ray: pip install 'onward[cluster]'") from error
    if address is not None:
        _check_listens(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            ray.init(address="local", num_cpus=replicas, object_store_memory=_STORE, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray cannot be reached or started ({address or 'here'}): {one_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # such as "auto"
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster answers at {address}: {one_line(error)}") from error
