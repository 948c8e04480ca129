"""Replicas and their ingress as Ray Serve deployments, and their life: launch, serve until a signal, remove."""

import asyncio
import contextlib
import io
import logging
import os
import platform
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

import onward
from onward.cluster.call import ProxiedRequest, ReplyBatch, RouteAttempt
from onward.cluster.channel import ChannelReplicaSet, ReplyQueue, serve_into
from onward.cluster.ingress import Ingress, RetryOptions
from onward.cluster.options import DeployOptions
from onward.cluster.ray_router import RayReplicas
from onward.cluster.ray_session import connected
from onward.cluster.router import LOAD, load_of
from onward.engine.engine import probe
from onward.errors import EngineError, OnwardWarning, one_line, warn
from onward.server import Settings, bound, check_response_store, create_app, log_to_stderr
from onward.server.lifecycle import Server, address_of, config_of
from onward.server.log import log

__all__ = ["DeployOptions", "build_app", "log_to_stderr", "running", "until_signal"]

REPLICA, INGRESS = "Replica", "Ingress"
# Ray's limit of requests per replica, including waiting ones. The engine itself refuses more than it can queue.
_MAX_REQUESTS = 4096
# Settings of access, which only the ingress checks.
_INGRESS_SETTINGS = frozenset({"api_keys", "hosts", "cors_origins"})
_APPLICATION = "onward"


class Replica:
    """A model, its engine and the application of `onward serve`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        _keep_port_local()
        chosen = DeployOptions.of(options)
        threads = chosen.threads or max(1, int(chosen.cpus))
        onward.set_num_threads(threads)
        torch.set_num_threads(threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OnwardWarning)
            lm = onward.load(chosen.source, **chosen.load)
        self._load_warnings = [str(one.message) for one in caught if issubclass(one.category, OnwardWarning)]
        self._engine = onward.Engine(lm, **chosen.engine)
        # The ingress has checked access, and writes the access log with fields from the replicas, which can only be
        # reached through Ray.
        settings = Settings(**{"response_store": None, **chosen.settings, "access_log": False})
        self._hang_seconds = settings.hang_seconds
        self._app = create_app({chosen.name or chosen.source: self._engine}, settings)
        self._watching: asyncio.Task[None] | None = None
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._fingerprint = f"{self._engine.fingerprint}-{probe(self._engine)}"
        self._process = {"host": platform.node(), "pid": os.getpid()}
        self._queues: dict[str, ReplyQueue] = {}

    async def serve(self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int) -> None:
        """Serve a call of an ingress, which reads the response from `batches`."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._app.streams.watch())
        queue = self._queue(ingress)
        try:
            await serve_into(self._app, call, number, queue, self._name, self._process)
        finally:
            if queue.is_closed:
                self._drop(ingress, queue)

    async def batches(self, route: RouteAttempt, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        """The messages for an ingress, as long as its lease lasts."""
        if route.only != self._name:  # the channel is for another replica
            yield ReplyBatch(self._name, self._fingerprint, (), is_beat=True)
            return
        queue = self._queue(ingress)
        try:
            async for batch in queue.batches():
                yield batch
        finally:
            self._drop(ingress, queue)

    async def renew(self, route: RouteAttempt, ingress: str) -> None:
        """Extend the lease of an ingress on its queue."""
        if route.only == self._name and ingress in self._queues:
            self._queues[ingress].renew()

    async def load_warnings(self) -> list[str]:
        """The warnings from loading the model."""
        return self._load_warnings

    def _queue(self, ingress: str) -> ReplyQueue:
        if ingress not in self._queues:
            self._queues[ingress] = ReplyQueue(self._name, self._fingerprint)
        return self._queues[ingress]

    def _drop(self, ingress: str, queue: ReplyQueue) -> None:
        if self._queues.get(ingress) is queue:
            del self._queues[ingress]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load, for Ray's autoscaling (`desired_replicas`)."""
        return {LOAD: load_of(self._engine.stats(), self._engine.max_sequences)}

    def check_health(self) -> None:
        """Ray replaces a replica that raises here. Raises `EngineError`: the engine has failed or hangs."""
        self._engine.check_open()
        if self._engine.seconds_since_step > self._hang_seconds:
            raise EngineError(f"a step has been running for {self._engine.seconds_since_step:.0f} s: the engine hangs")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(drain=False)
        if hasattr(self, "_app") and (tracing := self._app.service.tracing) is not None:
            tracing.close()


def _keep_port_local() -> None:
    """On a cluster that listens on the loopback interface only, do the same with Ray Serve's own port of this replica,
    which would listen on all interfaces. (Calls don't use that port, but Ray's actors.)"""
    from ray.serve._private import replica as serve_replica

    if ray.util.get_node_ip_address() == "127.0.0.1":
        add_port = serve_replica.add_port_to_grpc_server
        serve_replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")


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


@contextlib.contextmanager
def running(
    options: DeployOptions, host: str = "127.0.0.1", port: int = 8000, address: str | None = None
) -> Iterator[str]:
    """Deploy, and yield the URL once all replicas are ready. Afterwards the deployment is removed.

    Other deployments on the cluster are unaffected, including those of this command, whose applications have other
    names. The ingress runs in this process. Raises `RequestError`: as `connected`, or the server cannot listen on the
    address. Raises `EngineError`: the replicas do not start.

    address: of a Ray cluster, "auto" for this machine's; None starts Ray for this deployment alone.
    """
    check_response_store(Settings(**{"response_store": None, **options.settings}))
    replicas = options.max_replicas or options.replicas
    if address is None and options.threads is None:
        options = replace(options, threads=max(1, onward.num_threads() // replicas))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Ray accounts for CPUs only; the number of threads is set above.
    processors = int(replicas * options.cpus) + 2
    with closing(bound(host, port)) as listener, connected(address, processors):
        # Several commands may start on a cluster at the same time.
        name = _APPLICATION if address is None else f"{_APPLICATION}-{secrets.token_hex(4)}"
        try:
            ingress = ingress_of(_start(name, replicas_of(options)), options)
            _repeat_warnings(name)
            with _serving(ingress, listener, Settings(**options.settings).drain):
                yield address_of(listener)
        finally:
            with contextlib.redirect_stdout(io.StringIO()):  # Ray prints its controller's end as a failure
                _end(name)


def _start(name: str, replicas: Any) -> Any:
    """Start the replicas without Ray's proxy, and return a handle once all are ready."""
    serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "WARNING"})
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    try:
        return serve.run(replicas, name=name, route_prefix=None, logging_config=quiet)
    except (RuntimeError, RayServeException) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise EngineError(f"the replicas do not start: {one_line(cause)}") from error


def _repeat_warnings(name: str) -> None:
    """Repeat a replica's warnings in this process, since the replica's output is not shown. All replicas have the
    same."""
    for message in serve.get_deployment_handle(REPLICA, app_name=name).load_warnings.remote().result():
        warn(message)


def _end(name: str) -> None:
    """Remove an application, and shut down Ray Serve if there is no other."""
    try:
        others = serve.status().applications.keys() - {name}
    except RayError:  # the controller is gone
        others = set()
    if others:
        serve.delete(name)
    else:
        serve.shutdown()


@contextlib.contextmanager
def _serving(ingress: Ingress, listener: socket.socket, drain: float) -> Iterator[None]:
    """Run the ingress in a thread. At the end, running requests get `drain` seconds to finish."""
    server = Server(config_of(ingress))
    listener.listen()  # queues connections until the thread accepts them
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="onward-ingress")
    thread.start()
    try:
        yield
        if thread.is_alive() and ingress.gate.in_flight:
            log("drains", requests=ingress.gate.in_flight, seconds=drain)
            asyncio.run_coroutine_threadsafe(ingress.drain(drain), loops[0]).result()
    finally:
        server.should_exit = True
        thread.join()
        if ingress.tracing is not None:
            ingress.tracing.close()


def until_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    received = threading.Event()
    before = {number: signal.signal(number, lambda *_: received.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not received.wait(1.0):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
