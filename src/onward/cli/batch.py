"""`onward batch`: requests in OpenAI's format in, results out, through an engine or over replicas."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onward
from onward.cli.flags import LENGTH, MODEL, AdapterFlags, DraftFlags, EngineFlags, ModelFlags, TemplateFlags, flag
from onward.cli.info import usable_cores
from onward.cli.inputs import expanded
from onward.cli.loading import find, load_model, template_variables
from onward.cli.terminal import count, note, waiting
from onward.errors import RequestError

if TYPE_CHECKING:
    from onward.batches import Progress, Replica
    from onward.protocols import BodyReader

# The fewest lines that an engine has to choose from at a time, beside as many that are on their way.
_FEWEST = 32


def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="The requests: a .jsonl or .parquet file, or a folder of them.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="OUT", help="Where the results go: a file or a folder, as IN is.")
    ],
    *,
    replicas: int | None = flag("Serve over N replicas, on Ray: onward[cluster]."),
    address: str | None = flag("A Ray cluster; else this machine alone.", metavar="HOST:PORT"),
    engine: EngineFlags,
    max_new_tokens: int | None = flag("Of lines without max_tokens; else the model's own.", "-n", group=LENGTH),
    model_name: str | None = flag("Name of the model in lines; else that of --model.", group=MODEL, metavar="NAME"),
    template: TemplateFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve a batch of requests in OpenAI's format, many at once.

    A line of IN is {"custom_id": …, "method": "POST", "url": …, "body": …};
    the url is /v1/chat/completions or /v1/completions. OUT gets a result for
    each, in the order of IN, once all are served. What is not served is
    refused, and no other line fails with it; the code is then 2.

    Results gather in OUT.parts. The same command again goes on where it was
    stopped: lines that have a result are not served again, those that failed
    are. A line's tokens are those that it has alone; without a seed, its
    custom_id gives one.
    """
    with waiting("starting …"):
        from onward.batches import BatchInput, BatchJob, BatchResults, EngineReplica
    source, destination = expanded(source), expanded(destination)
    if replicas is None and address is not None:
        raise RequestError("--address is of a cluster: give --replicas, too")
    if replicas is not None and replicas < 1:
        raise RequestError(f"--replicas must be 1 or more; got {replicas}")
    requests, limits = BatchInput(source), engine.limits()
    most = max(_FEWEST, limits.get("max_sequences", _FEWEST))

    def serve(start: "Callable[[], Replica]", **amounts: int) -> "Progress":
        over = "" if replicas is None else f" over {count(replicas, 'replica')}"
        with waiting(f"serving {count(requests.count, 'line')}{over} …") as show:

            def show_progress(now: "Progress") -> None:
                show(now.over / now.lines, f"{now.failed:,} failed" if now.failed else "")

            job = BatchJob(requests, results, start, replicas or 1, show=show_progress, **amounts)
            _run(job.run, job.progress)
        return job.progress

    with BatchResults(destination, requests) as results:
        if replicas is None:
            reader = _reader(model, drafting, adapting, template, model_name, max_new_tokens)
            with onward.Engine(reader.lm, **limits) as here:
                replica = EngineReplica(here, reader)
                progress = serve(lambda: replica, chunk=1, ahead=3 * most)
        else:
            from onward.batches.ray import RayReplica
            from onward.cluster.ray_session import connected

            find(model.model)  # before replicas ask for it
            if model.threads is None and address is None:
                model = dataclasses.replace(model, threads=max(1, usable_cores() // replicas))
            make = partial(_reader, model, drafting, adapting, template, model_name, max_new_tokens)
            with connected(address, replicas):
                progress = serve(partial(RayReplica, make, limits), chunk=most)
    if progress.failed:
        at = f"{str(destination)!r} says why"
        raise RequestError(f"{progress.failed} of {count(requests.count, 'line')} could not be served; {at}")


def _reader(
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
    template: TemplateFlags,
    model_name: str | None,
    max_new_tokens: int | None,
) -> "BodyReader":
    """Load the model, here or in a replica."""
    from onward.language_model.request import needed_tokenizer
    from onward.protocols import BodyReader

    lm = load_model(model, drafting, adapting)
    needed_tokenizer(lm.tokenizer, "a batch")
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    lm.defaults.replace(**options)  # which checks them
    return BodyReader(lm, model_name or model.model, options, template_variables(template, lm, model.model))


def _run(run: Callable[[], Any], progress: "Progress") -> None:
    """Run the job, and print a line: '40 lines: 12 done before, 27 served, 1 failed · 1,290 tokens in 8.1 s'."""
    began = time.perf_counter()

    def summary() -> str:
        before = f"{progress.done_before:,} done before, " if progress.done_before else ""
        parts = f"{count(progress.lines, 'line')}: {before}{progress.served:,} served, {progress.failed:,} failed"
        return f"{parts} · {count(progress.tokens, 'token')} in {time.perf_counter() - began:.1f} s"

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        note(f"{summary()}; the same command goes on")
        raise
    typer.echo(summary())
