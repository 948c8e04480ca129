"""Processes of this host that are ranks: started by rank 0, and ended with it, however it ends."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from onward.errors import RankError

# How long a rank may take to end after it was told to, in seconds.
_END = 5.0


class Started(Protocol):
    """The other ranks, where rank 0 has started them."""

    def check(self) -> None:
        """Raise `RankError` if one has ended."""
        ...

    def kill(self) -> None:
        """End all at once: one of them hangs."""
        ...

    def end(self) -> None:
        """Wait until all have ended, and kill those that do not."""
        ...


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
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                raise RankError(f"rank {rank} has ended with status {code}; what it wrote to stderr says why")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
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
