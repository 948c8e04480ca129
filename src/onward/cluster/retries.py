"""When a request that a replica lost is tried again, and when no more.

Nothing here knows Ray or a clock (times are arguments), so simulations run the same code.
"""

from collections import OrderedDict
from dataclasses import dataclass

from onward.checks import check_whole, is_finite
from onward.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """How much is tried for a request, and for all of them.

    attempts: the most for one request, its first included; attempts that a replica handed over do not count.
    silence: seconds without a word from a replica, which speaks about every half second, after which it counts as lost.
    retry_share: retries for each request that came, beyond `retry_burst`: so retries cannot multiply the load when
        many replicas are lost (the retry budget of Finagle and of Envoy).
    quarantine: seconds for which a request that was there when two replicas died is refused; 0 refuses none.

    Raises:
        RequestError: a value outside its range.
    """

    attempts: int = 3
    silence: float = 5.0
    retry_share: float = 0.2
    retry_burst: int = 100
    quarantine: float = 600.0

    def __post_init__(self) -> None:
        check_whole("attempts", self.attempts, low=1)
        check_whole("retry_burst", self.retry_burst, low=0)
        for name, low in (("silence", 0.01), ("retry_share", 0.0), ("quarantine", 0.0)):
            value = getattr(self, name)
            if not (is_finite(value) and value >= low):
                raise RequestError(f"{name} must be a number of {low} or more; got {value!r}")


class RetryBudget:
    """Retries that all requests have together: each request brings a share of one, each retry takes one."""

    def __init__(self, options: RetryOptions) -> None:
        self._share, self._most = options.retry_share, float(options.retry_burst)
        self.left = self._most

    def came(self) -> None:
        """A request came."""
        self.left = min(self._most, self.left + self._share)

    def take(self) -> bool:
        """Take a retry, if there is one."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


# The most requests that are remembered for a quarantine.
_REMEMBERED = 10_000
# Replicas that die with a request, until it is held to be the cause.
_DEATHS = 2


class Quarantine:
    """Requests that were there when replicas died: at the second death they are refused for a while.

    A request is known by a digest of its body. Replicas that only hang, or hand over, are no deaths, and a request that
    was served whole is no cause.
    """

    def __init__(self, options: RetryOptions) -> None:
        self._seconds = options.quarantine
        self._deaths: OrderedDict[bytes, tuple[float, frozenset[str]]] = OrderedDict()

    def note_death(self, request: bytes, replica: str, now: float) -> None:
        """A replica died while it served the request."""
        _, replicas = self._deaths.pop(request, (now, frozenset()))
        self._deaths[request] = (now, replicas | {replica})
        while len(self._deaths) > _REMEMBERED:
            self._deaths.popitem(last=False)

    def holds(self, request: bytes, now: float) -> bool:
        """Whether the request is refused now."""
        since, replicas = self._deaths.get(request, (now, frozenset()))
        if now - since >= self._seconds:
            self.forget(request)
            return False
        return len(replicas) >= _DEATHS

    def forget(self, request: bytes) -> None:
        """The request was served whole."""
        self._deaths.pop(request, None)
