"""`onward batch`: run a file of requests in OpenAI's batch format on an engine or on Ray replicas."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onward
from onward.cli.flags import (
    RAY_ADDRESS,
    REPLICAS,
    REQUESTS,
    BodyFlags,
    DraftFlags,
    EngineFlags,
    ModelFlags,
    ServedAdapterFlags,
    TemplateFlags,
    flag,
)
from onward.cli.info import usable_cores
from onward.cli.inputs import expanded, find, load_model, starting, template_variables
from onward.cli.terminal import count, note, waiting
from onward.errors import RequestError

if TYPE_CHECKING:
    from onward.batches import BatchJob, Progress, Replica
    from onward.protocols import BodyReader

# Minimum number of lines submitted to an engine at a time.
_MIN_LINES = 32
_AHEAD = 3  # times as many lines as it serves at once, so that it never runs out of them


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests: a .jsonl or .parquet file, or a folder of them.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="Results: a file or a folder, like IN.")],
    *,
    replicas: int | None = flag("Run on N Ray replicas; needs onward[cluster].", group=REPLICAS, low=1),
    address: str | None = RAY_ADDRESS,
    engine: EngineFlags,
    max_new_tokens: int | None = flag(
        "Maximum number of tokens for lines without max_tokens.", "-n", group=REQUESTS, show_default="the model's"
    ),
    model_name: str | None = flag(
        "Model name in the requests.", group=REQUESTS, metavar="NAME", show_default="same as --model"
    ),
    body: BodyFlags,
    template: TemplateFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: ServedAdapterFlags,
) -> None:
    """Run a batch of requests in OpenAI's format.

    Each line of IN is {"custom_id": …, "method": "POST", "url": …,
    "body": …}, where the URL is /v1/chat/completions, /v1/completions,
    /v1/responses or /v1/messages. Once all lines are done, OUT gets one
    result per line, in the same order. A line that fails gets an error as
    its result, and the exit code is 2.

    Until then, results are collected in OUT.parts. To resume, run the same
    command again: finished lines are skipped and failed lines are retried.
    Each line gets the same tokens as if it ran alone. Without a seed, its
    custom_id determines one.
    """
    with starting():
        from onward.batches import BatchInput, BatchJob, BatchResults, EngineReplica
    source, destination = expanded(source), expanded(destination)
    if replicas is None and address is not None:
        raise RequestError("--address needs --replicas: add it")
    bodies = {"limits": body.limits(), "ignore_unsupported": body.ignore_unsupported}
    requests, limits = BatchInput(source), engine.limits()
    chunk = max(_MIN_LINES, limits.get("max_sequences", _MIN_LINES))

    def serve(start: "Callable[[], Replica]", size: int, ahead: int) -> "Progress":
        over = "" if replicas is None else f" over {count(replicas, 'replica')}"
        with waiting(f"serving {count(requests.count, 'line')}{over} …") as show:

            def show_progress(now: "Progress") -> None:
                show(now.over / now.lines, f"{now.failed:,} failed" if now.failed else "")

            job = BatchJob(requests, results, start, replicas or 1, chunk=size, ahead=ahead, show=show_progress)
            _run(job)
        return job.progress

    if replicas is not None and model.threads is None and address is None:
        model = dataclasses.replace(model, threads=max(1, usable_cores() // replicas))
    make_reader = partial(_reader, model, drafting, adapting, template, model_name, max_new_tokens, bodies)
    with BatchResults(destination, requests) as results:
        if replicas is None:
            reader = make_reader()
            with onward.Engine(reader.lm, **limits) as engine_here:
                replica = EngineReplica(engine_here, reader)
                progress = serve(lambda: replica, 1, _AHEAD * chunk)
        else:
            from onward.batches import RayReplica
            from onward.cluster.ray_session import connected

            find(model.model)  # download it once, before the replicas start
            with connected(address, replicas):
                progress = serve(partial(RayReplica, make_reader, limits), chunk, _AHEAD)
    if progress.failed:
        lines = count(requests.count, "line")
        raise RequestError(f"{progress.failed} of {lines} failed: their results in {str(destination)!r} say why")


def _reader(
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: ServedAdapterFlags,
    template: TemplateFlags,
    model_name: str | None,
    max_new_tokens: int | None,
    bodies: dict[str, Any],
) -> "BodyReader":
    from onward.language_model.request import needed_tokenizer
    from onward.protocols import BodyReader, Limits

    limits = Limits.of(bodies["limits"])  # checks them
    lm = load_model(model, drafting, adapting)
    needed_tokenizer(lm.tokenizer, "a batch")
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    lm.defaults.replace(**options)  # checks them
    return BodyReader(
        lm,
        model_name or model.model,
        options,
        template_variables(template, lm, model.model),
        limits=limits,
        ignore_unsupported=bodies["ignore_unsupported"],
    )


def _run(job: "BatchJob") -> None:
    """Run the job and print '40 lines: 12 done before, 27 served, 1 failed · 1,290 tokens in 8.1 s'."""
    progress, start = job.progress, time.perf_counter()

    def summary() -> str:
        before = f"{progress.done_before:,} done before, " if progress.done_before else ""
        lines = f"{count(progress.lines, 'line')}: {before}{progress.served:,} served, {progress.failed:,} failed"
        return f"{lines} · {count(progress.tokens, 'token')} in {time.perf_counter() - start:.1f} s"

    try:
        asyncio.run(job.run())
    except KeyboardInterrupt:
        note(f"{summary()}; run the same command to resume")
        raise
    typer.echo(summary())
