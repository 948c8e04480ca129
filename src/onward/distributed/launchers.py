"""Processes of this host that are ranks: started by rank 0, and ended with it, however it ends."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from onward.errors import RankError

# How long a rank may take to end after it was told to, in seconds.
_END = 5.0


class Processes:
    """The other ranks on this host."""

    def __init__(self, world: int, address: str) -> None:
        command = [sys.executable, "-m", "onward.distributed"]
        # Their standard input is a pipe that nobody writes to: it closes when this process ends, also when it is
        # killed, and then they end, too. In a session of their own the terminal's interrupts do not reach them.
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
                raise RankError(f"rank {rank} has ended with status {code}; what it wrote to stderr says why")

    def kill(self) -> None:
        """End all at once: one of them hangs."""
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Wait until all have ended, and kill those that do not."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_parent() -> None:
    """In a rank that `Processes` has started: end when the process that started it has ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="onward-parent", daemon=True).start()


# Seconds between two beats of a rank, and between two looks at them.
_BEAT = 1.0
# Seconds without a beat after which a rank counts as lost, while rank 0 waits.
SILENCE = 15.0


@contextmanager
def beating(counts: Store, rank: int) -> Iterator[None]:
    """While this lasts, a rank beats. A kernel may take its time: it holds no lock of Python's."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            try:
                counts.add(_key(rank), 1)
            except RuntimeError:  # rank 0 has ended
                return
            ended.wait(_BEAT)

    thread = threading.Thread(target=run, name="onward-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # An interpreter that ends while a thread is inside torch's store aborts the process.
        ended.set()
        thread.join(_BEAT)


class HeartbeatMonitor:
    """Looks after the other ranks while rank 0 waits for them.

    lost: is called once, in a thread of the watch's, with what is wrong. It has to end the waiting.
    """

    def __init__(self, counts: Store, ranks: Sequence[int], lost: Callable[[str], None]) -> None:
        self._counts, self._ranks, self._lost = counts, ranks, lost
        self._since: float | None = None  # when the present waiting began
        self._is_closed = False
        threading.Thread(target=self._run, name="onward-watch", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts, ranks have to beat."""
        before, self._since = self._since, self._since or time.monotonic()
        try:
            yield
        finally:
            self._since = before

    def close(self) -> None:
        """Look no longer."""
        self._is_closed = True

    def _run(self) -> None:
        seen: dict[int, int] = {}
        heard: dict[int, float] = {}
        while not self._is_closed:
            time.sleep(_BEAT)
            since, now = self._since, time.monotonic()
            if since is None or now - since < _BEAT:
                heard.clear()
                continue
            try:
                counts = {rank: self._counts.add(_key(rank), 0) for rank in self._ranks}
            except RuntimeError:
                return
            for rank, count in counts.items():
                if count != seen.get(rank) or rank not in heard:
                    seen[rank], heard[rank] = count, now
                elif now - heard[rank] > SILENCE:
                    self._lost(f"rank {rank} has not been heard of for {SILENCE:g} s: it hangs, or cannot be reached")
                    return


def _key(rank: int) -> str:
    return f"beat/{rank}"
