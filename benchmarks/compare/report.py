"""The results of the samples: figures, ratios to the best peer, shares of the limit, and targets."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.checkpoints import SHAPES, cache_bytes, cache_bytes_per_position, weight_bytes_per_token
from benchmarks.compare.contenders import DEFAULT_SHAPE, OURS
from benchmarks.compare.measure import BETWEEN, LENGTHS, LONG, Samples, Session
from benchmarks.compare.workers.serve import TOKENS_OF_ONE_TEXT

DECODES = {"decode_after_32": 32, "decode_after_512": 512, "decode_after_4000": LONG}
PREFILL = "prefill_of_512"
FIGURES = (*DECODES, PREFILL)

# Least ratio to the best peer, by precision and figure; and least share of the bandwidth for decode after 32.
RATIO_TARGETS = {
    "bf16": {"decode_after_32": 1.08, "decode_after_512": 1.2, "decode_after_4000": 1.5, PREFILL: 1.05},
    "int8": {"decode_after_32": 1.35, "decode_after_512": 1.4, "decode_after_4000": 1.5, PREFILL: 1.4},
    "int4": {"decode_after_32": 1.25, "decode_after_512": 1.6, "decode_after_4000": 1.5, PREFILL: 1.4},
}
# Of all figures of the other shapes.
FAMILY_RATIO_TARGET, FAMILY_BANDWIDTH_TARGET = 1.2, 0.85
BANDWIDTH_TARGETS = {"bf16": 0.90, "int8": 0.88, "int4": 0.80}
BATCH_TARGET = 4.5
START_TARGET_SECONDS = 3.0
DEMO_TARGET = 15.0
MEMORY_ALLOWANCE = 500e6


@dataclass(frozen=True)
class Check:
    """One target of the comparison and its measured value."""

    what: str
    measured: float
    wanted: float
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class PrecisionReport:
    """One precision: figures in tokens/s by contender and figure, and the limit for each decode figure.

    shape: a name in SHAPES.
    """

    precision: str
    session: Session
    figures: Mapping[str, Mapping[str, float | None]]
    limits: Mapping[str, float]
    shape: str = DEFAULT_SHAPE

    @property
    def ours(self) -> str:
        return f"{OURS} {self.precision}"

    @property
    def bandwidth(self) -> float:
        return statistics.median(self.session.readings())

    def best_peer(self, figure: str) -> tuple[str, float] | None:
        """The peer with the smallest lead of Onward, and the lead; None if either is missing.

        The ratio is the median over the turns of the ratio within a turn, because changes of the memory's speed affect
        all contenders of a turn.
        """
        mine = self._turns(self.ours, figure)
        peers = [name for name in self.figures if name != self.ours]
        ratios = {
            name: statistics.median(theirs / ours for ours, theirs in zip(mine, turns, strict=False))
            for name in peers
            if mine and (turns := self._turns(name, figure))
        }
        return min(ratios.items(), key=lambda item: item[1], default=None)

    def ratio(self, figure: str) -> float | None:
        """Onward over the best peer; None if either is missing."""
        best = self.best_peer(figure)
        return best[1] if best else None

    def _turns(self, name: str, figure: str) -> list[float]:
        """Seconds of every turn: of a token in the median, or of the prompt."""
        samples = self.session.samples.get(name, Samples())
        if figure == PREFILL:
            return samples.prefill.get(512, [])
        return [statistics.median(seconds) for seconds in samples.token.get(DECODES[figure], [])]

    def _share(self, figure: str, read: float) -> float | None:
        """Of the bandwidth, `read` bytes a token: the median over the turns, each with its own reading."""
        turns = self._turns(self.ours, figure)
        readings = self.session.bandwidth.get(DECODES[figure], [])
        shares = [read / seconds / reading for seconds, reading in zip(turns, readings, strict=False)]
        return statistics.median(shares) if shares else None

    def share_of_limit(self, figure: str) -> float | None:
        """Onward's share of the bandwidth, weights and cache counted."""
        return self._share(figure, self._weights + cache_bytes(DECODES[figure], SHAPES[self.shape]))

    def share_by_weights(self) -> float | None:
        """Onward's share of the bandwidth after 32 tokens, weights alone counted: what the target is about."""
        return self._share("decode_after_32", self._weights)

    @property
    def _weights(self) -> float:
        return weight_bytes_per_token(SHAPES[self.shape], self.precision)

    def wanted_ratio(self, figure: str) -> float:
        """Over the best peer."""
        return RATIO_TARGETS[self.precision][figure] if self.shape == DEFAULT_SHAPE else FAMILY_RATIO_TARGET

    def wanted_share(self) -> float:
        """Of the bandwidth, after 32 tokens."""
        return BANDWIDTH_TARGETS[self.precision] if self.shape == DEFAULT_SHAPE else FAMILY_BANDWIDTH_TARGET

    def checks(self) -> list[Check]:
        found = []
        for figure in FIGURES:
            ratio = self.ratio(figure)
            if ratio is not None:
                what = f"{self.precision}, {words(figure)}, against the best peer"
                found.append(Check(what, ratio, self.wanted_ratio(figure)))
        share = self.share_by_weights()
        if share is not None:
            what = f"{self.precision}, decode after 32, share of bandwidth"
            found.append(Check(what, share, self.wanted_share(), unit=""))
        for length, peak in self.session.samples.get(self.ours, Samples()).peak.items():
            if self.shape == DEFAULT_SHAPE:  # the others are drawn in memory
                found.append(self._memory(length, peak))
        return found

    def _memory(self, length: int, peak: int) -> Check:
        cache = (length + TOKENS_OF_ONE_TEXT) * cache_bytes_per_position()
        allowed = weight_bytes_per_token(precision=self.precision) + cache + MEMORY_ALLOWANCE
        what = f"{self.precision}, peak memory with a prompt of {length}"
        return Check(what, peak / 1e9, allowed / 1e9, at_least=False, unit="GB")

    def context_cost(self) -> dict[str, Any] | None:
        """The time of a token per position before it, and the time to read the cache of a position."""
        samples = self.session.samples.get(self.ours, Samples())
        seconds = {
            # The middle of what was decoded after a prompt of this length.
            length + len(samples.tokens(length)) / 2: statistics.median(samples.tokens(length))
            for length in (*LENGTHS, *BETWEEN, LONG)
            if samples.token.get(length)
        }
        if len(seconds) < 3:
            return None
        line = statistics.linear_regression(list(seconds), list(seconds.values()))
        floor = cache_bytes_per_position(SHAPES[self.shape]) / self.bandwidth
        return {
            "ms_per_token": {f"{position:.0f}": value * 1e3 for position, value in seconds.items()},
            "ns_per_position": line.slope * 1e9,
            "ns_to_read_a_position": floor * 1e9,
            "ratio": line.slope / floor,
            "largest_deviation_from_a_line": max(
                abs(value / (line.intercept + line.slope * position) - 1) for position, value in seconds.items()
            ),
        }

    def as_json(self) -> dict[str, Any]:
        samples = self.session.samples
        return {
            "weight_bytes_per_token": self._weights,
            "read_bandwidth_gb_s": rounded(
                {length: [value / 1e9 for value in readings] for length, readings in self.session.bandwidth.items()}
            ),
            "limits": rounded(dict(self.limits)),
            "contenders": {
                name: rounded({**rates, "load_seconds": samples[name].load, "peak_bytes": samples[name].peak})
                | {"instructions": samples[name].instructions}
                for name, rates in self.figures.items()
            },
            "ratio_to_best_peer": rounded({figure: self.ratio(figure) for figure in FIGURES}),
            "share_of_limit": rounded({figure: self.share_of_limit(figure) for figure in DECODES}),
            "best_peer": {figure: (self.best_peer(figure) or (None,))[0] for figure in FIGURES},
            "same_first_tokens": agreement(self),
            "cost_of_context": rounded(self.context_cost()),
            "failed": self.session.failed,
        }


def precision_report(precision: str, session: Session, shape: str = DEFAULT_SHAPE) -> PrecisionReport:
    figures = {
        name: {figure: samples.decode_rate(length) for figure, length in DECODES.items()}
        | {PREFILL: samples.prefill_rate(512)}
        for name, samples in session.samples.items()
        if name not in session.failed
    }
    weights = weight_bytes_per_token(SHAPES[shape], precision)
    limits = {
        figure: statistics.median(session.bandwidth[length]) / (weights + cache_bytes(length, SHAPES[shape]))
        for figure, length in DECODES.items()
        if session.bandwidth.get(length)
    }
    return PrecisionReport(precision, session, figures, limits, shape)


def agreement(report: PrecisionReport) -> dict[str, str]:
    """How many first tokens each contender shares with Onward: a sign that all run the same model.

    In 8 and 4 bits they round differently, and random weights lie close together: there fewer agree.
    """
    samples = report.session.samples
    ours = samples[report.ours].first_tokens if report.ours in samples else {}
    shared: dict[str, str] = {}
    for name in report.figures:
        theirs = samples[name].first_tokens
        pairs = [pair for length in ours for pair in zip(ours[length], theirs.get(length, []), strict=False)]
        shared[name] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
    return shared


def batch_checks(session: Session, rows: int = 8, length: int = 32) -> list[Check]:
    """Throughput of a batch over that of one text."""
    (samples,) = session.samples.values()
    if session.failed:
        return []
    one, all_rows = statistics.median(samples.tokens(length)), statistics.median(samples.batch[rows])
    return [Check(f"int8, decode of {rows} texts together against one", rows * one / all_rows, BATCH_TARGET)]


def demo_checks(session: Session, length: int = 32) -> list[Check]:
    rates = {name.split()[0]: samples.decode_rate(length) for name, samples in session.samples.items()}
    mine, theirs = rates.get(OURS), rates.get("transformers")
    return [Check("the demo model, decode against transformers", mine / theirs, DEMO_TARGET)] if mine and theirs else []


def start_checks(seconds: Mapping[str, float]) -> list[Check]:
    """Seconds from process start to the first token, by contender."""
    mine = seconds.get(f"{OURS} bf16")
    if mine is None:
        return []
    checks = [Check("process start to first token, bf16", mine, START_TARGET_SECONDS, at_least=False, unit="s")]
    return checks + [
        Check(f"process start to first token, {name} over Onward", theirs / mine, 1.0)
        for name, theirs in seconds.items()
        if name.startswith(("transformers", "openvino"))
    ]


def words(figure: str) -> str:
    return figure.replace("_", " ").replace("4000", "4,000")


def rounded(value: Any) -> Any:
    """All numbers in a structure, rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
