"""Ray Serve's router with Onward's choice of replicas: calls to a dead replica fail at once and don't block others."""

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve._private.request_router.common import PendingRequest

    from onward.cluster.call import ReplicaLostError, RouteAttempt
    from onward.cluster.ray_router import PrefixRouter

pytestmark = pytest.mark.filterwarnings("ignore")

DEPLOYMENT = DeploymentID(name="Replica", app_name="onward")


class FakeReplica:
    """The attributes of Ray's `RunningReplica` that the router uses."""

    max_ongoing_requests = 4096

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.actor_id = None

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def pending(route: RouteAttempt) -> PendingRequest:
    return PendingRequest(args=[], kwargs={"route": route}, metadata=RequestMetadata("request", "internal"))


def routed(check: Callable[[PrefixRouter], Coroutine[Any, Any, None]], names: str = "ab") -> None:
    async def run() -> None:
        router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True)
        router.initialize_state()
        router.update_replicas([FakeReplica(name) for name in names])
        await check(router)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_calls_to_a_dead_replica_fail_at_once_and_block_no_others() -> None:
    async def check(router: PrefixRouter) -> None:
        router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
        for _ in range(20):
            with pytest.raises(ReplicaLostError) as lost:
                await router._choose_replica_for_request(pending(RouteAttempt(only="a")))
            assert lost.value.died
        assert (await router._choose_replica_for_request(pending(RouteAttempt(only="b")))).replica_id.unique_id == "b"
        route = RouteAttempt("key")
        await router._choose_replica_for_request(pending(route))
        assert route.replica == "b"

    routed(check)


def test_a_call_to_one_replica_does_not_wait_for_others() -> None:
    class Hanging(FakeReplica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            return await asyncio.Event().wait() or 0

    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Hanging("a"), FakeReplica("b")])
        waiting = [
            asyncio.ensure_future(router._choose_replica_for_request(pending(RouteAttempt()))) for _ in range(40)
        ]
        await asyncio.sleep(0)
        replica = await asyncio.wait_for(router._choose_replica_for_request(pending(RouteAttempt(only="b"))), 0.5)
        assert replica.replica_id.unique_id == "b"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    routed(check)


def test_an_unaccepted_call_is_resent_until_the_replica_is_gone() -> None:
    async def check(router: PrefixRouter) -> None:
        call = pending(RouteAttempt(only="a"))
        for _ in range(2):
            assert (await router._choose_replica_for_request(call, is_retry=True)).replica_id.unique_id == "a"
        router.update_replicas([FakeReplica("b")])
        with pytest.raises(ReplicaLostError) as lost:
            await router._choose_replica_for_request(call, is_retry=True)
        assert not lost.value.died, "it may have left"

    routed(check)


def test_a_dead_replica_is_removed_before_the_controller_reports_it() -> None:
    async def check(router: PrefixRouter) -> None:
        assert router.names == {"a", "b"}
        router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
        assert router.names == {"b"}
        router.update_replicas([FakeReplica(name) for name in "abc"])  # it has not noticed yet
        assert router.names == {"b", "c"}
        for _ in range(10):
            replica = await router._choose_replica_for_request(pending(RouteAttempt("key")))
            assert replica.replica_id.unique_id in "bc"

    routed(check)
