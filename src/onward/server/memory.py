"""One memory budget for all requests of a server: bodies, unsent responses, and records of responses."""

from collections import Counter
from types import TracebackType
from typing import Self

from onward.protocols import BodyError
from onward.util.text import in_bytes

# The largest share of one client, and of all bodies together: the rest is for their responses.
_CLIENT_SHARE, _BODY_SHARE = 0.5, 0.75


class MemoryFullError(BodyError):
    """The server has no memory for a request, or its client has used its share."""

    def __init__(self, limit: int) -> None:
        message = f"requests of this server, or of this client, already use all the memory allowed ({in_bytes(limit)})"
        super().__init__(f"{message}: try again later", code="request_memory", status=503)


class MemoryBudget:
    """Counts the memory of requests, in one thread only. limit: bytes."""

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
    """The memory of one request. Release it, or use it in a `with` statement. nbytes: the bytes reserved."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self.nbytes = 0

    def resize(self, nbytes: int, share: float = 1.0) -> None:
        """Reserve this many bytes in total. share: the share of the budget that may then be in use. Raises
        `MemoryFullError`: the budget is full."""
        self._budget._change(self._client, nbytes - self.nbytes, share)
        self.nbytes = nbytes

    def add_body(self, nbytes: int) -> None:
        """Reserve more bytes for a body. Raises `MemoryFullError`."""
        self.resize(self.nbytes + nbytes, _BODY_SHARE)

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
