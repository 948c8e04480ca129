"""Ranks that hang are noticed: each counts up while it lives, and rank 0 looks at the counts while it waits."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

# Seconds between two beats of a rank, and between two looks at them.
_BEAT = 1.0
# Seconds without a beat after which a rank counts as lost, while rank 0 waits.
SILENCE = 15.0


class Counts(Protocol):
    """Numbers that all ranks see."""

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins as 0; returns the sum."""
        ...


@contextmanager
def beating(counts: Counts, rank: int) -> Iterator[None]:
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


class Watch:
    """Looks after the other ranks while rank 0 waits for them.

    lost: is called once, in a thread of the watch's, with what is wrong. It has to end the waiting.
    """

    def __init__(self, counts: Counts, ranks: Sequence[int], lost: Callable[[str], None]) -> None:
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
