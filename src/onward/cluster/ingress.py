"""The ingress: an ASGI application in front of replicas. Clients don't notice when a replica is lost.

If the replica that serves a request dies, falls silent or leaves, another one generates the same response, since the
ingress determines its seed, id and time. The client gets the part that it has not received. The retry rules know
neither Ray nor a clock (times are arguments), so that simulations run the same code.
"""

import asyncio
import contextlib
import enum
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router

from onward.cluster.call import (
    DivergedError,
    ProxiedRequest,
    ProxiedResponse,
    ReplicaLostError,
    Reply,
    RouteAttempt,
    close_later,
)
from onward.cluster.channel import ChannelReplicaSet
from onward.cluster.router import routing_key
from onward.cluster.state import State
from onward.errors import EngineBusyError, EngineError, OnwardError, RequestError
from onward.language_model.fingerprint import parts_that_differ
from onward.protocols import BodyError, ResponseKey
from onward.server import Settings
from onward.server.client import MemoryBudget, whole_body
from onward.server.errors import draining_answer
from onward.server.gate import AccessRecord, Gate, RequestCounts, access_of, is_open
from onward.server.lifecycle import drain_requests
from onward.server.log import log
from onward.server.resume import idempotency_of
from onward.server.submission import ReplayRecords
from onward.server.tracing import Tracing
from onward.util.checks import check_whole, is_finite


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """Limits of retries, per request and in total.

    attempts: maximum per request, including the first; attempts that a replica handed over don't count.
    silence: seconds without a reply or heartbeat (every half second) after which a replica counts as lost.
    retry_share: retries allowed per request received, beyond `retry_burst`, so that retries cannot multiply the load
        when many replicas are lost (the retry budget of Finagle and Envoy).
    quarantine: seconds for which a request is rejected after two replicas died serving it; 0 rejects none.

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
                raise RequestError(f"{name} must be at least {low}; got {value!r}")


class RetryBudget:
    """The retries of all requests together: each request adds a share of one, each retry uses up one."""

    def __init__(self, options: RetryOptions) -> None:
        self._share, self._max = options.retry_share, float(options.retry_burst)
        self.left = self._max

    def deposit(self) -> None:
        """Add a request's share of a retry."""
        self.left = min(self._max, self.left + self._share)

    def withdraw(self) -> bool:
        """Use up a retry, if there is one."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


# Requests whose deaths are remembered, and the deaths after which one is refused.
_MAX_QUARANTINED, _MAX_DEATHS = 10_000, 2


class Quarantine:
    """Requests that were being served when replicas died: after the second death they are refused for a while. A
    request is identified by a digest of its body. Replicas that only hang or leave don't count, and a request that was
    served completely is not the cause."""

    def __init__(self, options: RetryOptions) -> None:
        self._seconds = options.quarantine
        self._deaths: OrderedDict[str, tuple[float, frozenset[str]]] = OrderedDict()

    def note_death(self, request: str, replica: str, now: float) -> None:
        _, replicas = self._deaths.pop(request, (now, frozenset()))
        self._deaths[request] = (now, replicas | {replica})
        while len(self._deaths) > _MAX_QUARANTINED:
            self._deaths.popitem(last=False)

    def contains(self, request: str, now: float) -> bool:
        since, replicas = self._deaths.get(request, (now, frozenset()))
        if now - since >= self._seconds:
            self.forget(request)
            return False
        return len(replicas) >= _MAX_DEATHS

    def forget(self, request: str) -> None:
        """Forget a request that was served completely."""
        self._deaths.pop(request, None)


_TIMEOUT = 60.0  # seconds that a request waits for a replica
_RETRY_DELAY = 0.25  # seconds before all replicas are tried again, if a started response finds all of them busy
_BUSY = (429, 503)
_MAX_FINGERPRINTS = 64
# Headers that stay in the ingress: replicas check no credentials, and Ray may log what it carries.
_OWN_HEADERS = frozenset({b"x-request-id", b"authorization", b"x-api-key", b"proxy-authorization", b"cookie"})


class _Outcome(enum.Enum):
    """How an attempt ended that lost no replica."""

    COMPLETE = enum.auto()
    BUSY = enum.auto()  # the replica takes no more requests
    LEAVING = enum.auto()  # the replica is shutting down, and there are others


class Ingress:
    """An ASGI application that forwards requests to replicas, behind a server's gate.

    options: limits of retries. settings: for the ingress itself: access, the access log, and limits of requests.
    """

    def __init__(self, replicas: ChannelReplicaSet, options: RetryOptions, settings: Settings | None = None) -> None:
        self._replicas, self._options = replicas, options
        self.settings = Settings() if settings is None else settings
        self.memory, self.metrics = MemoryBudget(self.settings.request_memory), RequestCounts()
        self.tracing = Tracing.of(self.settings.otlp_endpoint)
        self.gate = Gate(self._respond, self)
        self._outer = self.gate.with_cors()
        self._state = State(replicas)
        self._budget, self._quarantine = RetryBudget(options), Quarantine(options)
        self._replays = ReplayRecords(self.settings.idempotency_seconds, self.memory)
        self._fingerprints: dict[str, str] = {}  # fingerprint: the first replica that had it
        self.draining = False
        self._ends: set[asyncio.Future[None]] = set()  # of running requests; done to cancel them

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (Router().lifespan if scope["type"] == "lifespan" else self._outer)(scope, receive, send)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        access = access_of(scope)
        response = ProxiedResponse(send, scope["path"], access.id, log_values=self.settings.log_prompts)
        try:
            await self._handle(scope, receive, response, access)
        except OnwardError as error:
            await response.fail(error)
        finally:
            if not response.is_complete:
                response.note_disconnect()
            access.fields |= response.log_fields

    async def _handle(self, scope: Any, receive: Any, response: ProxiedResponse, access: AccessRecord) -> None:
        """Handle a request until the client disconnects. Raises `OnwardError`: it is refused, or fails."""
        check_no_files(scope["path"])
        if self.draining and scope["path"] == "/ready":
            await response.send_response(draining_answer())
            return
        body = b""
        if scope["method"] == "POST" and not is_open(scope["path"]):  # nothing else has a body
            try:
                body = await whole_body(Request(scope, receive), self.settings, scope["onward.memory"])
            except ClientDisconnect:
                return
        if self.settings.log_prompts and scope["method"] == "POST":
            response.log_fields["body"] = body.decode("utf-8", "replace")
        call = self._call_of(scope, body, access)
        serve = self._state.serve if self._state.has(call) else self._serve
        await self._until_disconnected(receive, serve(call, response))

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` for running ones, and cancel the others."""
        self.draining = True

        def cancel() -> None:
            log("cancels", requests=self.gate.in_flight)
            for end in self._ends:
                end.set_result(None)

        await drain_requests(lambda: self.gate.in_flight, seconds, cancel)

    def _call_of(self, scope: Any, body: bytes, access: AccessRecord) -> ProxiedRequest:
        pairs = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name not in _OWN_HEADERS]
        if access.span is not None:
            pairs = access.span.replace_context(pairs)
        headers = (*pairs, (b"x-request-id", access.id.encode()))  # replicas log errors under it
        method, path, query = scope["method"], scope["path"], scope.get("query_string", b"")
        key = self._key_of(access.headers, _digest(path, body))
        return ProxiedRequest(method, path, query, headers, body, key.text, client=scope["onward.client"])

    def _key_of(self, headers: Mapping[bytes, bytes], digest: str) -> ResponseKey:
        """The key of the response, which determines all of it. digest: of what the request asks for."""
        if last := headers.get(b"last-event-id"):  # starts with the key; the application checks the rest
            with contextlib.suppress(OnwardError):
                return ResponseKey(last.decode("latin-1").partition(".")[0])
        key, name = ResponseKey.new(), idempotency_of(headers)
        if name is None:
            return key
        stored = self._replays.get(name, key)
        stored.check(digest)
        stored.digest = digest
        return stored.key

    async def _until_disconnected(self, receive: Any, serving: Any) -> None:
        """Run `serving` until the client disconnects. Raises `OnwardError`: as `serving`, or the ingress shuts down."""

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(serving), asyncio.ensure_future(disconnected())]
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            await asyncio.wait([*tasks, end], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            elif end.done():
                raise EngineError("the server shut down before the response was complete")
        finally:
            self._ends.discard(end)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _serve(self, call: ProxiedRequest, response: ProxiedResponse) -> None:
        """Try replicas until the response is complete. Raises `OnwardError`: it won't be."""
        digest = _digest(call.path, call.body)
        key = routing_key(call.named_headers, call.body)
        avoid: frozenset[str] = frozenset()  # replicas that failed, were busy or left
        failed: frozenset[str] = frozenset()  # those that failed
        lost, attempts, waited = 0, 0, 0.0
        self._budget.deposit()
        if self._quarantine.contains(digest, time.monotonic()):
            raise EngineError("two replicas died while serving this request; it is temporarily refused")
        while True:
            route = RouteAttempt(key, avoid)
            try:
                try:
                    outcome = await self._attempt(call, route, response)
                finally:
                    response.log_fields |= {"replica": route.replica, "retries": attempts}
                    attempts += 1
                    tried = frozenset() if route.replica is None else frozenset([route.replica])
                if outcome is _Outcome.COMPLETE:
                    self._quarantine.forget(digest)
                    return
            except ReplicaLostError as error:
                lost += 1
                self._note(error, digest, route, lost)
                failed |= tried
            except DivergedError as error:
                failed |= tried
                if not self._replicas.names - failed:
                    raise EngineError(str(error)) from error
            avoid |= tried
            call = replace(call, emitted=response.emitted, ended=response.ended)
            names = self._replicas.names
            if names - failed and not names - avoid:  # the others are busy
                if waited >= _TIMEOUT:
                    message = f"all replicas were busy for {_TIMEOUT:g} s; the response cannot be completed"
                    raise EngineBusyError(message, 1.0)
                await asyncio.sleep(_RETRY_DELAY)
                waited += _RETRY_DELAY
                avoid = failed

    def _note(self, error: ReplicaLostError, digest: str, route: RouteAttempt, lost: int) -> None:
        """Note that a replica was lost. Raises `EngineError`: the request is not retried."""
        now = time.monotonic()
        log("replica lost", replica=route.replica, reason=str(error), lost=lost)
        if error.died and route.replica is not None:
            self._quarantine.note_death(digest, route.replica, now)
        if self._quarantine.contains(digest, now):
            raise EngineError("two replicas died while serving this request") from error
        if lost >= self._options.attempts:
            raise EngineError(f"{lost} replicas were lost while serving this request: {error}") from error
        if not self._budget.withdraw():
            raise EngineError(f"a replica was lost, and too many requests are being retried: {error}") from error

    async def _attempt(self, call: ProxiedRequest, route: RouteAttempt, response: ProxiedResponse) -> _Outcome:
        """Have one replica serve the call. Raises `ReplicaLostError`: it is gone, or silent for too long. Raises
        `DivergedError`: it generates another response."""
        replies = self._replicas.serve(call, route)
        try:
            while not response.is_complete:
                reply = await self._next(replies, route)
                route.replica = reply.replica
                self._compare(reply)
                status = next((each["status"] for each in reply.messages if "status" in each), None)
                if status in _BUSY and (response.started or self._others(route)):
                    return _Outcome.BUSY
                await response.forward(reply)
                if not response.is_complete and route.replica not in self._replicas.names and self._others(route):
                    return _Outcome.LEAVING
            return _Outcome.COMPLETE
        finally:
            close_later(replies)

    def _compare(self, reply: Reply) -> None:
        """Log differing fingerprints: the replicas may generate different text for a request."""
        if reply.fingerprint in self._fingerprints:
            return
        if self._fingerprints:
            fingerprint, replica = next(reversed(self._fingerprints.items()))
            differ = parts_that_differ(fingerprint, reply.fingerprint)
            log("replicas differ", replica=reply.replica, other=replica, differ=differ)
        self._fingerprints[reply.fingerprint] = reply.replica
        if len(self._fingerprints) > _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]

    async def _next(self, replies: Any, route: RouteAttempt) -> Reply:
        """The next reply to a call. Waiting for a replica is allowed more time than waiting for its reply."""
        coming = asyncio.ensure_future(anext(replies))
        started = time.monotonic()
        try:
            while True:
                limit = _TIMEOUT if route.replica is None else self._options.silence
                end = max(started, route.since) + limit
                if (left := end - time.monotonic()) <= 0:
                    break
                done, _ = await asyncio.wait([coming], timeout=min(left, self._options.silence))
                if done:
                    return coming.result()  # type: ignore[no-any-return]
        except StopAsyncIteration:
            raise ReplicaLostError("the replica's response broke off", died=False) from None
        finally:
            coming.cancel()
            with contextlib.suppress(BaseException):
                coming.exception() if coming.done() else None
        if route.replica is None:
            raise EngineError(f"no replica was available within {_TIMEOUT:g} s")
        raise ReplicaLostError(f"replica {route.replica} was silent for {self._options.silence:g} s", died=False)

    def _others(self, route: RouteAttempt) -> bool:
        """Whether other replicas have not failed the call."""
        return bool(self._replicas.names - route.avoid - {route.replica})


def check_no_files(path: str) -> None:
    """Raises `BodyError`: the path is of files or batches, which replicas don't share."""
    if re.match(r"(/v1)?/(files|batches)(/|$)", path):
        message = "onward deploy serves no files and batches: use onward batch --replicas, or onward serve"
        raise BodyError(message, None, "unknown_url", 404)


def _digest(path: str, body: bytes) -> str:
    return hashlib.blake2b(path.encode() + b" " + body).hexdigest()
