"""The Prometheus metrics of a server.

Nothing is counted per token. The times of a request are recorded when it ends, and its first token when the metrics are
read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from onward.engine import Generation
from onward.engine.stats import PARTS
from onward.language_model import Completion
from onward.server.gate import RequestCounts
from onward.server.models import ServedModels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
_DURATION = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class ModelMetrics:
    """The metrics of one model."""

    def __init__(self) -> None:
        self.first_token, self.between, self.duration = (
            Histogram(name, help_text, registry=None, buckets=bounds) for name, help_text, bounds in _HISTOGRAMS
        )
        self.ended: Counter[str] = Counter()  # by finish reason
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.drafted = self.accepted = 0
        self._started: set[Generation] = set()  # running, with their first token counted

    def record_first_token(self, generation: Generation) -> None:
        """Record the time to first token, once, as soon as there is one."""
        arrivals = generation.arrivals
        if arrivals and generation not in self._started:
            self.first_token.observe(arrivals[0][0] - generation.submitted)
            self._started.add(generation)

    def record(self, generation: Generation, completion: Completion | None, now: float) -> None:
        """Record a request that has ended, or whose clients have all disconnected. completion: None if it failed, or if
        it was cancelled and ends with its next step."""
        self.duration.observe(now - generation.submitted)
        self.record_first_token(generation)
        self._started.discard(generation)
        rows = generation.request.options.n
        for (before, _), (at, count) in pairwise(generation.arrivals):
            for _ in range(count):
                self.between.observe((at - before) * min(1.0, rows / count))
        if completion is None:
            self.ended["error" if generation.done else "cancelled"] += 1
            self.output_tokens += _new_tokens(generation)
            return
        self.ended[completion.finish_reason] += 1
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        if generation.request.options.beams > 1:  # whose tokens arrive only at the end
            self.output_tokens += sum(len(text.token_ids) for text in completion.choices)
        else:
            self.output_tokens += _new_tokens(generation)
        for text in completion.choices:
            if text.speculation is not None:
                self.drafted += text.speculation.drafted
                self.accepted += text.speculation.accepted


def _new_tokens(generation: Generation) -> int:
    """The tokens computed by this engine; a resumed request's earlier tokens were counted where they were computed."""
    return sum(count for _, count in generation.arrivals)


class Metrics(RequestCounts):
    """The metrics of a server, updated in the event loop's thread. models: that it serves; the counts of a model on
    demand go on when it is loaded again. live: returns the generations that they are serving, with their model's name.
    """

    def __init__(self, models: ServedModels, live: Callable[[], Iterable[tuple[str, Generation]]]) -> None:
        super().__init__()
        self._served, self._live = models, live
        self._models = {name: ModelMetrics() for name in models.names()}
        self.batches: Counter[str] = Counter()  # that have ended, by status
        self.batch_lines: Counter[tuple[str, str]] = Counter()  # by model and result
        self.files_bytes: Callable[[], int] = lambda: 0

    def of(self, model: str) -> ModelMetrics:
        if model not in self._models:  # since the start
            self._models[model] = ModelMetrics()
        return self._models[model]

    def snapshot(self) -> Callable[[], bytes]:
        """Return a function that renders the metrics in Prometheus' text format. Call this one in the event loop's
        thread, and the returned one in another thread, since it waits for the engines."""
        for model, generation in self._live():
            self.of(model).record_first_token(generation)
        counted = [*self._request_metrics(), *self._response_metrics()]
        return lambda: generate_latest(SimpleNamespace(collect=lambda: [*self._engine_metrics(), *counted]))

    def _response_metrics(self) -> Iterator[Metric]:
        reasons = {(reason,): count for reason, count in sorted(self.refusals.items())}
        statuses = {(str(status),): count for status, count in sorted(self.statuses.items())}
        yield _family("onward_refusals", "Refused requests, by error code.", ["reason"], reasons)
        yield _family("onward_http_responses", "HTTP responses, by status.", ["status"], statuses)
        ends = {(status,): count for status, count in sorted(self.batches.items())}
        lines = dict(sorted(self.batch_lines.items()))
        yield _family("onward_batches", "Batches that have ended, by status.", ["status"], ends)
        yield _family("onward_batch_lines", "Served lines of batches, by result.", ["model", "result"], lines)
        used = {(): self.files_bytes()}
        yield _family("onward_files_bytes", "Disk space of files.", [], used, GaugeMetricFamily)

    def _request_metrics(self) -> Iterator[Metric]:
        for at, (name, help_text, _) in enumerate(_HISTOGRAMS):
            family = Metric(name, help_text, "histogram")
            for model, metrics in self._models.items():
                (of_model,) = (metrics.first_token, metrics.between, metrics.duration)[at].collect()
                for sample in of_model.samples:
                    if not sample.name.endswith("_created"):  # which Prometheus doesn't read in this format
                        family.add_sample(sample.name, {"model": model, **sample.labels}, sample.value)
            yield family
        yield from _families(self._models, _COUNTS, CounterMetricFamily)
        ends = {
            (model, end): count for model, each in self._models.items() for end, count in sorted(each.ended.items())
        }
        yield _family("onward_requests", "Finished requests, by finish reason.", ["model", "end"], ends)

    def _engine_metrics(self) -> Iterator[Metric]:
        engines, ended, loads = self._served.counts()
        stats = {name: engine.stats() for name, engine in engines.items()}
        counts = {name: Counter(each) for name, each in ended.items()}
        for name, each in stats.items():
            counts.setdefault(name, Counter()).update(each.counts)
        yield from _families(stats, _GAUGES, GaugeMetricFamily)
        for attribute, family, help_text in _COUNTERS:
            numbers = {(name,): each[attribute] for name, each in counts.items()}
            yield _family(family, help_text, ["model"], numbers)
        blocks = {(name, state): getattr(each, f"blocks_{state}") for name, each in stats.items() for state in _STATES}
        seconds = {(name, part): each[f"seconds_{part}"] for name, each in counts.items() for part in PARTS}
        yield _family(
            "onward_cache_blocks", "KV cache blocks, by state.", ["model", "state"], blocks, GaugeMetricFamily
        )
        yield _family("onward_engine_seconds", "Time of the engine's thread, by activity.", ["model", "part"], seconds)
        if not self._served.are_fixed:
            loaded = {(name,): name in stats for name in self._served.names()}
            yield _family("onward_model_loaded", "Whether a model is loaded.", ["model"], loaded, GaugeMetricFamily)
            yield _family("onward_model_loads", "Loads of models on demand, by result.", ["model", "result"], loads)


# Name, help text and bounds of the histograms `first_token`, `between` and `duration` of `ModelMetrics`.
_HISTOGRAMS = (
    ("onward_time_to_first_token_seconds", "Time from a request's arrival to its first token.", _FIRST_TOKEN),
    ("onward_time_between_tokens_seconds", "Time between successive tokens of a sequence.", _BETWEEN),
    ("onward_request_seconds", "Time from a request's arrival to its end.", _DURATION),
)
# Attribute of `ModelMetrics`, name, help text.
_COUNTS = (
    ("prompt_tokens", "onward_prompt_tokens", "Prompt tokens of finished requests."),
    ("cached_tokens", "onward_cached_prompt_tokens", "Prompt tokens of finished requests found in the prefix cache."),
    ("output_tokens", "onward_output_tokens", "Tokens generated for finished requests."),
    ("drafted", "onward_drafted_tokens", "Draft tokens proposed by speculation."),
    ("accepted", "onward_accepted_tokens", "Draft tokens accepted."),
)
_STATES = ("used", "cached", "free")
# Attribute of `EngineStats`, name, help text.
_GAUGES = (
    ("waiting", "onward_requests_waiting", "Waiting requests."),
    ("running", "onward_requests_running", "Running requests."),
    ("sequences", "onward_sequences_running", "Running sequences."),
    ("waiting_tokens", "onward_waiting_prompt_tokens", "Prompt tokens of waiting requests."),
    ("hit_rate", "onward_prefix_hit_ratio", "Share of prompt tokens found in the prefix cache."),
    ("tokens_per_second", "onward_tokens_per_second", "Tokens per second over the last 30 s of work."),
)
_COUNTERS = (
    ("steps", "onward_engine_steps", "Engine steps."),
    ("tokens", "onward_engine_tokens", "Tokens generated, including those of running requests."),
    ("preemptions", "onward_preemptions", "Requests that were preempted and recomputed."),
    ("restored_tokens", "onward_prefix_disk_tokens", "Prompt tokens read from the prefix cache on disk."),
    ("blocks_written", "onward_prefix_disk_written_blocks", "Blocks given to the prefix cache on disk."),
    ("blocks_dropped", "onward_prefix_disk_dropped_blocks", "Blocks that the prefix cache on disk could not take."),
)


def _families(
    models: Mapping[str, Any], metrics: Iterable[tuple[str, str, str]], kind: type[Metric]
) -> Iterator[Metric]:
    for attribute, name, help_text in metrics:
        numbers = {(model,): getattr(each, attribute) for model, each in models.items()}
        yield _family(name, help_text, ["model"], numbers, kind)


def _family(
    name: str, help_text: str, labels: list[str], numbers: Mapping[Any, float], kind: Any = CounterMetricFamily
) -> Metric:
    family = kind(name, help_text, labels=labels)
    for values, number in numbers.items():
        family.add_metric(values, number)
    return family  # type: ignore[no-any-return]
