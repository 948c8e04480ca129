"""What all replicas say of their state, as one answer: /metrics, /stats, /health and /ready of an ingress."""

import asyncio
import enum
import json
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
from onward.cluster.call import ProxiedRequest, ReplicaLostError, RouteAttempt, close_later
from onward.cluster.channel import ChannelReplicaSet
from onward.engine import EngineStats
from onward.errors import OnwardError
from onward.protocols import BodyError
from onward.server.errors import CompactJSONResponse, plain_error
from onward.server.metrics import CONTENT_TYPE

_Key = TypeVar("_Key", bound=Hashable)

# Replicas that are gone whose counts are kept one by one; those of earlier ones are kept as a sum.
_GONE = 64


class Kind(enum.Enum):
    """How numbers of several replicas make one."""

    COUNT = enum.auto()  # only grows: the sum, with the last counts of replicas that are gone
    SUM = enum.auto()  # of what replicas have now
    MEAN = enum.auto()  # of a ratio, where a sum says nothing


class Totals(Generic[_Key]):
    """The numbers of all replicas together, from one reading to the next. kind: of a number, by its key.

    A count never falls, whichever replicas answer: of one that does not answer, or is gone, its last count goes on to
    be part of the sum. What it counted after that is missing.
    """

    def __init__(self, kind: Callable[[_Key], Kind]) -> None:
        self._kind = kind
        self._counts: OrderedDict[str, dict[_Key, float]] = OrderedDict()  # of each replica, the latest last
        self._earlier: dict[_Key, float] = {}

    def merged(self, readings: Mapping[str, Mapping[_Key, float]], names: Collection[str] = ()) -> dict[_Key, float]:
        """The numbers of all.

        Args:
            readings: the numbers of each replica that has answered.
            names: of all replicas that are there.
        """
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
        for replica in gone[: max(0, len(gone) - _GONE)]:
            _add(self._earlier, self._counts.pop(replica))


def _add(sums: dict[_Key, float], counts: Mapping[_Key, float]) -> None:
    for key, count in counts.items():
        sums[key] = sums.get(key, 0) + count


# Seconds that a replica has to answer. Prometheus itself waits 10 s for a scrape.
PATIENCE = 2.0
# Seconds between two looks at whether there are replicas, as long as there are none.
_LOOK = 0.05

# Ratios: their sum says nothing. All other numbers of now are sums.
_MEAN_METRICS = frozenset({"onward_prefix_hit_ratio"})
_MEAN_STATS = frozenset({"hit_rate"})
_COUNTED_STATS = frozenset({"steps", "tokens", "preemptions", "seconds"})

# A sample of a metric: its family, its name and its labels.
_Sample = tuple[str, str, tuple[tuple[str, str], ...]]


class State:
    """The state of all replicas together. patience: seconds that one of them has to answer."""

    def __init__(self, replicas: ChannelReplicaSet, patience: float = PATIENCE) -> None:
        self._replicas, self._patience = replicas, patience
        self._metrics: Totals[_Sample] = Totals(_kind_of_metric)
        self._stats: Totals[tuple[str, ...]] = Totals(_kind_of_stat)
        self._families: dict[str, Metric] = {}  # of all metrics that any replica had, without their samples
        self._answers = {"/metrics": self._metrics_of, "/stats": self._stats_of}
        self._answers |= {"/health": _health_of, "/ready": _health_of}

    def has(self, call: ProxiedRequest) -> bool:
        """Whether a call asks for the state."""
        return call.method in ("GET", "HEAD") and call.path in self._answers

    async def answer(self, call: ProxiedRequest) -> Response:
        """Ask all replicas, and answer for all. A refusal of theirs, such as for a wrong key, is the answer. Raises
        `BodyError`: the query asks for something unknown."""
        by = parse_qs(call.query.decode("latin-1"), keep_blank_values=True).get("by", [""])[-1]
        if by not in ("", "replica"):
            raise BodyError(f"by must be replica; got {by[:80]!r}", "by")
        names = await self._names()
        asked = [_asked(self._replicas, replace(call, method="GET", query=b""), name, self._patience) for name in names]
        answers = dict(zip(names, await asyncio.gather(*asked), strict=True))
        bodies = {name: answer.body for name, answer in answers.items() if answer is not None and answer.is_state}
        refusal = next((answer for answer in answers.values() if answer is not None and not answer.is_state), None)
        if refusal is not None and not bodies:
            return Response(refusal.body, refusal.status, dict(refusal.headers))
        return self._answers[call.path](bodies, names, by == "replica")

    async def _names(self) -> list[str]:
        """The replicas that are there; they have a little time to come."""
        waited = 0.0
        while not self._replicas.names and waited < self._patience:
            await asyncio.sleep(_LOOK)
            waited += _LOOK
        return sorted(self._replicas.names)

    def _metrics_of(self, bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
        samples = {name: dict(self._samples(body)) for name, body in bodies.items()}
        numbers = self._metrics.merged(samples, names)
        if by_replica:
            numbers = {
                (family, sample, (*labels, ("replica", name))): number
                for name, of_one in samples.items()
                for (family, sample, labels), number in of_one.items()
            }
        merged = [
            *self._with_numbers(numbers),
            GaugeMetricFamily("onward_replicas", "Replicas that take requests.", len(names)),
            GaugeMetricFamily(
                "onward_replicas_unreachable", "Those of them that did not answer.", len(names) - len(bodies)
            ),
        ]
        return Response(generate_latest(SimpleNamespace(collect=lambda: merged)), media_type=CONTENT_TYPE)

    def _samples(self, body: bytes) -> Iterator[tuple[_Sample, float]]:
        for family in text_string_to_metric_families(body.decode()):
            self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                yield (family.name, sample.name, tuple(sample.labels.items())), sample.value

    def _with_numbers(self, numbers: Mapping[_Sample, float]) -> Iterator[Metric]:
        """The metrics with these numbers, in the order of a single server's."""
        metrics = {name: Metric(name, family.documentation, family.type) for name, family in self._families.items()}
        for (family, sample, labels), number in numbers.items():
            metrics[family].add_sample(sample, dict(labels), number)
        yield from metrics.values()

    def _stats_of(self, bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
        stats = {name: json.loads(body) for name, body in bodies.items()}
        merged = _unflat(self._stats.merged({name: dict(_flat(of_one)) for name, of_one in stats.items()}, names))
        return CompactJSONResponse(stats if by_replica else merged)


class _Answer:
    """Of one replica."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, list[tuple[str, str]](), b""

    def note(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
        else:
            self.body += message.get("body", b"")

    @property
    def is_state(self) -> bool:
        """Whether it says a state: a replica that fails says so with 503."""
        return self.status in (200, 503)


async def _asked(replicas: ChannelReplicaSet, call: ProxiedRequest, name: str, patience: float) -> _Answer | None:
    """What one replica answers; None where it does not within its time."""
    answer = _Answer()
    items = replicas.serve(call, RouteAttempt(only=name))
    try:
        async with asyncio.timeout(patience):
            async for item in items:
                for message in item.messages:
                    answer.note(message)
    except (TimeoutError, ReplicaLostError, OnwardError):  # what the others say is still worth knowing
        return None
    finally:
        close_later(items)
    return answer


def _health_of(bodies: Mapping[str, bytes], names: list[str], by_replica: bool) -> Response:
    """A deployment is well as long as one replica is: requests go there."""
    each: dict[str, dict[str, Any]] = {
        name: json.loads(bodies[name]) if name in bodies else {"status": "unreachable"} for name in names
    }
    well = [state for state in each.values() if state["status"] == "ok"]
    if not each:
        return plain_error(503, "no replica is there", "no_replica", {"retry-after": "5"})
    models: Mapping[str, Any] = next((state["models"] for state in [*well, *each.values()] if "models" in state), {})
    content = {"status": "ok" if well else "failing", "models": models, "replicas": each, "version": __version__}
    return CompactJSONResponse(content, 200 if well else 503)


def _kind_of_metric(key: _Sample) -> Kind:
    family, sample, _ = key
    if sample.endswith(("_total", "_bucket", "_sum", "_count", "_created")):
        return Kind.COUNT
    return Kind.MEAN if family in _MEAN_METRICS else Kind.SUM


def _kind_of_stat(key: tuple[str, ...]) -> Kind:
    _, name, *_ = key
    if name in _COUNTED_STATS:
        return Kind.COUNT
    return Kind.MEAN if name in _MEAN_STATS else Kind.SUM


def _flat(stats: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers of `/stats`, each under its model and its place."""
    for model, numbers in stats.items():
        for name, number in numbers.items():
            if isinstance(number, Mapping):
                yield from (((model, name, part), of_part) for part, of_part in number.items())
            else:
                yield (model, name), number


def _unflat(numbers: Mapping[tuple[str, ...], float]) -> dict[str, dict[str, Any]]:
    order = {each.name: at for at, each in enumerate(fields(EngineStats))}
    stats: dict[str, dict[str, Any]] = {}
    for (model, name, *part), number in sorted(numbers.items(), key=lambda item: order.get(item[0][1], len(order))):
        of_model = stats.setdefault(model, {})
        if part:
            of_model.setdefault(name, {})[part[0]] = number
        else:
            of_model[name] = number
    return stats
