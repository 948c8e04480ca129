"""`onward score` and `onward eval`: perplexity, and tasks of lm-evaluation-harness, of two models as well."""

import dataclasses
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onward
from onward.cli.flags import AS_JSON, INPUT, TASKS, TEXT_FILE, AppliedAdapterFlags, LoadFlags, ModelFlags, flag
from onward.cli.inputs import (
    check_writable,
    expanded,
    finite,
    importing,
    load_model,
    parse_ids,
    read_prompt,
    write_json,
)
from onward.cli.terminal import count, is_terminal, waiting
from onward.errors import RequestError
from onward.util.options import OUTPUT

if TYPE_CHECKING:
    from onward.language_model import LanguageModel


def score(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text to score; by default, or for '-', standard input.")
    ] = None,
    *,
    file: Path | None = TEXT_FILE,
    ids: bool = flag("Read token ids instead of text.", group=INPUT, default=False),
    stride: int | None = flag("Score a long text in windows N tokens apart.", group=INPUT, low=1),
    as_json: bool = AS_JSON,
    model: ModelFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Compute the perplexity of a text.

    The log-likelihood is the sum of the logprobs of the tokens, in nats. The
    perplexity is exp(-mean logprob). The first token is not scored.

    A text longer than the context needs --stride: it is scored in windows as
    long as the context, each N tokens after the previous one. Every token is
    scored once, after at least context - N tokens. A smaller N is more
    accurate, and slower.
    """
    content = read_prompt(text, file, example='onward score "Once upon a time"')
    prompt = parse_ids(content) if ids else content
    lm = load_model(model, adapting=adapting)
    with waiting("scoring …"):
        score = lm.score(prompt, stride=stride, adapter=adapting.first().get("adapter"))
    assert not isinstance(score, list)
    scored = len(score.token_ids) - 1
    if as_json:
        numbers = {"perplexity": finite(score.perplexity), "log_likelihood": finite(score.log_likelihood)}
        typer.echo(json.dumps(numbers | {"tokens": scored}))
    else:
        typer.echo(
            f"perplexity {score.perplexity:.6g} · log-likelihood {score.log_likelihood:.6g} · {count(scored, 'token')}"
        )


def evaluate(
    tasks: Annotated[list[str], typer.Argument(metavar="TASK", help="Tasks or groups, such as arc_easy.")],
    *,
    include: Path | None = flag("Folder of YAML files with your own tasks.", group=TASKS, metavar="FOLDER"),
    shots: int | None = flag("Number of examples in each prompt.", group=TASKS, show_default="the task's", low=0),
    limit: int | None = flag("Use only the first N documents of each task.", group=TASKS, low=1),
    chat: bool = flag("Apply the chat template to the prompts.", group=TASKS, default=False),
    batch_size: int = flag("Number of prompts per batch.", group=TASKS, default=8, low=1),
    seed: int = flag("Seed of sampled answers.", group=TASKS, default=0, low=0),
    paired: str | None = flag("Compare with another SOURCE, or with quantize=int4.", group=TASKS, metavar="OTHER"),
    as_json: bool = AS_JSON,
    output: Path | None = flag("Also write the JSON object to FILE.", "-o", group=OUTPUT),
    log_samples: bool = flag("Add each document and its answer to the JSON.", group=OUTPUT, default=False),
    model: ModelFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Evaluate a model with lm-evaluation-harness.

    The harness has hundreds of tasks and downloads their data from the hub.
    The results match those of its own transformers backend.

    --paired evaluates two models on the same documents with the same seeds
    and prints the interval of the difference of their scores.

    To install it: pip install 'onward[eval]'
    """
    if log_samples and output is None and not as_json:
        raise RequestError("--log-samples needs --output or --json: add one")
    if output is not None:
        check_writable(output)
    other = None if paired is None else other_flags(paired, model)
    harness = _harness()
    adapter = adapting.first().get("adapter")
    with waiting("reading tasks …"):
        from onward.integrations.lm_eval import OnwardLM

        manager = _task_manager(tasks, include)
        if unknown := [task for task in tasks if task not in manager.all_tasks]:
            raise RequestError(
                f"no task {unknown[0]!r}: choose one of the harness's (lm_eval ls tasks), or add --include with the "
                "folder of its YAML file"
            )
    evaluations, models = [], []
    for flags in (model,) if other is None else (model, other):
        lm = load_model(flags, adapting=adapting)
        models.append(_description(lm, flags, adapter))
        with _tidy_output():
            evaluated = harness.simple_evaluate(
                OnwardLM(lm, batch_size=batch_size, adapter=adapter, seed=seed),
                tasks=tasks,
                num_fewshot=shots,
                limit=limit,
                apply_chat_template=chat,
                task_manager=manager,
                log_samples=True,  # for the documents' digest, and for pairs
            )
        evaluations.append(evaluated)
        del lm  # before the next one is loaded
    names = ("results", "n-shot", "versions", *(["samples"] if log_samples else []))
    results, *others = [{name: evaluated[name] for name in names} for evaluated in evaluations]
    results["manifest"] = {
        "models": models,
        "tasks": tasks,
        "shots": shots,
        "limit": limit,
        "chat": chat,
        "seed": seed,
        "documents_sha256": documents_digest(evaluations[0]["samples"]),
        "versions": {"onward": onward.__version__, "lm_eval": version("lm_eval")},
    }
    for each in others:
        results |= {"other": each, "paired": comparisons(*(evaluated["samples"] for evaluated in evaluations))}
    text = json.dumps(results, default=str)
    if as_json:
        typer.echo(text)
    else:
        typer.echo(_table(paired_table(results["paired"]) if others else _rows(results["results"])))
    if output is not None:
        write_json(output, text)


@contextmanager
def _tidy_output() -> Iterator[None]:
    """Keep the harness's messages out of standard output, and progress bars out of files.

    It would also ask git for the commit of the current folder, which git reports on stderr if there is none.
    """
    from unittest.mock import patch

    from lm_eval import evaluator
    from tqdm import std

    plain_init = std.tqdm.__init__

    def silent_init(self: Any, *arguments: Any, **options: Any) -> None:
        plain_init(self, *arguments, **(options | {"disable": True}))

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True))
        if not is_terminal(sys.stderr):
            stack.enter_context(patch.object(std.tqdm, "__init__", silent_init))
        yield


def _description(lm: "LanguageModel", flags: ModelFlags, adapter: str | None) -> dict[str, Any]:
    """A model in the manifest: how it was loaded, and its fingerprint."""
    from onward.language_model.fingerprint import bits_fingerprint

    changed = {each.name: getattr(flags, each.name) for each in dataclasses.fields(flags) if each.name != "threads"}
    changed = {name: str(value) for name, value in changed.items() if value != getattr(type(flags), name)}
    fingerprint = bits_fingerprint(lm.model, lm.adapters.find(adapter))
    return {"model": flags.model, **changed, "adapter": adapter, "fingerprint": fingerprint}


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each metric of each task: its value and standard error, if it has one."""
    rows: list[tuple[str, ...]] = [("task", "metric", "filter", "value", "stderr")]
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                rows.append((task, metric, filter, _number(value), _number(values.get(f"{metric}_stderr,{filter}"))))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value in (None, "N/A") else str(value)


def _task_manager(tasks: list[str], include: Path | None) -> Any:
    """The harness's, with the tasks of a folder. The harness's own, which take half a minute to read, are left out if
    the folder has all of `tasks`. Groups and tags may refer to any task."""
    from lm_eval.tasks import TaskManager

    if include is None:
        return TaskManager()
    folder = str(expanded(include))
    own = TaskManager(include_path=folder, include_defaults=False)
    return own if set(tasks) <= set(own.all_subtasks) else TaskManager(include_path=folder)


def _harness() -> Any:
    with importing("onward eval needs", "eval"):
        import lm_eval
    return lm_eval


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
