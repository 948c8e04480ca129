"""/metrics, /stats, /health and /ready of an ingress: one response for all replicas."""

import asyncio
import contextvars
import enum
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import fields, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from onward import __version__
from onward.cluster.call import ProxiedRequest, ProxiedResponse, ReplicaLostError, RouteAttempt, close_later
from onward.cluster.channel import ChannelReplicaSet
from onward.engine.stats import COUNTS, EngineStats
from onward.errors import OnwardError
from onward.protocols import BodyError
from onward.server.errors import CompactJSONResponse, error_answer
from onward.server.metrics import CONTENT_TYPE

_Key = TypeVar("_Key", bound=Hashable)

# Lost replicas whose counts are stored individually; those of earlier ones are stored as a sum.
_MAX_GONE = 64


class Kind(enum.Enum):
    """How the numbers of several replicas are combined."""

    COUNT = enum.auto()  # never falls: the sum, including the last counts of lost replicas
    SUM = enum.auto()  # of the current values
    MEAN = enum.auto()  # of ratios, whose sum is meaningless


class Totals(Generic[_Key]):
    """The combined numbers of all replicas, from one reading to the next. kind: of a number, by its key. A count never
    falls, whichever replicas respond: the sum includes the last count of a replica that doesn't respond, or is lost.
    What it counted after that is missing."""

    def __init__(self, kind: Callable[[_Key], Kind]) -> None:
        self._kind = kind
        self._counts: OrderedDict[str, dict[_Key, float]] = OrderedDict()  # by replica, the latest last
        self._earlier: dict[_Key, float] = {}

    def merged(self, readings: Mapping[str, Mapping[_Key, float]], names: Collection[str] = ()) -> dict[_Key, float]:
        """Combine the readings of the replicas that responded. names: of all replicas."""
        present: dict[_Key, list[float]] = {}
        for replica, numbers in readings.items():
            counts = self._counts.setdefault(replica, {})
            self._counts.move_to_end(replica)
            for key, number in numbers.items():
                if self._kind(key) is Kind.COUNT:
                    counts[key] = max(number, counts.get(key, 0))
                else:
                    present.setdefault(key, []).append(number)
        self._fold(readings.keys() | set(names))
        sums = self._earlier.copy()
        for counts in self._counts.values():
            _add(sums, counts)
        now = {key: fmean(each) if self._kind(key) is Kind.MEAN else sum(each) for key, each in present.items()}
        return {**sums, **now}

    def _fold(self, present: Collection[str]) -> None:
        gone = [replica for replica in self._counts if replica not in present]
        for replica in gone[: max(0, len(gone) - _MAX_GONE)]:
            _add(self._earlier, self._counts.pop(replica))


def _add(sums: dict[_Key, float], counts: Mapping[_Key, float]) -> None:
    for key, count in counts.items():
        sums[key] = sums.get(key, 0) + count


TIMEOUT = 2.0  # seconds for a replica to respond; Prometheus waits 10 s for a scrape
_GRACE = 10.0  # seconds that a healthy replica may be too busy to respond, as many as Ray's health check waits
_POLL_INTERVAL = 0.05  # seconds, while waiting for replicas

_OK = (200, 503)  # a failing replica reports its state with 503

# A metric sample: its family, name and labels.
_Sample = tuple[str, str, tuple[tuple[str, str], ...]]


class State:
    """The combined state of all replicas. timeout: seconds for each to respond. grace: seconds for which a replica that
    doesn't respond counts as healthy after it last was."""

    def __init__(self, replicas: ChannelReplicaSet, timeout: float = TIMEOUT, grace: float = _GRACE) -> None:
        self._replicas, self._timeout, self._grace = replicas, timeout, grace
        self._metrics: Totals[_Sample] = Totals(_kind_of_metric)
        self._stats: Totals[tuple[str, ...]] = Totals(_kind_of_stat)
        self._families: dict[str, Metric] = {}  # of all replicas' metrics, without samples
        self._handlers = {"/metrics": self._metrics_of, "/stats": self._stats_of}
        self._handlers |= {"/health": self._health_of, "/ready": self._health_of}
        self._healthy: dict[str, tuple[float, Mapping[str, Any]]] = {}  # by replica, when it last was, and its models
        self._readings: dict[str, asyncio.Task[tuple[list[str], dict[str, Response]]]] = {}  # by path

    def has(self, call: ProxiedRequest) -> bool:
        """Whether a call asks for the state."""
        return call.method in ("GET", "HEAD") and call.path in self._handlers

    async def serve(self, call: ProxiedRequest, response: ProxiedResponse) -> None:
        """Ask all replicas, and send one response for all, or their refusal. Concurrent calls share one reading,
        because anyone can flood /health. Raises `BodyError`: the query is invalid."""
        by = parse_qs(call.query.decode("latin-1"), keep_blank_values=True).get("by", [""])[-1]
        if by not in ("", "replica"):
            raise BodyError(f"by must be replica; got {by[:80]!r}", "by")
        reading = self._readings.get(call.path)
        if reading is None or reading.done():
            # In its own context, since it serves others too (`Channel`).
            reading = asyncio.get_running_loop().create_task(self._read(call), context=contextvars.Context())
            self._readings[call.path] = reading
        names, responses = await asyncio.shield(reading)
        bodies = {name: bytes(each.body) for name, each in responses.items() if each.status_code in _OK}
        refusal = next((each for each in responses.values() if each.status_code not in _OK), None)
        if refusal is not None and not bodies:
            await response.send_response(refusal)
        else:
            await response.send_response(self._handlers[call.path](bodies, names, by == "replica"))

    async def _read(self, call: ProxiedRequest) -> tuple[list[str], dict[str, Response]]:
        """The replicas, and the responses of those that respond."""
        names = await self._names()
        requests = [_ask(self._replicas, replace(call, method="GET", query=b""), name, self._timeout) for name in names]
        received = zip(names, await asyncio.gather(*requests), strict=True)
        return names, {name: each for name, each in received if each is not None}

    async def _names(self) -> list[str]:
        """The replicas, after waiting a little for some to be available."""
        waited = 0.0
        while not self._replicas.names and waited < self._timeout:
            await asyncio.sleep(_POLL_INTERVAL)
            waited += _POLL_INTERVAL
        return sorted(self._replicas.names)

    def _metrics_of(self, bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
        samples = {name: dict(self._samples(body)) for name, body in bodies.items()}
        numbers = self._metrics.merged(samples, names)
        if by_replica:
            numbers = {
                (family, sample, (*labels, ("replica", name))): number
                for name, numbers in samples.items()
                for (family, sample, labels), number in numbers.items()
            }
        lost = len(names) - len(bodies)
        merged = [
            *self._families_with(numbers),
            GaugeMetricFamily("onward_replicas", "Replicas that take requests.", len(names)),
            GaugeMetricFamily("onward_replicas_unreachable", "Replicas that did not respond.", lost),
        ]
        return Response(generate_latest(SimpleNamespace(collect=lambda: merged)), media_type=CONTENT_TYPE)

    def _samples(self, body: bytes) -> Iterator[tuple[_Sample, float]]:
        for family in text_string_to_metric_families(body.decode()):
            self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                yield (family.name, sample.name, tuple(sample.labels.items())), sample.value

    def _families_with(self, numbers: Mapping[_Sample, float]) -> Iterator[Metric]:
        """The metrics with these numbers, in the order of a single server's."""
        metrics = {name: Metric(name, family.documentation, family.type) for name, family in self._families.items()}
        for (family, sample, labels), number in numbers.items():
            metrics[family].add_sample(sample, dict(labels), number)
        yield from metrics.values()

    def _stats_of(self, bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
        stats = {name: json.loads(body) for name, body in bodies.items()}
        merged = _unflat(self._stats.merged({name: dict(_flat(numbers)) for name, numbers in stats.items()}, names))
        return CompactJSONResponse(stats if by_replica else merged)

    def _health_of(self, bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
        """A deployment is healthy as long as one replica is: requests go there. One slow response, of a replica that
        processes much else, is not yet a failure."""
        if not names:
            return error_answer(BodyError("no replica is available", code="no_replica", status=503))
        states, now = {name: json.loads(body) for name, body in bodies.items()}, time.monotonic()
        silent = {name: last for name, last in self._healthy.items() if name in names and name not in states}
        working = {name: each for name, each in states.items() if each["status"] == "ok"}
        self._healthy = {name: (now, each["models"]) for name, each in working.items()} | silent
        healthy = {name: models for name, (last, models) in self._healthy.items() if now - last <= self._grace}
        models = next(iter(healthy.values()), None) or next((each["models"] for each in states.values()), {})
        replicas = {name: states[name]["status"] if name in states else "unreachable" for name in names}
        content = {"status": "ok" if healthy else "failing", "models": models, "replicas": replicas}
        return CompactJSONResponse({**content, "version": __version__}, 200 if healthy else 503)


async def _ask(replicas: ChannelReplicaSet, call: ProxiedRequest, name: str, timeout: float) -> Response | None:
    """The response of one replica; None if there is none in time."""
    response = Response()
    replies = replicas.serve(call, RouteAttempt(only=name))
    try:
        async with asyncio.timeout(timeout):
            async for reply in replies:
                for message in reply.messages:
                    if message["type"] == "http.response.start":
                        response.status_code, response.raw_headers = message["status"], message["headers"]
                    else:
                        response.body += message.get("body", b"")
    except (TimeoutError, ReplicaLostError, OnwardError):  # the others' state is still useful
        return None
    finally:
        close_later(replies)
    return response


def _kind_of_metric(key: _Sample) -> Kind:
    family, sample, _ = key
    if sample.endswith(("_total", "_bucket", "_sum", "_count", "_created")):
        return Kind.COUNT
    return Kind.MEAN if family == "onward_prefix_hit_ratio" else Kind.SUM


def _kind_of_stat(key: tuple[str, ...]) -> Kind:
    _, name, *_ = key
    return Kind.COUNT if name in (*COUNTS, "seconds") else Kind.MEAN if name == "hit_rate" else Kind.SUM


def _flat(stats: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers of `/stats`, by model and field."""
    for model, numbers in stats.items():
        for name, number in numbers.items():
            if isinstance(number, Mapping):
                yield from (((model, name, part), number) for part, number in number.items())
            else:
                yield (model, name), number


def _unflat(numbers: Mapping[tuple[str, ...], float]) -> dict[str, dict[str, Any]]:
    order = {each.name: at for at, each in enumerate(fields(EngineStats))}
    stats: dict[str, dict[str, Any]] = {}
    for (model, name, *part), number in sorted(numbers.items(), key=lambda item: order.get(item[0][1], len(order))):
        model_stats = stats.setdefault(model, {})
        if part:
            model_stats.setdefault(name, {})[part[0]] = number
        else:
            model_stats[name] = number
    return stats
