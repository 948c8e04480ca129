"""Two models on the same documents with the same noise: the interval of the difference of their scores."""

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from onward.cli.flags import LoadFlags, ModelFlags
from onward.errors import RequestError

_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


def other_flags(text: str, flags: ModelFlags) -> ModelFlags:
    """The flags of the other model. text: its source, and flags that differ as NAME=VALUE, separated by commas."""
    source = flags.model
    changes: dict[str, Any] = {}
    kinds = {each.name: str(each.type) for each in dataclasses.fields(LoadFlags) if each.name != "threads"}
    for at, part in enumerate(text.split(",")):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals and at == 0 and part:
            source = part
        elif equals and name in kinds and value:
            changes[name] = int(value) if kinds[name].startswith("int") and value.isdecimal() else value
        else:
            names = ", ".join(sorted(name.replace("_", "-") for name in kinds))
            raise RequestError(
                f"--paired takes SOURCE, SOURCE,NAME=VALUE or NAME=VALUE, such as quantize=int4; got {part!r}. "
                f"Names: {names}"
            )
    if source == flags.model and not changes:
        raise RequestError("--paired compares two models, but this is the same: name another, or add quantize=int4")
    return dataclasses.replace(flags, model=source, **changes)


def comparisons(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], others: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each metric that has a number for each document. samples, others: by task, those of the harness.

    difference: the other's mean minus the first's. interval: of the difference, with 95 % confidence, from the
    differences by document. unpaired_interval: from the two variances, as for different documents. better, worse: the
    documents on which the other's number is larger or smaller. Intervals are None for one document.
    """
    rows: list[dict[str, Any]] = []
    for task, documents in samples.items():
        theirs = {(each["doc_id"], each["filter"]): each for each in others[task]}
        columns: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for each in documents:
            other = theirs[each["doc_id"], each["filter"]]
            for metric in each["metrics"]:
                if _is_number(each[metric]) and _is_number(other[metric]):
                    pair = float(each[metric]), float(other[metric])
                    columns.setdefault((metric, each["filter"]), []).append(pair)
        rows += [
            {"task": task, "metric": metric, "filter": filter} | compared(pairs)
            for (metric, filter), pairs in columns.items()
        ]
    return rows


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The numbers of `comparisons` for pairs of two models' numbers, at least one."""
    count = len(pairs)
    first, second = [one for one, _ in pairs], [two for _, two in pairs]
    differences = [two - one for one, two in pairs]
    mean = statistics.fmean(differences)
    paired = unpaired = None
    if count > 1:
        half = _NORMAL_95 * math.sqrt(statistics.variance(differences) / count)
        paired = [mean - half, mean + half]
        half = _NORMAL_95 * math.sqrt((statistics.variance(first) + statistics.variance(second)) / count)
        unpaired = [mean - half, mean + half]
    return {
        "documents": count,
        "first": statistics.fmean(first),
        "second": statistics.fmean(second),
        "difference": mean,
        "interval": paired,
        "unpaired_interval": unpaired,
        "better": sum(each > 0 for each in differences),
        "worse": sum(each < 0 for each in differences),
    }


def paired_table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of `comparisons` as cells, with a heading."""
    head = ("task", "metric", "filter", "n", "first", "second", "difference", "95 % interval", "unpaired")
    cells = [
        (
            *(str(row[name]) for name in ("task", "metric", "filter", "documents")),
            *(f"{row[name]:.4f}" for name in ("first", "second")),
            f"{row['difference']:+.4f}",
            *(_interval(row[name]) for name in ("interval", "unpaired_interval")),
        )
        for row in rows
    ]
    return [head, *cells]


def documents_digest(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """SHA-256 of the documents, prompts and targets, whose hashes the harness reports."""
    names = ("doc_id", "filter", "doc_hash", "prompt_hash", "target_hash")
    hashes = {task: [[each[name] for name in names] for each in documents] for task, documents in samples.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:+.4f} … {bounds[1]:+.4f}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)  # True and False count as 1 and 0
