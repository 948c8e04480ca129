"""Figures from records: throughput, the time to the first token, the gaps between tokens."""

import itertools
import statistics
from collections.abc import Sequence

from benchmarks.serve.workload import Record


def throughput(records: Sequence[Record]) -> float:
    """Output tokens per second, from the first request to the last token."""
    began, ended = min(record.sent for record in records), max(record.tokens[-1] for record in records)
    return sum(len(record.tokens) for record in records) / (ended - began)


def requests_per_second(records: Sequence[Record]) -> float:
    began, ended = min(record.sent for record in records), max(record.tokens[-1] for record in records)
    return len(records) / (ended - began)


def decode_rate(records: Sequence[Record]) -> float | None:
    """Tokens a second of all rows while all decode: after the last prompt, before the first end. None: never."""
    began, ended = max(record.tokens[0] for record in records), min(record.tokens[-1] for record in records)
    count = sum(began < at <= ended for record in records for at in record.tokens)
    return count / (ended - began) if ended > began else None


def first_token(record: Record) -> float:
    """Seconds from the request to its first token."""
    return record.tokens[0] - record.sent


def gaps(record: Record, begin: float = 0.0, end: float = float("inf")) -> list[float]:
    """Seconds between tokens, of those gaps that lie at least in part between two times."""
    pairs = itertools.pairwise(record.tokens)
    return [after - before for before, after in pairs if before < end and after > begin]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
