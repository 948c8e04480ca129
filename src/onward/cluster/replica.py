"""Replicas: Ray Serve actors with a model, its engine and the application of `onward serve`."""

import asyncio
import os
import platform
import warnings
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray
import torch
from ray import serve

import onward
from onward.cluster.call import ProxiedRequest, ReplyBatch, RouteAttempt
from onward.cluster.channel import ReplyQueue, serve_into
from onward.cluster.options import DeployOptions
from onward.cluster.router import LOAD, load_of
from onward.engine.engine import probe
from onward.errors import EngineError, OnwardWarning
from onward.server import Settings, create_app


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
        settings = Settings(**{**chosen.settings, "access_log": False})
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


def _keep_port_local() -> None:
    """On a cluster that listens on the loopback interface only, do the same with Ray Serve's own port of this replica,
    which would listen on all interfaces. (Calls don't use that port, but Ray's actors.)"""
    from ray.serve._private import replica as serve_replica

    if ray.util.get_node_ip_address() == "127.0.0.1":
        add_port = serve_replica.add_port_to_grpc_server
        serve_replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")
