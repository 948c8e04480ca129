"""Replicas and their ingress as Ray Serve deployments."""

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
from onward.cluster.channel import RENEW_INTERVAL, ChannelReplicaSet
from onward.cluster.ingress import Ingress, RetryOptions
from onward.cluster.options import DeployOptions
from onward.cluster.replica import Replica
from onward.errors import EngineBusyError, EngineError
from onward.server import Settings, log_to_stderr


class RayReplicas:
    """`ReplicaTransport` over a Ray Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._calls = handle.options(method_name="serve")
        self._batches = handle.options(stream=True, method_name="batches")
        self._renew = handle.options(method_name="renew")
        self._renewals: set[asyncio.Task[None]] = set()
        self._deployment = str(handle.deployment_id)

    @property
    def names(self) -> frozenset[str]:
        router = routing.ROUTERS.get(self._deployment)
        return frozenset() if router is None else router.names

    def call(
        self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int
    ) -> tuple[Awaitable[None], Callable[[], None]]:
        response = self._calls.remote(call, route=route, ingress=ingress, number=number)
        return _result(response), lambda: _cancel(response)

    async def batches(self, replica: str, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        response = self._batches.remote(route=RouteAttempt(only=replica), ingress=ingress)
        ended = asyncio.Event()
        renewal = asyncio.create_task(self._keep_renewing(replica, ingress, ended))
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)
        try:
            async for batch in response:
                yield batch
        except Exception as error:
            raise _translated(error) from error
        finally:
            ended.set()
            _cancel(response)

    async def _keep_renewing(self, replica: str, ingress: str, ended: asyncio.Event) -> None:
        """Renew the lease on a replica's queue until the channel has ended. If the replica is lost, the channel
        raises."""
        while not ended.is_set():
            with contextlib.suppress(Exception):
                await self._renew.remote(route=RouteAttempt(only=replica), ingress=ingress)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), RENEW_INTERVAL)


async def _result(response: Any) -> None:
    try:
        await response
    except Exception as error:
        raise _translated(error) from error


def _translated(error: Exception) -> Exception:
    """The error for the ingress that corresponds to one of Ray's."""
    if isinstance(error, BackPressureError):
        return EngineBusyError("all replicas are at their limit of requests; try again in 1 s", 1.0)
    if isinstance(error, ray.exceptions.RayTaskError):  # from the application: it would fail elsewhere, too
        return EngineError("the server failed; its log has the details")
    if isinstance(error, ray.exceptions.RayError | ReplicaUnavailableError | DeploymentUnavailableError):
        return ReplicaLostError(str(error).partition("\n")[0][:200], died=True)
    return error


def _cancel(response: Any) -> None:
    """Cancel a call in a thread, since Ray may wait a minute for a replica that hangs."""

    def cancel() -> None:
        with contextlib.suppress(Exception):  # the call has failed, which its caller knows
            response.cancel()

    threading.Thread(target=cancel, daemon=True).start()


REPLICA, INGRESS = "Replica", "Ingress"
# Ray's limit of requests per replica, including waiting ones. The engine itself refuses more than it can queue.
_MAX_REQUESTS = 4096
# Settings of access, which only the ingress checks.
_INGRESS_SETTINGS = frozenset({"api_keys", "hosts", "cors_origins"})


def ingress_of(handle: Any, options: DeployOptions) -> Ingress:
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
    common = {"name": REPLICA, "ray_actor_options": {"num_cpus": options.cpus}, **_lifetime(options)}
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling: dict[str, Any] = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        scaling["policy"] = {"policy_function": "onward.cluster.router:desired_replicas"}
        # How often Ray reads the replicas' loads, and how long a higher load has to last before it adds replicas.
        scaling |= {"metrics_interval_s": 2.0, "look_back_period_s": 10.0, "upscale_delay_s": 10.0}
        count = {"autoscaling_config": scaling}
    router = RequestRouterConfig(
        request_router_class="onward.cluster.ray_router.PrefixRouter",
        request_router_kwargs={"affinity": options.affinity},
    )
    arguments = asdict(options)
    arguments["settings"] = {name: value for name, value in options.settings.items() if name not in _INGRESS_SETTINGS}
    return serve.deployment(request_router_config=router, **common, **count)(Replica).bind(arguments)


def application(options: DeployOptions) -> Any:
    """The whole deployment as a Serve application behind Ray's own proxies, for `ray.serve.run`."""
    ingress = serve.deployment(name=INGRESS, ray_actor_options={"num_cpus": 0.1}, num_replicas=1, **_lifetime(options))
    return ingress(RayIngress).bind(replicas_of(options), asdict(options))


def _lifetime(options: DeployOptions) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _MAX_REQUESTS,
        "graceful_shutdown_timeout_s": Settings(**options.settings).drain,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }


def build_app(args: Mapping[str, Any]) -> Any:
    """For `serve run onward.cluster:build_app source=demo replicas=2`, and for `serve build` and `serve deploy`. Raises
    `RequestError`: an unknown argument, or a value outside its range."""
    return application(DeployOptions.of(args))
