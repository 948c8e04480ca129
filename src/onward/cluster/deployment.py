"""Replicas and their ingress as deployments of Ray Serve."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from onward.cluster import router as routing
from onward.cluster.call import ProxiedRequest, ReplicaLostError, ReplyBatch, RouteAttempt
from onward.cluster.channel import LISTENING, ChannelReplicaSet
from onward.cluster.ingress import Ingress, RetryOptions
from onward.cluster.options import DeployOptions
from onward.cluster.replica import Replica
from onward.errors import EngineBusyError, EngineError
from onward.server import Settings, log_to_stderr


class RayReplicas:
    """`ReplicaTransport` behind a handle of Serve's."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle.options(method_name="serve")
        self._parcels = handle.options(stream=True, method_name="parcels")
        self._listens = handle.options(method_name="listens")
        self._listening: set[asyncio.Task[None]] = set()
        self._deployment = str(handle.deployment_id)

    @property
    def names(self) -> frozenset[str]:
        router = routing.ROUTERS.get(self._deployment)
        return frozenset() if router is None else router.names

    def call(
        self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int
    ) -> tuple[Awaitable[None], Callable[[], None]]:
        response = self._calls.remote(call, route=route, ingress=ingress, number=number)
        return _ended(response), lambda: _cancel(response)

    async def parcels(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        response = self._parcels.remote(route=RouteAttempt(only=replica), ingress=ingress)
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
                await self._listens.remote(route=RouteAttempt(only=replica), ingress=ingress)
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


REPLICA, INGRESS = "Replica", "Ingress"
# The most requests that an engine holds, waiting ones too: it says itself when it takes no more.
_ONGOING = 4096

# How soon Ray looks at what replicas report, and how long more of it has to last until there are more of them.
_SCALING = {
    "policy": {"policy_function": "onward.cluster.router:wanted_replicas"},
    "metrics_interval_s": 2.0,
    "look_back_period_s": 10.0,
    "upscale_delay_s": 10.0,
}


def ingress_of(handle: Any, options: DeployOptions) -> Ingress:
    """The ingress of replicas. handle: of theirs."""
    replicas = ChannelReplicaSet(RayReplicas(handle))
    return Ingress(replicas, RetryOptions(**options.retries), Settings(**options.settings))


@serve.ingress()
class RayIngress:
    """An ingress as a deployment. handle: of the replicas."""

    def __init__(self, handle: Any, options: Mapping[str, Any]) -> None:
        log_to_stderr()
        self._ingress = ingress_of(handle, DeployOptions.of(options))

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress


def replicas_of(options: DeployOptions) -> Any:
    """The replicas as a Serve application without an ingress."""
    common: dict[str, Any] = {"name": REPLICA, "ray_actor_options": {"num_cpus": options.cpus}, **_life(options)}
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        count = {"autoscaling_config": scaling | _SCALING}
    router = RequestRouterConfig(
        request_router_class="onward.cluster.ray_router.PrefixRouter",
        request_router_kwargs={"affinity": options.affinity},
    )
    return serve.deployment(request_router_config=router, **common, **count)(Replica).bind(asdict(options))


def application(options: DeployOptions) -> Any:
    """The whole as a Serve application, behind Ray's own proxies: `ray.serve.run` runs it."""
    ingress = serve.deployment(name=INGRESS, ray_actor_options={"num_cpus": 0.1}, num_replicas=1, **_life(options))
    return ingress(RayIngress).bind(replicas_of(options), asdict(options))


def _life(options: DeployOptions) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _ONGOING,
        "graceful_shutdown_timeout_s": Settings(**options.settings).drain,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }


def build_app(args: Mapping[str, Any]) -> Any:
    """For `serve run onward.cluster:build_app source=demo replicas=2`, and for `serve build` and `serve deploy`.

    Raises:
        RequestError: an unknown argument, or a value outside its range.
    """
    return application(DeployOptions.of(args))
