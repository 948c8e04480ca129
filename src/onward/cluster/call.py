"""What passes between an ingress and a replica: a request on the way there, parts of its answer on the way back."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

# The ids of each text of an answer, those of the body's first request first.
Emitted = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """An HTTP request as it came, and what makes its answer the same wherever it is made.

    answer_key: fixes the answer's id, time and seed. emitted: what its texts have emitted in attempts before; None:
    nothing, or nobody knows. last_event_id: of what the client has of a stream. See `onward.server.handover`.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    answer_key: str
    emitted: Emitted | None = None
    last_event_id: str | None = None

    @property
    def named_headers(self) -> dict[str, str]:
        """The headers by lower-case name."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.headers}


class Part(NamedTuple):
    """What one answer brought since the last parcel. number: of the call. messages: of ASGI. ended: whether the
    last of them ends it."""

    number: int
    messages: tuple[Mapping[str, Any], ...]
    ended: bool


class Parcel(NamedTuple):
    """What all answers of a replica brought for an ingress. is_beat: whether it also says that the replica is well."""

    replica: str
    fingerprint: str
    parts: tuple[Part, ...]
    is_beat: bool


@dataclass(frozen=True)
class Item:
    """What an answer brought since the last item; a replica that is well sends one every half second, maybe empty.

    replica: its name. fingerprint: what the bits of its texts depend on. messages: of ASGI. is_last: whether they
    end it.
    """

    replica: str
    fingerprint: str
    messages: tuple[Mapping[str, Any], ...] = ()
    is_last: bool = False


@dataclass
class Route:
    """Where a call is to go, and where it went.

    key: what requests of one beginning have in common; None: nothing. avoid: replicas that failed it. only: the replica
    that gets it, or the call is lost. replica: the one that it was sent to last; None as long as there is none.
    since: when that was, on this process's monotonic clock.
    """

    key: str | None = None
    avoid: frozenset[str] = field(default_factory=frozenset)
    only: str | None = None
    replica: str | None = None
    since: float = 0.0

    def found(self, replica: str) -> None:
        """The call is sent to a replica."""
        self.replica, self.since = replica, time.monotonic()


class ReplicaLostError(Exception):
    """A replica is gone or silent. died: whether its process is known to be gone."""

    def __init__(self, reason: str, *, died: bool) -> None:
        super().__init__(reason)
        self.died = died


class Replicas(Protocol):
    """The replicas that an ingress calls."""

    @property
    def names(self) -> frozenset[str]:
        """Those that take requests now."""
        ...

    def serve(self, call: Call, route: Route) -> AsyncGenerator[Item, None]:
        """Have one of them serve a call; closing the generator ends it there. `route.replica` says who has it.

        Raises:
            ReplicaLostError: the replica is gone.
        """
        ...


def close_later(items: AsyncGenerator[Item, None]) -> None:
    """Close what `Replicas.serve` gave, without waiting: a replica that hangs does not answer. Nobody reads what it may
    still send."""
    closing = asyncio.ensure_future(items.aclose())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


# Generators that are being closed: a task that nobody holds may be collected.
_closing: set[asyncio.Future[None]] = set()
