"""Ranks as actors of Ray, in a placement group: each has a processor of some machine of the cluster."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from onward.distributed.launchers import Processes
from onward.errors import RankError, RequestError, one_line

# Seconds in which a cluster has to find room.
_ROOM = 60.0
# How long a rank may take to end after it was told to, in seconds.
_END = 5.0


def address_here() -> str:
    """Where ranks on other machines of the cluster find this process; port 0 stands for a free one. Raises
    `RequestError`: Ray is not installed, or this process is in no cluster."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise RequestError("address='ray' needs the package ray: pip install 'onward[cluster]'") from error
    if not ray.is_initialized():
        raise RequestError("address='ray' starts ranks on a Ray cluster, and this process is in none: call ray.init()")
    return f"{ray.util.get_node_ip_address()}:0"


class RayRanks:
    """The ranks but 0 of a model, as `Processes` are. address: of rank 0. run: `run_rank`, which each of them calls."""

    def __init__(self, world: int, address: str, run: Callable[[int, int, str], None]) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        self._place = _place(ray)
        self._group: Any = placement_group([{"CPU": 1}] * (world - 1), strategy="SPREAD")
        try:
            ray.get(self._group.ready(), timeout=_ROOM)
        except ray.exceptions.GetTimeoutError as error:
            ray.util.remove_placement_group(self._group)
            message = f"the cluster has no {world - 1} free processors for ranks: add some, or give fewer ranks"
            raise RankError(message) from error
        actor: Any = ray.remote(num_cpus=1, max_restarts=0)(_Rank)
        self._actors = [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index)).remote()
            for index in range(world - 1)
        ]
        self._ends = [each.run.remote(run, rank, world, address) for rank, each in enumerate(self._actors, start=1)]

    def check(self) -> None:
        if not self._is_connected():
            raise RankError("this process has left the cluster that the ranks are in: reload the model")
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
        if self._is_connected():  # else they have ended: Ray ends the actors of a process that leaves
            with suppress(Exception):  # the cluster may be gone
                self._ray.wait(self._ends, num_returns=len(self._ends), timeout=_END)
                self.kill()
                self._ray.util.remove_placement_group(self._group)
        # Now, and by this thread: a handle that another one frees after ray.shutdown() ends the process.
        self._actors, self._ends, self._group = [], [], None

    def _is_connected(self) -> bool:
        """Whether this process is still in the cluster: outside of it each call of Ray's would start another one."""
        return bool(self._ray.is_initialized()) and _place(self._ray) == self._place


# The other ranks, where rank 0 has started them.
RankHandles: TypeAlias = Processes | RayRanks


def _place(ray: Any) -> tuple[str, str]:
    """What tells this process's stay in a cluster from every other: another cluster counts its jobs from 1 again."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class _Rank:
    """Runs in the rank's process."""

    def run(self, run: Callable[[int, int, str], None], rank: int, world: int, address: str) -> None:
        run(rank, world, address)
