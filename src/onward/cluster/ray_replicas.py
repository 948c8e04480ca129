"""The replicas of a deployment, as an ingress in any process reaches them."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from onward.cluster import here
from onward.cluster.call import Call, Parcel, ReplicaLostError, Route
from onward.errors import EngineBusyError, EngineError

# Seconds between two looks at whether a replica is still there.
_LOOK = 1.0


class RayReplicas:
    """`Remote` behind a handle of Serve's."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle.options(method_name="serve")
        self._parcels = handle.options(stream=True, method_name="parcels")
        self._deployment = str(handle.deployment_id)

    @property
    def names(self) -> frozenset[str]:
        router = here.ROUTERS.get(self._deployment)
        return frozenset() if router is None else router.names

    def call(self, call: Call, route: Route, ingress: str, number: int) -> tuple[Awaitable[None], Callable[[], None]]:
        response = self._calls.remote(call, route=route, ingress=ingress, number=number)
        return _ended(response), lambda: _cancel(response)

    async def parcels(self, replica: str, ingress: str) -> AsyncGenerator[Parcel, None]:
        while True:
            response = self._parcels.remote(route=Route(only=replica), ingress=ingress)
            try:
                parcel = await self._first(response, replica)
                # Ray gives the replica that it found for a call that was ended to the next one that waits.
                while parcel.replica == replica:
                    yield parcel
                    parcel = await anext(response)
            except StopAsyncIteration:
                return
            except Exception as error:
                raise _said(error) from error
            finally:
                _cancel(response)

    async def _first(self, response: Any, replica: str) -> Parcel:
        """The first parcel. Ray waits for ever for a replica that is gone."""
        coming = asyncio.ensure_future(anext(response))
        try:
            while not (await asyncio.wait([coming], timeout=_LOOK))[0]:
                if replica not in self.names:
                    raise ReplicaLostError(f"replica {replica} is gone", died=True)
            return coming.result()  # type: ignore[no-any-return]
        finally:
            coming.cancel()
            coming.add_done_callback(_look_at)  # Ray raises an error of its own where a task is cancelled


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Take the error of what nobody waits for any more: asyncio reports errors that nobody took."""
    if not ended.cancelled():
        ended.exception()


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
    threading.Thread(target=response.cancel, daemon=True).start()
