"""`onward score` and `onward eval`: perplexity, and tasks of lm-evaluation-harness."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.flags import AS_JSON, INPUT, TASKS, TEXT_FILE, AppliedAdapterFlags, ModelFlags, flag
from onward.cli.inputs import expanded, finite, importing, load_model, parse_ids, read_prompt
from onward.cli.terminal import count, is_terminal, waiting
from onward.errors import RequestError
from onward.util.options import OUTPUT


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
    as_json: bool = AS_JSON,
    output: Path | None = flag("Also write the JSON object to FILE.", "-o", group=OUTPUT),
    log_samples: bool = flag("Add each document and its answer to the JSON.", group=OUTPUT, default=False),
    model: ModelFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Evaluate a model with lm-evaluation-harness.

    The harness has hundreds of tasks and downloads their data from the hub.
    The results match those of its own transformers backend.

    To install it: pip install 'onward[eval]'
    """
    if log_samples and output is None and not as_json:
        raise RequestError("--log-samples needs --output or --json: add one")
    if output is not None:
        _check_writable(expanded(output))
    harness = _harness()
    lm = load_model(model, adapting=adapting)
    with waiting("reading tasks …"):
        from lm_eval.tasks import TaskManager

        from onward.integrations.lm_eval import OnwardLM

        manager = TaskManager(include_path=None if include is None else str(expanded(include)))
        if unknown := [task for task in tasks if task not in manager.all_tasks]:
            raise RequestError(
                f"no task {unknown[0]!r}: choose one of the harness's (lm_eval ls tasks), or add --include with the "
                "folder of its YAML file"
            )
    with _tidy_output():
        results = harness.simple_evaluate(
            OnwardLM(lm, batch_size=batch_size, adapter=adapting.first().get("adapter")),
            tasks=tasks,
            num_fewshot=shots,
            limit=limit,
            apply_chat_template=chat,
            task_manager=manager,
            log_samples=log_samples,
        )
    names = ("results", "n-shot", "versions", *(["samples"] if log_samples else []))
    text = json.dumps({name: results[name] for name in names}, default=str)
    typer.echo(text if as_json else _table(results["results"]))
    if output is not None:
        try:
            expanded(output).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{str(output)!r} cannot be written: {error.strerror or error}") from error


def _check_writable(file: Path) -> None:
    """Raise `RequestError` if a file cannot be written, before hours of work for it."""
    folder = file.absolute().parent
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        problem = "it is a folder" if file.is_dir() else f"{str(folder)!r} is not a folder that you can write to"
        raise RequestError(f"{str(file)!r} cannot be written: {problem}")


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


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each metric of each task: its value and standard error, if it has one."""
    rows = [("task", "metric", "filter", "value", "stderr")]
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                rows.append((task, metric, filter, _number(value), _number(values.get(f"{metric}_stderr,{filter}"))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value in (None, "N/A") else str(value)


def _harness() -> Any:
    with importing("onward eval needs", "eval"):
        import lm_eval
    return lm_eval
