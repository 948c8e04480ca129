"""Replicas: a model, its engine and the application of `onward serve` in an actor of Ray Serve."""

import asyncio
import os
import platform
import warnings
from collections.abc import AsyncGenerator, Mapping
from typing import Any

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
        chosen = DeployOptions.of(options)
        threads = chosen.threads or max(1, int(chosen.cpus))
        onward.set_num_threads(threads)
        torch.set_num_threads(threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OnwardWarning)
            lm = onward.load(chosen.source, **chosen.load)
        self._warned = [str(one.message) for one in caught if issubclass(one.category, OnwardWarning)]
        self._engine = onward.Engine(lm, **chosen.engine)
        # The ingress writes the lines of the log, with what replicas say of their answers.
        settings = Settings(**{**chosen.settings, "access_log": False})
        self._hang = settings.hang_seconds
        self._app = create_app({chosen.name or chosen.source: self._engine}, settings)
        self._watching: asyncio.Task[None] | None = None
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._limit = self._engine.max_sequences
        self._fingerprint = f"{self._engine.fingerprint}-{probe(self._engine)}"
        self._outboxes: dict[str, ReplyQueue] = {}

    async def serve(self, call: ProxiedRequest, route: RouteAttempt, ingress: str, number: int) -> None:
        """Serve a call of an ingress, which gets what the answer brings from `parcels`."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._app.streams.watch())
        where = f"{self._name} {platform.node()} {os.getpid()}"
        outbox = self._outbox(ingress)
        try:
            await serve_into(self._app, call, number, outbox, where)
        finally:
            if outbox.is_closed:
                self._drop(ingress, outbox)

    async def parcels(self, route: RouteAttempt, ingress: str) -> AsyncGenerator[ReplyBatch, None]:
        """All that the calls of an ingress bring, as long as it listens."""
        if route.only != self._name:  # its words are not for a channel of another replica
            yield ReplyBatch(self._name, self._fingerprint, (), is_beat=True)
            return
        outbox = self._outbox(ingress)
        try:
            async for parcel in outbox.parcels():
                yield parcel
        finally:
            self._drop(ingress, outbox)

    async def listens(self, route: RouteAttempt, ingress: str) -> None:
        """An ingress says that it still listens to `parcels`."""
        if route.only == self._name and ingress in self._outboxes:
            self._outboxes[ingress].hear()

    async def warned(self) -> list[str]:
        """What loading the model warned of."""
        return self._warned

    def _outbox(self, ingress: str) -> ReplyQueue:
        if ingress not in self._outboxes:
            self._outboxes[ingress] = ReplyQueue(self._name, self._fingerprint)
        return self._outboxes[ingress]

    def _drop(self, ingress: str, outbox: ReplyQueue) -> None:
        if self._outboxes.get(ingress) is outbox:
            del self._outboxes[ingress]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Ray, which starts and ends replicas by it (`wanted_replicas`)."""
        return {LOAD: load_of(self._engine.stats(), self._limit)}

    def check_health(self) -> None:
        """For Ray, which replaces a replica that raises. Raises `EngineError`: the engine has failed, or its step does
        not end."""
        self._engine.check_open()
        if self._engine.seconds_since_step > self._hang:
            raise EngineError(f"a step has been running for {self._engine.seconds_since_step:.0f} s: the engine hangs")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close(drain=False)
