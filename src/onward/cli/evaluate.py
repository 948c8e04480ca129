"""`onward score` and `onward eval`: perplexity, and tasks of lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.flags import AdapterFlags, ModelFlags, flag
from onward.cli.inputs import expanded, finite, parse_ids, read_prompt
from onward.cli.loading import importing, load_model
from onward.cli.terminal import count, waiting
from onward.errors import RequestError


def score(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text to score; standard input by default or for '-'.")
    ] = None,
    *,
    file: Path | None = flag("Read the text from FILE.", "-f"),
    ids: bool = flag("Read the text as token ids.", default=False),
    stride: int | None = flag("Score a text longer than the context in windows N tokens apart."),
    as_json: bool = flag("Print one JSON object.", "--json", default=False),
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Compute the perplexity of a text.

    The log-likelihood is the sum of the tokens' logprobs, in nats; the
    perplexity is exp(-mean logprob). The first token is not scored.

    --stride N scores the text in windows as long as the context, each N
    tokens after the previous one. Every token is scored once, with at least
    context - N tokens before it. A smaller N is more accurate and slower.
    """
    content = read_prompt(text, file)
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
    include: Path | None = flag("Folder of YAML files with your own tasks.", metavar="FOLDER"),
    shots: int | None = flag("Number of examples in each prompt.", min=0, show_default="the task's"),
    limit: int | None = flag("Use only the first N documents of each task.", min=1),
    chat: bool = flag("Apply the chat template to the prompts.", default=False),
    batch_size: int = flag("Number of prompts per batch.", default=8, min=1),
    as_json: bool = flag("Print one JSON object.", "--json", default=False),
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Evaluate a model with lm-evaluation-harness.

    The harness has hundreds of tasks and downloads their data from the hub.
    The results match those of its own transformers backend. Install it with
    pip install 'onward[eval]'.
    """
    harness = _harness()
    lm = load_model(model, adapting=adapting)
    with waiting("reading tasks …"):
        from lm_eval.tasks import TaskManager

        from onward.integrations.lm_eval import OnwardLM

        manager = TaskManager(include_path=None if include is None else str(expanded(include)))
        if unknown := [task for task in tasks if task not in manager.all_tasks]:
            raise RequestError(
                f"there is no task {unknown[0]!r}: give one of the harness's (lm_eval ls tasks), or --include a folder "
                "with its YAML file"
            )
    results = harness.simple_evaluate(
        OnwardLM(lm, batch_size=batch_size, adapter=adapting.first().get("adapter")),
        tasks=tasks,
        num_fewshot=shots,
        limit=limit,
        apply_chat_template=chat,
        task_manager=manager,
        log_samples=False,
    )
    if as_json:
        typer.echo(json.dumps({name: results[name] for name in ("results", "n-shot", "versions")}, default=str))
    else:
        from lm_eval.utils import make_table

        typer.echo(make_table(results).strip())


def _harness() -> Any:
    with importing("tasks need", "eval"):
        import lm_eval
    return lm_eval
