"""How an ingress reaches replicas through Ray Serve: its request router, with `HashRing`, and the calls."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import islice
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from onward.cluster import router as routing
from onward.cluster.call import ProxiedRequest, ReplicaLostError, ReplyBatch, RouteAttempt
from onward.cluster.channel import RENEW_INTERVAL
from onward.cluster.router import HashRing
from onward.errors import EngineBusyError, EngineError

_MAX_CANDIDATES = 16  # replicas tried for a call before it backs off and the router chooses again
_RETRY_DELAY = 0.1  # seconds before retrying the only replica for a call
_MAX_DEAD = 64  # names of dead replicas that are remembered


class PrefixRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Sends a call to the replica that `HashRing` picks for its `RouteAttempt`, the call's argument `route`.

    It runs in the process of the ingress, and assigns the replica to the route there. From Ray's session router it
    inherits how calls wait and are retried if a replica takes no more.

    A call for one particular replica (`RouteAttempt.only`) bypasses Ray's queue. Ray searches with two tasks for each
    remaining replica, and a task that searches for a dead one never ends: a few such calls would block all others,
    including those to healthy replicas.
    """

    # A replica with a busy CPU takes longer than the default 0.1 s to report its queue length.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 2.0

    def initialize_state(self, affinity: bool = True, **others: Any) -> None:
        super().initialize_state(**others)
        self._ring, self._affinity = HashRing(), affinity
        self._dead: deque[str] = deque(maxlen=_MAX_DEAD)
        self._ring.update([_name(replica) for replica in self._replica_id_set])
        routing.ROUTERS[str(self._deployment_id)] = self

    @property
    def names(self) -> frozenset[str]:
        """The replicas that take calls now."""
        return self._ring.replicas

    def update_replicas(self, replicas: list[Any]) -> None:
        # Ray's controller notices a death seconds after the calls of the replica have failed.
        living = [replica for replica in replicas if _name(replica.replica_id) not in self._dead]
        super().update_replicas(living)
        self._ring.update([_name(replica.replica_id) for replica in living])

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._dead.append(_name(replica_id))
        self._ring.update(self._ring.replicas - {_name(replica_id)})

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        route = _route_of(pending_request)
        if route is None or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        loads = {_name(replica): self._replica_queue_len_cache.get(replica) or 0 for replica in self._replica_id_set}
        ranked = self._ring.order(route.key, lambda name: loads.get(name, 0), route.avoid, affinity=self._affinity)
        return [[by_name[name]] for name in islice(ranked, _MAX_CANDIDATES) if name in by_name]

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        route = _route_of(pending_request)
        if route is not None and route.only is not None:
            if is_retry:
                await asyncio.sleep(_RETRY_DELAY)
            replica = self._replica(route.only)
        else:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if route is not None:  # before the replica accepts, since one that hangs never does
            route.assign(_name(replica.replica_id))
        return replica

    def _replica(self, name: str) -> Any:
        """The replica of that name. Raises `ReplicaLostError`: it is gone."""
        for replica in self._replicas_list:
            if _name(replica.replica_id) == name:
                return replica
        raise ReplicaLostError(f"replica {name} is gone", died=name in self._dead)


def _name(replica_id: Any) -> str:
    return str(replica_id.unique_id)


def _route_of(pending_request: Any) -> RouteAttempt | None:
    route = None if pending_request is None else pending_request.kwargs.get("route")
    return route if isinstance(route, RouteAttempt) else None


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
