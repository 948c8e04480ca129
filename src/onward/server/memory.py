"""One budget for the memory of all requests of a server: bodies, answers that are not sent yet, and records."""

from collections import Counter
from types import TracebackType
from typing import Self

from onward.protocols import BodyError
from onward.util.text import in_bytes

# The largest share of one client, and of all bodies together: the rest is for the answers of those that are read.
_CLIENT_SHARE, _BODY_SHARE = 0.5, 0.75


class MemoryFullError(BodyError):
    """The requests of a server hold as much memory as they may."""

    def __init__(self, limit: int) -> None:
        message = f"the requests of this server, or of this client, hold as much memory as they may ({in_bytes(limit)})"
        super().__init__(f"{message}: try again later", code="request_memory", status=503)


class MemoryBudget:
    """Counts the memory of requests. Use it in one thread. limit: bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._by_client: Counter[str] = Counter()

    def reservation(self, client: str) -> "Reservation":
        """An empty reservation."""
        return Reservation(self, client)

    def _change(self, client: str, nbytes: int, share: float) -> None:
        if nbytes > 0:
            own = min(share, _CLIENT_SHARE) * self.limit if client else share * self.limit
            if self.used + nbytes > share * self.limit or self._by_client[client] + nbytes > own:
                raise MemoryFullError(self.limit)
        self.used += nbytes
        self._by_client[client] += nbytes
        if not self._by_client[client]:
            del self._by_client[client]


class Reservation:
    """The memory of one request. Release it, or use it in a `with` statement. nbytes: what it holds."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self.nbytes = 0

    def resize(self, nbytes: int, share: float = 1.0) -> None:
        """Hold this many bytes, unless the budget is full. share: of the budget that may then be in use. Raises
        `MemoryFullError`."""
        self._budget._change(self._client, nbytes - self.nbytes, share)
        self.nbytes = nbytes

    def add_body(self, nbytes: int) -> None:
        """Hold more bytes of a body. Raises `MemoryFullError`."""
        self.resize(self.nbytes + nbytes, _BODY_SHARE)

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
