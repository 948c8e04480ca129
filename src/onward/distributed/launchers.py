"""Ranks as processes of this host, started by rank 0 and ended with it, however it ends; or as Ray actors in a
placement group, each with one CPU of the cluster."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from torch._C._distributed_c10d import Store

from onward.errors import RankError, RequestError, one_line

# Seconds that ranks may take to end.
END_TIMEOUT = 5.0


class Processes:
    """The other ranks on this host."""

    def __init__(self, world: int, address: str) -> None:
        command = [sys.executable, "-m", "onward.distributed"]
        # Their stdin is a pipe without data: it closes when this process ends, even if it is killed, and then they end
        # too. In their own session they don't get the terminal's interrupts.
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), address],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            for rank in range(1, world)
        ]

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise `RankError` if one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                raise RankError(f"rank {rank} has ended with status {code}; see its stderr")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Wait until all have ended, and kill them after a timeout."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_parent() -> None:
    """In a rank started by `Processes`: end when the parent process ends."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="onward-parent", daemon=True).start()


# Seconds between two heartbeats of a rank, and between two checks of them.
_INTERVAL = 1.0
# Seconds without a heartbeat after which a rank counts as lost, while rank 0 waits.
HEARTBEAT_TIMEOUT = 15.0


@contextmanager
def heartbeats(store: Store, rank: int) -> Iterator[None]:
    """Send heartbeats of a rank in a thread. Kernels don't block it: they release the GIL."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            try:
                store.add(_key(rank), 1)
            except RuntimeError:  # rank 0 has ended
                return
            ended.wait(_INTERVAL)

    thread = threading.Thread(target=run, name="onward-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # The process aborts if the interpreter ends while a thread is inside torch's store.
        ended.set()
        thread.join(_INTERVAL)


class HeartbeatMonitor:
    """Monitors the other ranks while rank 0 waits for them.

    on_timeout: called once, in the monitor's thread, with the reason. It has to end the wait.
    """

    def __init__(self, store: Store, ranks: Sequence[int], on_timeout: Callable[[str], None]) -> None:
        self._store, self._ranks, self._on_timeout = store, ranks, on_timeout
        self._since: float | None = None  # the start of the current wait
        self._is_closed = False
        threading.Thread(target=self._run, name="onward-watch", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Expect heartbeats inside the block."""
        before, self._since = self._since, self._since or time.monotonic()
        try:
            yield
        finally:
            self._since = before

    def close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        counts: dict[int, int] = {}
        times: dict[int, float] = {}  # of the last heartbeats
        while not self._is_closed:
            time.sleep(_INTERVAL)
            since, now = self._since, time.monotonic()
            if since is None or now - since < _INTERVAL:
                times.clear()
                continue
            try:
                current = {rank: self._store.add(_key(rank), 0) for rank in self._ranks}
            except RuntimeError:
                return
            for rank, count in current.items():
                if count != counts.get(rank) or rank not in times:
                    counts[rank], times[rank] = count, now
                elif now - times[rank] > HEARTBEAT_TIMEOUT:
                    self._on_timeout(
                        f"rank {rank} has not responded for {HEARTBEAT_TIMEOUT:g} s: it hangs, or cannot be reached"
                    )
                    return


def _key(rank: int) -> str:
    return f"beat/{rank}"


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
        raise RequestError("address='ray' starts ranks on a Ray cluster, and this one isn't connected: call ray.init()")
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
