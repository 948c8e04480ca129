"""Replicas and their ingress as deployments of Ray Serve."""

import asyncio
import contextlib
import json
import os
import platform
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

import onward
from onward.cluster import here
from onward.cluster.bridge import served
from onward.cluster.call import Call, Item, ReplicaLostError, Route
from onward.cluster.ingress import Ingress
from onward.cluster.repeats import Repeats
from onward.cluster.retries import RetryOptions
from onward.errors import EngineBusyError, EngineError, RequestError
from onward.server import Settings, create_app

REPLICA, INGRESS = "Replica", "Ingress"
# The most requests that an engine holds, waiting ones too: it says itself when it takes no more.
_ONGOING = 4096


_TEXTS = (str, str | None)


def _read(value: Any) -> Any:
    """A text that is JSON as what it says."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """What is deployed, and how. Everything in it is JSON, as `serve build` writes it.

    source: what `onward.load` takes. name: that requests call the model by; the source's by default. load: options of
    `onward.load`. engine: options of `onward.Engine`. settings: of `onward.server.Settings`.
    replicas: how many; with max_replicas the least, and as many more as waiting requests ask for.
    fused: application and engine in one replica behind Ray's own proxy: less overhead, and a lost replica loses its
        requests. cpus: of a replica, in Ray's accounts. threads: of its kernels; None: as many as cpus.
    retries: see `RetryOptions`. affinity: whether requests of one beginning go to one replica.

    Raises:
        RequestError: an unknown option or a value outside its range.
    """

    source: str = "demo"
    name: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 2
    max_replicas: int | None = None
    fused: bool = False
    cpus: float = 1.0
    threads: int | None = None
    retries: Mapping[str, Any] = field(default_factory=dict)
    affinity: bool = True

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("max_replicas", self.replicas), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise RequestError(f"{name} must be a whole number of {least} or more; got {value!r}")
        if isinstance(self.cpus, bool) or not isinstance(self.cpus, int | float) or not 0 < self.cpus < float("inf"):
            raise RequestError(f"cpus must be a number above 0; got {self.cpus!r}")
        Settings(**self.settings)
        RetryOptions(**self.retries)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "DeployOptions":
        """The options of a mapping, such as the `args` of a Serve config file. A command line's are text.

        Raises:
            RequestError: an unknown one, or a value outside its range.
        """
        known = {each.name: each.type for each in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise RequestError(f"{unknown[0]!r} is no option of a deployment; they are {', '.join(known)}")
        return cls(**{name: _read(value) if known[name] not in _TEXTS else value for name, value in given.items()})


class Replica:
    """A model, its engine and the application of `onward serve`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        chosen = DeployOptions.of(options)
        threads = chosen.threads or max(1, int(chosen.cpus))
        onward.set_num_threads(threads)
        torch.set_num_threads(threads)
        self._engine = onward.Engine(onward.load(chosen.source, **chosen.load), **chosen.engine)
        settings = Settings(**{**chosen.settings, "access_log": False})
        self._hang = settings.hang_seconds
        self._app = create_app({chosen.name or chosen.source: self._engine}, settings)
        self._watching: asyncio.Task[None] | None = None
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._fingerprint = getattr(self._engine, "fingerprint", "x")

    async def serve(self, call: Call, route: Route) -> AsyncGenerator[Item, None]:
        """Serve a call: see `served`."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._app.streams.watch())
        async for item in served(self._app, call, self._name, self._fingerprint):
            yield self._signed(item)

    def _signed(self, item: Item) -> Item:
        """With a header that says where the answer began."""
        if not any(message["type"] == "http.response.start" for message in item.messages):
            return item
        signed: list[Mapping[str, Any]] = []
        for message in item.messages:
            if message["type"] == "http.response.start":
                where = f"{self._name} {platform.node()} {os.getpid()}"
                message = {**message, "headers": [*message["headers"], (b"x-onward-replica", where.encode())]}
            signed.append(message)
        return replace(item, messages=tuple(signed))

    def check_health(self) -> None:
        """For Ray, which replaces a replica that raises.

        Raises:
            EngineError: the engine has failed, or its step does not end.
        """
        self._engine.check_open()
        if self._engine.seconds_since_step > self._hang:
            raise EngineError(f"a step has been running for {self._engine.seconds_since_step:.0f} s: the engine hangs")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(drain=False)


@serve.ingress()
class FusedReplica(Replica):
    """A replica that clients reach through Ray's proxy alone."""

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


class RayReplicas:
    """`Replicas` behind a handle of Serve's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True, method_name="serve")
        self._deployment = str(handle.deployment_id)

    @property
    def names(self) -> frozenset[str]:
        router = here.ROUTERS.get(self._deployment)
        return frozenset() if router is None else router.names

    async def serve(self, call: Call, route: Route) -> AsyncGenerator[Item, None]:
        answer = self._handle.remote(call, route=route)
        is_over = False
        try:
            async for item in answer:
                yield item
            is_over = True
        except BackPressureError as error:
            raise EngineBusyError("all replicas have as many requests as they take; try again in 1 s", 1.0) from error
        except ray.exceptions.RayTaskError as error:  # the application's own: it would fail elsewhere, too
            raise EngineError("the server failed; its log says why") from error
        except (ray.exceptions.RayError, ReplicaUnavailableError, DeploymentUnavailableError) as error:
            raise ReplicaLostError(str(error).partition("\n")[0][:200], died=True) from error
        finally:
            if not is_over:  # Ray may wait a minute for a replica that hangs
                threading.Thread(target=answer.cancel, daemon=True).start()


def ingress_of(handle: Any, options: DeployOptions) -> Ingress:
    """The ingress of replicas. handle: of theirs."""
    settings = Settings(**options.settings)
    return Ingress(
        RayReplicas(handle),
        RetryOptions(**options.retries),
        settings.max_body,
        settings.max_requests,
        Repeats(settings.idempotency_seconds),
    )


@serve.ingress()
class RayIngress:
    """An ingress as a deployment. handle: of the replicas."""

    def __init__(self, handle: Any, options: Mapping[str, Any]) -> None:
        self._ingress = ingress_of(handle, DeployOptions.of(options))

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress


def replicas_of(options: DeployOptions) -> Any:
    """The replicas as a Serve application, without an ingress unless they are fused with theirs."""
    common: dict[str, Any] = {"name": REPLICA, "ray_actor_options": {"num_cpus": options.cpus}, **_life(options)}
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        limit = options.engine.get("max_sequences", 32)
        count = {"autoscaling_config": scaling | {"target_ongoing_requests": limit}}
    if options.fused:
        return serve.deployment(**common, **count)(FusedReplica).bind(asdict(options))
    router = RequestRouterConfig(
        request_router_class="onward.cluster.ray_router.PrefixRouter",
        request_router_kwargs={"affinity": options.affinity},
    )
    return serve.deployment(request_router_config=router, **common, **count)(Replica).bind(asdict(options))


def application(options: DeployOptions) -> Any:
    """The whole as a Serve application, behind Ray's own proxies: `ray.serve.run` runs it."""
    if options.fused:
        return replicas_of(options)
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
