"""What a server counts, for Prometheus.

Nothing is counted for each token. What ended tells its times at once; what still runs is asked for its first token when
someone looks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from onward.engine import EngineStats, Generation
from onward.language_model import Completion
from onward.server.models import ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(labels, buckets, self._sum)


class ModelMetrics:
    """What is counted of one model."""

    def __init__(self) -> None:
        self.first_token, self.between = Histogram(_FIRST_TOKEN), Histogram(_BETWEEN)
        self.whole = Histogram(_WHOLE)
        self.ended: Counter[str] = Counter()  # by how
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.drafted = self.accepted = 0
        self._begun: set[Generation] = set()  # that go on, and whose first token was counted

    def note_first_token(self, generation: Generation) -> None:
        """Count the first token of a request that may go on, once it is there."""
        arrivals = generation.arrivals
        if arrivals and generation not in self._begun:
            self.first_token.observe(arrivals[0][0] - generation.submitted)
            self._begun.add(generation)

    def note(self, generation: Generation, completion: Completion | None, now: float) -> None:
        """A request has been answered, or nobody waits for it any more.

        completion: None where it failed, or goes on until its next step, which ends it.
        """
        self.whole.observe(now - generation.submitted)
        self.note_first_token(generation)
        self._begun.discard(generation)
        arrivals, rows = generation.arrivals, generation.request.options.n
        for (before, _), (at, count) in pairwise(arrivals):
            self.between.observe((at - before) * min(1.0, rows / count), count)
        if completion is None:
            self.ended["error" if generation.done else "cancelled"] += 1
            self.output_tokens += _new_tokens(generation)
            return
        self.ended[completion.finish_reason] += 1
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        beams = generation.request.options.beams > 1  # whose tokens come with the end
        self.output_tokens += (
            sum(len(text.token_ids) for text in completion.choices) if beams else _new_tokens(generation)
        )
        for text in completion.choices:
            if text.speculation is not None:
                self.drafted += text.speculation.drafted
                self.accepted += text.speculation.accepted


def _new_tokens(generation: Generation) -> int:
    """The tokens that this engine computed; a resumed request's earlier tokens are counted where they were computed."""
    return sum(count for _, count in generation.arrivals)


class Snapshot:
    """The metrics of a moment, which may be written in another thread than that of the loop.

    stats: of each engine. counted: of everything else.
    """

    def __init__(self, stats: Callable[[], dict[str, EngineStats]], counted: Sequence[Metric]) -> None:
        self._stats, self._counted = stats, counted

    def text(self) -> bytes:
        """In the format that Prometheus reads. It waits for the engines."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """For `generate_latest`."""
        yield from _of_engines(self._stats())
        yield from self._counted


class Metrics:
    """The counts of a server. The thread of its loop notes them, and takes snapshots of them.

    live: the requests that engines serve now, by model.
    """

    def __init__(self, models: Iterable[ServedModel], live: Callable[[], Iterable[tuple[str, Generation]]]) -> None:
        self._live = live
        self._models = {model.name: (model, ModelMetrics()) for model in models}
        self.refusals: Counter[str] = Counter()  # by the error's code
        self.statuses: Counter[int] = Counter()

    def of(self, model: str) -> ModelMetrics:
        return self._models[model][1]

    def snapshot(self) -> Snapshot:
        """Call it in the thread of the loop, which changes the counts."""
        for model, generation in self._live():
            self.of(model).note_first_token(generation)
        return Snapshot(self._stats, [*self._of_requests(), *self._of_answers()])

    def _stats(self) -> dict[str, EngineStats]:
        return {name: model.engine.stats() for name, (model, _) in self._models.items()}

    def _of_answers(self) -> Iterator[Metric]:
        reasons = {(reason,): count for reason, count in sorted(self.refusals.items())}
        statuses = {(str(status),): count for status, count in sorted(self.statuses.items())}
        yield _family("onward_refusals", "Requests refused, by the error's code.", ["reason"], reasons)
        yield _family("onward_http_responses", "Answers, by status.", ["status"], statuses)

    def _of_requests(self) -> Iterator[Metric]:
        counted = {name: of_model for name, (_, of_model) in self._models.items()}
        for attribute, metric, says in _HISTOGRAMS:
            family = HistogramMetricFamily(metric, says, labels=["model"])
            for name, of_model in counted.items():
                getattr(of_model, attribute).add_to(family, [name])
            yield family
        for attribute, metric, says in _COUNTS:
            numbers = {(name,): getattr(each, attribute) for name, each in counted.items()}
            yield _family(metric, says, ["model"], numbers)
        ends = {(name, end): count for name, each in counted.items() for end, count in sorted(each.ended.items())}
        yield _family("onward_requests", "Requests that have ended, by how.", ["model", "end"], ends)


# Attribute of `ModelMetrics`, name, text.
_HISTOGRAMS = (
    ("first_token", "onward_time_to_first_token_seconds", "From a request's arrival to its first token."),
    ("between", "onward_time_between_tokens_seconds", "From a token to the next of the same text."),
    ("whole", "onward_request_seconds", "From a request's arrival to its end."),
)
_COUNTS = (
    ("prompt_tokens", "onward_prompt_tokens", "Tokens of prompts of requests that have ended."),
    ("cached_tokens", "onward_cached_prompt_tokens", "Those of them that the cache held."),
    ("output_tokens", "onward_output_tokens", "Tokens written for requests that have ended."),
    ("drafted", "onward_drafted_tokens", "Tokens guessed ahead."),
    ("accepted", "onward_accepted_tokens", "Those of them that became part of a text."),
)
# Attribute of `EngineStats`, name, text.
_GAUGES = (
    ("waiting", "onward_requests_waiting", "Requests that wait."),
    ("running", "onward_requests_running", "Requests that run."),
    ("sequences", "onward_sequences_running", "Texts that run."),
    ("waiting_tokens", "onward_waiting_prompt_tokens", "Tokens of the prompts that wait."),
    ("hit_rate", "onward_prefix_hit_ratio", "Of the tokens of prompts the share that the cache held."),
    ("tokens_per_second", "onward_tokens_per_second", "Tokens a second over the last half minute of work."),
)
_COUNTERS = (
    ("steps", "onward_engine_steps", "Steps."),
    ("tokens", "onward_engine_tokens", "Tokens written, of requests that run too."),
    ("preemptions", "onward_preemptions", "Requests that gave way and were computed again."),
)


def _family(
    metric: str, says: str, labels: list[str], numbers: Mapping[Any, float], kind: Any = CounterMetricFamily
) -> Any:
    family: Any = kind(metric, says, labels=labels)
    for values, number in numbers.items():
        family.add_metric(values, number)
    return family


def _of_engines(stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for attribute, metric, says in metrics:
            numbers = {(name,): getattr(each, attribute) for name, each in stats.items()}
            yield _family(metric, says, ["model"], numbers, kind)
    states, parts = ("used", "cached", "free"), ("schedule", "step", "give_out")
    blocks = {(name, state): getattr(each, f"blocks_{state}") for name, each in stats.items() for state in states}
    seconds = {(name, part): getattr(each.seconds, part) for name, each in stats.items() for part in parts}
    says = "Blocks of the cache, by what they do."
    yield _family("onward_cache_blocks", says, ["model", "state"], blocks, GaugeMetricFamily)
    says = "Seconds of the engine's thread, by what it did."
    yield _family("onward_engine_seconds", says, ["model", "part"], seconds)
