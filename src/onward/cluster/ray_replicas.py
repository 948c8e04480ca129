"""The replicas of a deployment, as an ingress in any process reaches them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from onward.cluster import here
from onward.cluster.bridge import LISTENING
from onward.cluster.call import Call, Parcel, ReplicaLostError, Route
from onward.errors import EngineBusyError, EngineError


class RayReplicas:
    """`Remote` behind a handle of Serve's."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle.options(method_name="serve")
        self._parcels = handle.options(stream=True, method_name="parcels")
        self._listens = handle.options(method_name="listens")
        self._listening: set[asyncio.Task[None]] = set()
        self._deployment = str(handle.deployment_id)

    @property
    def names(self) -> frozenset[str]:
        router = here.ROUTERS.get(self._deployment)
        return frozenset() if router is None else router.names

    def call(self, call: Call, route: Route, ingress: str, number: int) -> tuple[Awaitable[None], Callable[[], None]]:
        response = self._calls.remote(call, route=route, ingress=ingress, number=number)
        return _ended(response), lambda: _cancel(response)

    async def parcels(self, replica: str, ingress: str) -> AsyncGenerator[Parcel, None]:
        response = self._parcels.remote(route=Route(only=replica), ingress=ingress)
        ended = asyncio.Event()
        listening = asyncio.create_task(self._say_that_it_listens(replica, ingress, ended))
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)
        try:
            async for parcel in response:
                yield parcel
        except Exception as error:
            raise _said(error) from error
        finally:
            ended.set()
            _cancel(response)

    async def _say_that_it_listens(self, replica: str, ingress: str, ended: asyncio.Event) -> None:
        """Say so from time to time, until the channel has ended. Where a replica is lost the channel tells of it."""
        while not ended.is_set():
            with contextlib.suppress(Exception):
                await self._listens.remote(route=Route(only=replica), ingress=ingress)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LISTENING)


async def _ended(response: Any) -> None:
    try:
        await response
    except Exception as error:
        raise _said(error) from error


def _said(error: Exception) -> Exception:
    """What an error of Ray's means to an ingress."""
    if isinstance(error, BackPressureError):
        return EngineBusyError("all replicas have as many requests as they take; try again in 1 s", 1.0)
    if isinstance(error, ray.exceptions.RayTaskError):  # the application's own: it would fail elsewhere, too
        return EngineError("the server failed; its log says why")
    if isinstance(error, ray.exceptions.RayError | ReplicaUnavailableError | DeploymentUnavailableError):
        return ReplicaLostError(str(error).partition("\n")[0][:200], died=True)
    return error


def _cancel(response: Any) -> None:
    """End a call. Ray may wait a minute for a replica that hangs, so nobody waits here."""

    def cancel() -> None:
        with contextlib.suppress(Exception):  # of a call that has failed: whoever waits for it has its error
            response.cancel()

    threading.Thread(target=cancel, daemon=True).start()
