"""`onward batch`: a file of requests in OpenAI's format in, a file of results out, through an engine."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, EngineFlags, ModelFlags, TemplateFlags
from onward.cli.help import LENGTH, MODEL
from onward.cli.loading import load_model
from onward.cli.prompt import expanded
from onward.cli.streaming import count
from onward.cli.template import template_variables
from onward.cli.terminal import Show, note, waiting
from onward.errors import EngineBusyError, EngineError, OnwardError, RequestError

if TYPE_CHECKING:
    from onward.engine import Engine, Generation
    from onward.openai import BatchInput, BatchLine, BatchOutput, Body, BodyReader
    from onward.requests import Request

_length, _model = (partial(typer.Option, rich_help_panel=group) for group in (LENGTH, MODEL))


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The requests, a line each.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where the results go, a line each.")],
    *,
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
    each as it ends, in any order. What is not served is refused, and no
    other line fails with it; the code is then 2.

    The same command again goes on where it was stopped: lines that OUT has
    a result of are not served again, those that failed are. A line's tokens
    are those that it has alone; its answer has the seed that it was drawn
    with.
    """
    with waiting("starting …"):
        from onward.openai import BatchInput, BatchOutput, BodyReader
        from onward.requests.request import needed_tokenizer
    requests = BatchInput(expanded(source))
    results = BatchOutput(expanded(destination), requests)
    lm = load_model(model, drafting, adapting)
    needed_tokenizer(lm.tokenizer, "a batch")
    options = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    lm.defaults.replace(**options)  # which checks them
    reader = BodyReader(lm, model_name or model.model, options, template_variables(template, lm, model.model))
    with results, onward.Engine(lm, **engine.limits()) as served_by:
        run = BatchRun(served_by, reader, results)
        try:
            with waiting(f"serving {count(requests.count, 'line')} …") as show:
                asyncio.run(run.serve(requests, show))
        except KeyboardInterrupt:
            note(f"{run.summary(requests.count)}; the same command goes on")
            raise
    typer.echo(run.summary(requests.count))
    if run.failed:
        at = f"{str(destination)!r} says why"
        raise RequestError(f"{run.failed} of {count(requests.count, 'line')} could not be served; {at}")


class BatchRun:
    """Lines on their way through an engine, never more than it takes. Everything but the engine is in one thread."""

    def __init__(self, engine: "Engine", reader: "BodyReader", results: "BatchOutput") -> None:
        self._engine, self._reader, self._results = engine, reader, results
        self._running: set[asyncio.Task[None]] = set()  # a task for each line
        self._failure: BaseException | None = None
        self._began = time.perf_counter()
        self.served = self.failed = self.tokens = 0
        self.done_before = len(results.done)

    def summary(self, lines: int) -> str:
        """Such as '40 lines: 12 done before, 27 served, 1 failed · 1,290 tokens in 8.1 s'."""
        before = f"{self.done_before:,} done before, " if self.done_before else ""
        seconds = time.perf_counter() - self._began
        parts = f"{count(lines, 'line')}: {before}{self.served:,} served, {self.failed:,} failed"
        return f"{parts} · {count(self.tokens, 'token')} in {seconds:.1f} s"

    async def serve(self, requests: "BatchInput", show: Show) -> None:
        """Serve all lines that are not done.

        Raises:
            OnwardError: the engine has failed, or a result cannot be written.
        """
        self._began = time.perf_counter()
        for line in requests.lines():
            if line.custom_id is None or line.custom_id not in self._results.done:
                await self._begin(line)
                await asyncio.sleep(0)  # let what has ended be written
                self._check()
                self._show(requests.count, show)
        while self._running:
            await self._one_ends()
            self._show(requests.count, show)

    async def _begin(self, line: "BatchLine") -> None:
        """Submit a line's requests, and leave it to a task to write what comes of them."""
        if line.error is not None:
            self._write(line.refused(), failed=True)
            return
        generations: list[Generation] = []
        try:
            body = self._reader.read(line.url, line.body)
            for request in body.requests:
                generations.append(await self._submitted(request, generations))
        except OnwardError as error:
            for generation in generations:
                generation.cancel()
            self._fail(line, error)
            return
        task = asyncio.create_task(self._finish(line, body, generations))
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def _submitted(self, request: "Request", earlier: "Sequence[Generation]") -> "Generation":
        """Submit a request as soon as the engine takes it. earlier: those of the same line."""
        while True:
            try:
                return self._engine.submit(request)
            except EngineBusyError as error:
                if self._running:
                    await self._one_ends()
                elif earlier:
                    await earlier[-1]
                else:
                    await asyncio.sleep(error.retry_after)

    async def _finish(self, line: "BatchLine", body: "Body", generations: "Iterable[Generation]") -> None:
        from onward.openai import answer_body

        tokenizer = self._reader.lm.tokenizer
        assert tokenizer is not None, "a batch needs one"
        try:
            completions = [await generation for generation in generations]
        except OnwardError as error:
            self._fail(line, error)
            return
        answer = answer_body(body, completions, tokenizer, onward.__version__)
        self.tokens += answer["usage"]["completion_tokens"]
        self._write(line.served(answer))

    def _fail(self, line: "BatchLine", error: OnwardError) -> None:
        """An engine that has failed ends the batch; any other error is of the line alone."""
        if isinstance(error, EngineError):
            raise error
        self._write(line.failed(error), failed=True)

    def _write(self, result: dict[str, Any], *, failed: bool = False) -> None:
        self._results.write(result)
        self.served += not failed
        self.failed += failed

    def _show(self, lines: int, show: Show) -> None:
        over = self.done_before + self.served + self.failed
        show(over / lines, f"{self.failed:,} failed" if self.failed else "")

    async def _one_ends(self) -> None:
        await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # its callback runs
        self._check()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
