"""The ingress: an ASGI application over replicas, whose clients do not notice when one of them is lost.

A request is tried on a replica. If that replica dies, falls silent or leaves, another one computes the same answer, for
the ingress has fixed its seed, id and time. The client gets the part that it has not received. The rules for retries
know neither Ray nor a clock (times are arguments), so simulations run the same code.
"""

import asyncio
import contextlib
import enum
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request

from onward.cluster.call import (
    DivergedError,
    ProxiedRequest,
    ProxiedResponse,
    ReplicaLostError,
    Reply,
    RouteAttempt,
    Send,
    close_later,
)
from onward.cluster.channel import ChannelReplicaSet
from onward.cluster.router import routing_key
from onward.cluster.state import State
from onward.engine.fingerprint import parts_that_differ
from onward.errors import EngineBusyError, EngineError, OnwardError, RequestError
from onward.protocols import ResponseKey
from onward.server import Settings
from onward.server.client import whole_body
from onward.server.gate import AccessRecord
from onward.server.lifecycle import drain_requests
from onward.server.log import log
from onward.server.submission import IdempotencyKeys
from onward.util.checks import check_whole, is_finite


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


# Seconds that a request waits for a replica to be there at all.
_WAIT = 60.0
# Seconds until all replicas are asked again, where an answer that has begun found all of them busy.
_PAUSE = 0.25
_BUSY = (429, 503)
# The status that the log has of a client that left before there was one; nginx's.
_LEFT = 499
# How many fingerprints are remembered: more only where each replica has another.
_FINGERPRINTS = 64


class _Outcome(enum.Enum):
    """How an attempt ended that lost no replica."""

    WHOLE = enum.auto()
    BUSY = enum.auto()  # the replica takes no more
    LEAVING = enum.auto()  # the replica is to end, and others are there


class Ingress:
    """An ASGI application that forwards requests to replicas.

    replicas: whom it calls. options: what it tries. settings: of its own side: the log, and limits of requests.
    """

    def __init__(self, replicas: ChannelReplicaSet, options: RetryOptions, settings: Settings | None = None) -> None:
        self._replicas, self._options = replicas, options
        self._settings = Settings() if settings is None else settings
        self._log_prompts = self._settings.access_log and self._settings.log_prompts
        self._state = State(replicas)
        self._budget, self._quarantine = RetryBudget(options), Quarantine(options)
        self._repeats = IdempotencyKeys(self._settings.idempotency_seconds)
        self._computed: dict[str, str] = {}  # fingerprint -> the first replica that had it
        self._draining = False
        self._ends: set[asyncio.Future[None]] = set()  # of the requests that run: done where they are to end
        self.inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        access = AccessRecord(scope)

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                if all(
                    name.lower() != b"x-request-id" for name, _ in message["headers"]
                ):  # the answer is not a replica's
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", access.id.encode())]}
            await send(message)

        answer = ProxiedResponse(send_with_id, whole_reasons=self._log_prompts)
        self.inside += 1
        try:
            await self._answered(scope, receive, answer, access.id)
        except OnwardError as error:
            await answer.fail(error)
        finally:
            self.inside -= 1
            if self._settings.access_log:
                if not answer.ended:
                    answer.note_left()
                access.status = access.status or _LEFT
                access.fields |= answer.facts
                access.write()

    async def _answered(self, scope: Any, receive: Any, answer: ProxiedResponse, request_id: str) -> None:
        """Answer a request, unless the client leaves before. Raises `OnwardError`: it is refused, or fails."""
        if self._draining and (scope["method"] == "POST" or scope["path"] == "/ready"):
            raise EngineError("the server shuts down and takes no more requests")
        if self.inside > self._settings.max_requests:
            raise EngineBusyError("the ingress has as many requests as it takes; try again in 1 s", 1.0)
        try:
            body = await whole_body(Request(scope, receive), self._settings)
        except ClientDisconnect:
            return
        if self._log_prompts and scope["method"] == "POST":
            answer.facts["body"] = body.decode("utf-8", "replace")
        call = self._call_of(scope, body, request_id)
        state = self._state.has(call)
        await self._until_gone(receive, self._tell_state(call, answer) if state else self._serve(call, answer))

    async def _tell_state(self, call: ProxiedRequest, answer: ProxiedResponse) -> None:
        await answer.tell_whole(await self._state.answer(call))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, let those that run end within so many seconds, and tell the others that they end."""
        self._draining = True

        def cancel() -> None:
            log("cancels", requests=self.inside)
            for end in self._ends:
                end.set_result(None)

        await drain_requests(lambda: self.inside, seconds, cancel)

    def _call_of(self, scope: Any, body: bytes, request_id: str) -> ProxiedRequest:
        given = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        headers = (*((name, value) for name, value in given if name != b"x-request-id"),)
        headers += ((b"x-request-id", request_id.encode()),)  # replicas log their defects under it
        call = ProxiedRequest(scope["method"], scope["path"], scope.get("query_string", b""), headers, body, "")
        if last := call.named_headers.get(
            "last-event-id"
        ):  # which begins with the key; the application checks the rest
            with contextlib.suppress(OnwardError):
                return replace(call, answer_key=ResponseKey(last.partition(".")[0]).text)
        key = self._repeats.response_key(dict(headers), _digest(call.path, body), time.monotonic())
        return replace(call, answer_key=key)

    async def _until_gone(self, receive: Any, serving: Any) -> None:
        """Serve, and stop when the client leaves. Raises `OnwardError`: of `serving`, or the ingress ends before."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(serving), asyncio.ensure_future(gone())]
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            await asyncio.wait([*tasks, end], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            elif end.done():
                raise EngineError("the server shut down before the answer was whole")
        finally:
            self._ends.discard(end)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _serve(self, call: ProxiedRequest, answer: ProxiedResponse) -> None:
        """Try until the answer is whole. Raises `OnwardError`: it will not be."""
        digest = _digest(call.path, call.body)
        key = routing_key(call.named_headers, call.body)
        avoid: frozenset[str] = frozenset()
        failed: frozenset[str] = frozenset()  # of these, all that were not merely busy or left
        lost, attempts, waited = 0, 0, 0.0
        self._budget.came()
        if self._quarantine.holds(digest, time.monotonic()):
            raise EngineError("two replicas died while they served this request: it is refused for a while")
        while True:
            route = RouteAttempt(key, avoid)
            answer.begin()
            try:
                try:
                    outcome = await self._attempt(call, route, answer)
                finally:
                    answer.facts |= {"replica": route.replica, "retries": attempts}
                    attempts += 1
                if outcome is _Outcome.WHOLE:
                    self._quarantine.forget(digest)
                    return
            except ReplicaLostError as error:
                lost += 1
                self._note(error, digest, route, lost)
                failed |= _set_of(route.replica)
            except DivergedError as error:
                failed |= _set_of(route.replica)
                if not self._replicas.names - failed:
                    raise EngineError(str(error)) from error
            avoid |= _set_of(route.replica)
            call = replace(call, emitted=answer.emitted, last_event_id=answer.last_event_id)
            there = self._replicas.names
            if there - failed and not there - avoid:  # those that are left are busy
                waited = await _until_asked_again(waited)
                avoid = failed

    def _note(self, error: ReplicaLostError, digest: bytes, route: RouteAttempt, lost: int) -> None:
        """A replica was lost. Raises `EngineError`: the request is not tried again."""
        now = time.monotonic()
        log("replica lost", replica=route.replica, reason=str(error), lost=lost)
        if error.died and route.replica is not None:
            self._quarantine.note_death(digest, route.replica, now)
        if self._quarantine.holds(digest, now):
            raise EngineError("two replicas died while they served this request") from error
        if lost >= self._options.attempts:
            raise EngineError(f"{lost} replicas were lost while they served this request: {error}") from error
        if not self._budget.take():
            raise EngineError(f"a replica was lost, and too many requests are tried again: {error}") from error

    async def _attempt(self, call: ProxiedRequest, route: RouteAttempt, answer: ProxiedResponse) -> _Outcome:
        """Have one replica serve the call. Raises `ReplicaLostError`: it is gone, or silent for too long. Raises
        `DivergedError`: it makes another answer."""
        items = self._replicas.serve(call, route)
        try:
            while not answer.ended:
                item = await self._next(items, route)
                route.replica = item.replica
                self._compare(item)
                if _is_busy(item) and (answer.started or self._others(route)):
                    return _Outcome.BUSY
                await answer.tell(item)
                if not answer.ended and route.replica not in self._replicas.names and self._others(route):
                    return _Outcome.LEAVING
            return _Outcome.WHOLE
        finally:
            close_later(items)

    def _compare(self, item: Reply) -> None:
        """Log that replicas have several fingerprints: the same request may get other texts of them."""
        if item.fingerprint in self._computed:
            return
        for fingerprint, replica in list(self._computed.items())[-1:]:
            differ = parts_that_differ(fingerprint, item.fingerprint)
            log("replicas differ", replica=item.replica, other=replica, differ=differ)
        self._computed[item.fingerprint] = item.replica
        if len(self._computed) > _FINGERPRINTS:
            del self._computed[next(iter(self._computed))]

    async def _next(self, items: Any, route: RouteAttempt) -> Reply:
        """The next item of a call, which may wait for a replica to be there. From when it has one it has less time."""
        coming = asyncio.ensure_future(anext(items))
        came = time.monotonic()
        try:
            while True:
                limit = _WAIT if route.replica is None else self._options.silence
                end = max(came, route.since) + limit
                left = end - time.monotonic()
                if left <= 0:
                    break
                done, _ = await asyncio.wait([coming], timeout=min(left, self._options.silence))
                if done:
                    return coming.result()  # type: ignore[no-any-return]
        except StopAsyncIteration:
            raise ReplicaLostError("the replica's answer broke off", died=False) from None
        finally:
            coming.cancel()
            with contextlib.suppress(BaseException):
                coming.exception() if coming.done() else None
        if route.replica is None:
            raise EngineError(f"no replica was there within {_WAIT:g} s")
        raise ReplicaLostError(f"replica {route.replica} was silent for {self._options.silence:g} s", died=False)

    def _others(self, route: RouteAttempt) -> bool:
        """Whether there are replicas that have not failed the call."""
        return bool(self._replicas.names - route.avoid - {route.replica})


def _set_of(replica: str | None) -> frozenset[str]:
    return frozenset() if replica is None else frozenset([replica])


async def _until_asked_again(waited: float) -> float:
    """Wait a little, and say for how long in all. waited: seconds before this. Raises `EngineBusyError`: that was long
    enough."""
    if waited >= _WAIT:
        raise EngineBusyError(f"no replica had room for the rest of the answer within {_WAIT:g} s", 1.0)
    await asyncio.sleep(_PAUSE)
    return waited + _PAUSE


def _digest(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(path.encode() + b" " + body).digest()


def _is_busy(item: Reply) -> bool:
    return any(message["type"] == "http.response.start" and message["status"] in _BUSY for message in item.messages)


async def _live(receive: Any, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
