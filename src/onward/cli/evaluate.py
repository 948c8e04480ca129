"""`onward eval`: the tasks of lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from onward.cli.flags import AdapterFlags, ModelFlags
from onward.cli.loading import load_model
from onward.cli.prompt import expanded
from onward.cli.terminal import waiting
from onward.errors import RequestError


def evaluate(
    tasks: Annotated[list[str], typer.Argument(metavar="TASK", help="Names of tasks and groups, such as arc_easy.")],
    *,
    include: Annotated[
        Path | None, typer.Option("--include", metavar="FOLDER", help="Tasks of your own: a folder of YAML files.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option("--shots", min=0, metavar="N", help="Examples before each prompt; the task's own.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="The first N documents of each task alone.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Write prompts with the chat template.")] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, metavar="N", help="Prompts that are completed together.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Measure a model with lm-evaluation-harness.

    The harness has hundreds of tasks and fetches their data from the hub.
    Its numbers are those of its own class for transformers. It comes with
    pip install 'onward[eval]'.
    """
    harness = _harness()
    lm = load_model(model, adapting=adapting)
    with waiting("reading tasks …"):
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=None if include is None else str(expanded(include)))
        if unknown := [task for task in tasks if task not in manager.all_tasks]:
            raise RequestError(
                f"there is no task {unknown[0]!r}: give one of the harness's (lm_eval ls tasks), or --include a folder "
                "with its YAML file"
            )
    results = harness.simple_evaluate(
        _model(lm, batch_size, adapting),
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


def _model(lm: Any, batch_size: int, adapting: AdapterFlags) -> Any:
    from onward.integrations.lm_eval import OnwardLM

    return OnwardLM(lm, batch_size=batch_size, adapter=adapting.first().get("adapter"))


def _harness() -> Any:
    with waiting("starting …"):
        try:
            import lm_eval
        except ModuleNotFoundError as error:
            raise RequestError(f"tasks need the package {error.name}: pip install 'onward[eval]'") from error
    return lm_eval
