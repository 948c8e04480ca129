"""Ranks as Ray actors in a placement group, each with one CPU of the cluster."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from onward.distributed.launchers import END_TIMEOUT, Processes
from onward.errors import RankError, RequestError, one_line

# Seconds to wait for the placement group.
_PLACEMENT_TIMEOUT = 60.0


def address_here() -> str:
    """The address of this process in the cluster, with port 0 for any free port. Raises `RequestError`: Ray is not
    installed, or this process is not in a cluster."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise RequestError("address='ray' needs the package ray: pip install 'onward[cluster]'") from error
    if not ray.is_initialized():
        raise RequestError("address='ray' starts ranks on a Ray cluster, and this process is in none: call ray.init()")
    return f"{ray.util.get_node_ip_address()}:0"


class RayRanks:
    """The other ranks of a model, like `Processes`. address: of rank 0. run: `run_rank`, called by each rank."""

    def __init__(self, world: int, address: str, run: Callable[[int, int, str], None]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        self._session = _session(ray)
        self._group: Any = placement_group([{"CPU": 1}] * (world - 1), strategy="SPREAD")
        try:
            ray.get(self._group.ready(), timeout=_PLACEMENT_TIMEOUT)
        except ray.exceptions.GetTimeoutError as error:
            ray.util.remove_placement_group(self._group)
            message = f"the cluster has no {world - 1} free processors for ranks: add some, or use fewer ranks"
            raise RankError(message) from error
        actor: Any = ray.remote(num_cpus=1, max_restarts=0)(_Rank)
        self._actors = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index)).remote()
            for index in range(world - 1)
        ]
        self._ends = [each.run.remote(run, rank, world, address) for rank, each in enumerate(self._actors, start=1)]

    def check(self) -> None:
        if not self._is_connected():
            raise RankError("this process has left the cluster of its ranks: reload the model")
        ended, _ = self._ray.wait(self._ends, timeout=0)
        if not ended:
            return
        rank = 1 + self._ends.index(ended[0])
        try:
            self._ray.get(ended[0])
        except self._ray.exceptions.RayError as error:
            raise RankError(f"rank {rank} has ended: {one_line(error)}") from error
        raise RankError(f"rank {rank} has ended")

    def kill(self) -> None:
        if self._is_connected():
            for actor in self._actors:
                self._ray.kill(actor)

    def end(self) -> None:
        if self._is_connected():  # otherwise they have ended: Ray ends the actors of a process that leaves
            with suppress(Exception):  # the cluster may be gone
                self._ray.wait(self._ends, num_returns=len(self._ends), timeout=END_TIMEOUT)
                self.kill()
                self._ray.util.remove_placement_group(self._group)
        # Free the handles in this thread: freeing one in another thread after ray.shutdown() ends the process.
        self._actors, self._ends, self._group = [], [], None

    def _is_connected(self) -> bool:
        """Whether this process is still in the cluster. Otherwise any call of Ray would start another cluster."""
        return bool(self._ray.is_initialized()) and _session(self._ray) == self._session


# The other ranks, if rank 0 started them.
RankHandles: TypeAlias = Processes | RayRanks


def _session(ray: Any) -> tuple[str, str]:
    """The identity of this process in a cluster. Job ids alone repeat: each cluster counts from 1."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class _Rank:
    """Runs in the rank's process."""

    def run(self, run: Callable[[int, int, str], None], rank: int, world: int, address: str) -> None:
        run(rank, world, address)
