"""`onward batch`: a file of requests in OpenAI's format in, a file of results out, by an engine or over replicas."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, EngineFlags, ModelFlags, TemplateFlags
from onward.cli.help import LENGTH, MODEL
from onward.cli.loading import find, load_model
from onward.cli.machine import usable_cores
from onward.cli.prompt import expanded
from onward.cli.streaming import count
from onward.cli.template import template_variables
from onward.cli.terminal import Show, note, waiting
from onward.errors import RequestError

if TYPE_CHECKING:
    from onward.batches import LineServer, Progress
    from onward.batches.job import Replica
    from onward.batches.results import BatchResults
    from onward.batches.serving import Served
    from onward.openai import BatchInput, BatchOutput, BodyReader

_length, _model = (partial(typer.Option, rich_help_panel=group) for group in (LENGTH, MODEL))


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The requests, a line each.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where the results go, a line each.")],
    *,
    replicas: Annotated[
        int | None, typer.Option("--replicas", metavar="N", help="Serve over N replicas, on Ray: onward[cluster].")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", metavar="HOST:PORT", help="Of a Ray cluster; else this machine alone.")
    ] = None,
    engine: EngineFlags,
    max_new_tokens: Annotated[
        int | None,
        _length("--max-new-tokens", "-n", metavar="N", help="Of lines without max_tokens; else the model's own."),
    ] = None,
    model_name: Annotated[
        str | None, _model("--model-name", metavar="NAME", help="What lines call the model; else SOURCE of --model.")
    ] = None,
    template: TemplateFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve a batch of requests in OpenAI's format, many at once.

    A line of IN is {"custom_id": …, "method": "POST", "url": …, "body": …};
    the url is /v1/chat/completions or /v1/completions. OUT gets a line for
    each, in the end in the order of IN. What is not served is refused, and
    no other line fails with it; the code is then 2.

    The same command again goes on where it was stopped: lines that OUT has
    a result of are not served again, those that failed are. A line's tokens
    are those that it has alone; without a seed, its custom_id gives one.

    With --replicas IN and OUT may be folders of .jsonl or .parquet files,
    and OUT is written when all is served.
    """
    with waiting("starting …"):
        from onward.openai import BatchInput, BatchOutput
    source, destination = expanded(source), expanded(destination)
    if replicas is None:
        if address is not None:
            raise RequestError("--address is of a cluster: give --replicas, too")
        if source.is_dir():
            raise RequestError(f"{str(source)!r} is a folder: it is served with --replicas")
    elif replicas < 1:
        raise RequestError(f"--replicas must be 1 or more; got {replicas}")
    else:
        model = _for_replicas(model, replicas, address)
    requests, limits = BatchInput(source), engine.limits()
    reader = partial(_reader, model, drafting, adapting, template, model_name, max_new_tokens)
    if replicas is None:
        progress = _serve_here(requests, BatchOutput(destination, requests), reader(), limits)
    else:
        from onward.batches.replicas import RayReplica
        from onward.batches.results import BatchResults
        from onward.cluster.ray_session import connected

        with BatchResults(destination, requests) as results, connected(address, replicas):
            progress = _serve_over_replicas(requests, results, partial(RayReplica, reader, limits), replicas)
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
    from onward.openai import BodyReader
    from onward.requests.request import needed_tokenizer

    lm = load_model(model, drafting, adapting)
    needed_tokenizer(lm.tokenizer, "a batch")
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    lm.defaults.replace(**options)  # which checks them
    return BodyReader(lm, model_name or model.model, options, template_variables(template, lm, model.model))


def _serve_here(
    requests: "BatchInput", results: "BatchOutput", reader: "BodyReader", limits: dict[str, Any]
) -> "Progress":
    from onward.batches import LineServer, fingerprint_of

    fingerprint = fingerprint_of(reader)
    with onward.Engine(reader.lm, **limits) as engine:
        results.drop_changed(fingerprint)
        with results:
            run = BatchRun(LineServer(engine, reader, fingerprint), requests, results)
            with _said(run.progress), waiting(f"serving {count(requests.count, 'line')} …") as show:
                asyncio.run(run.serve(show))
    results.sort()
    return run.progress


def _serve_over_replicas(
    requests: "BatchInput", results: "BatchResults", start: "Callable[[], Replica]", replicas: int
) -> "Progress":
    from onward.batches import BatchJob

    what = f"serving {count(requests.count, 'line')} over {count(replicas, 'replica')} …"
    with waiting(what) as show:
        job = BatchJob(requests, results, start, replicas, partial(_show, show))
        with _said(job.progress):
            asyncio.run(job.run())
    return job.progress


def _for_replicas(model: ModelFlags, replicas: int, address: str | None) -> ModelFlags:
    """The model's files are fetched before replicas ask for them; on one machine they share its cores."""
    find(model.model)
    if model.threads is not None or address is not None:
        return model
    return dataclasses.replace(model, threads=max(1, usable_cores() // replicas))


@contextmanager
def _said(progress: "Progress") -> Iterator[None]:
    """When the block ends, a line: '40 lines: 12 done before, 27 served, 1 failed · 1,290 tokens in 8.1 s'."""
    began = time.perf_counter()

    def summary() -> str:
        before = f"{progress.done_before:,} done before, " if progress.done_before else ""
        parts = f"{count(progress.lines, 'line')}: {before}{progress.served:,} served, {progress.failed:,} failed"
        return f"{parts} · {count(progress.tokens, 'token')} in {time.perf_counter() - began:.1f} s"

    try:
        yield
    except KeyboardInterrupt:
        note(f"{summary()}; the same command goes on")
        raise
    typer.echo(summary())


def _show(show: Show, progress: "Progress") -> None:
    show(progress.over / progress.lines, f"{progress.failed:,} failed" if progress.failed else "")


class BatchRun:
    """Lines on their way through an engine of this process. Everything but the engine is in one thread."""

    def __init__(self, server: "LineServer", requests: "BatchInput", results: "BatchOutput") -> None:
        from onward.batches import Progress

        self._server, self._requests, self._results = server, requests, results
        self._running: set[asyncio.Future[Served]] = set()
        self.progress = Progress(requests.count, done_before=len(results.done))

    async def serve(self, show: Show) -> None:
        """Serve all lines that are not done.

        Raises:
            OnwardError: the engine has failed, or a result cannot be written.
        """
        for line in self._requests.lines():
            if line.custom_id is None or line.custom_id not in self._results.done:
                self._running.add(await self._server.begin(line))
                await asyncio.sleep(0)  # let what has ended be written
                self._write_ended()
                _show(show, self.progress)
        while self._running:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            self._write_ended()
            _show(show, self.progress)

    def _write_ended(self) -> None:
        ended = [served for served in self._running if served.done()]
        self._running.difference_update(ended)
        for answer in ended:
            served = answer.result()
            self._results.write(served.result)
            self.progress.took(served)
