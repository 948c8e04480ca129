"""What the endpoints share: the models, and requests on their way through an engine."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from onward.completion import Completion
from onward.engine import Engine, Generation
from onward.errors import EngineError, one_line
from onward.openai import Body, BodyError
from onward.server.bounds import check_bounds
from onward.server.client import Client
from onward.server.metrics import Metrics
from onward.server.models import ServedModel, ServedModels
from onward.server.settings import Settings

_Result = TypeVar("_Result")

# Threads that read bodies: JSON, templates, tokenizers. The last release the interpreter's lock.
_READERS = 4


class Submission:
    """The requests of one body while engines serve them."""

    def __init__(self, served: ServedModel, body: Body, generations: Sequence[Generation]) -> None:
        self.served, self.body, self.generations = served, body, generations

    def cancel(self) -> None:
        """End all of them with their next step."""
        for generation in self.generations:
            generation.cancel()

    def completion(self, at: int) -> Completion:
        """Of the request numbered `at`, which has ended.

        Raises:
            OnwardError: what made it fail, or that the server ends.
        """
        completion = self.generations[at].result(0)
        if completion.finish_reason == "cancelled":
            raise EngineError("the server shuts down, and the text was not finished")
        return completion

    def ended(self) -> list[Completion | None]:
        """The completions of its requests; None for one that has failed or goes on."""
        return [_completion_of(generation) for generation in self.generations]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        completions = [completion for completion in self.ended() if completion is not None]
        texts = [text for completion in completions for text in completion.choices]
        facts: dict[str, Any] = {"model": self.body.model, "stream": self.body.stream}
        facts["prompt_tokens"] = sum(completion.prompt_tokens for completion in completions)
        facts["completion_tokens"] = sum(len(text.token_ids) for text in texts)
        ends = {str(text.finish_reason) for text in texts}
        if len(completions) < len(self.generations):
            ends.add("error" if all(generation.done for generation in self.generations) else "cancelled")
        facts["finish"] = sorted(ends)
        return facts

    async def completions(self) -> list[Completion]:
        """Wait for all of them. Where one fails the others are cancelled.

        Raises:
            OnwardError: as `completion`.
        """
        for generation in self.generations:
            try:
                await generation
            except Exception:
                self.cancel()
                raise
        return [self.completion(at) for at in range(len(self.generations))]


def _completion_of(generation: Generation) -> Completion | None:
    try:
        return generation.result(0) if generation.done else None
    except Exception:  # whatever made it fail; who waits for it is told
        return None


class Service:
    """A server's models, settings and counts.

    draining: it takes no more requests. ending: those that it has are cancelled. live: what engines serve.
    """

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        self.settings = settings
        self.models = ServedModels(engines, settings)
        self.draining = self.ending = False
        self.live: set[Submission] = set()
        self.metrics = Metrics(self.models, self._running)
        self._pool = ThreadPoolExecutor(_READERS, "onward-reader")

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run what takes long beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def submit(self, client: Client, read: Callable[[], tuple[ServedModel, Body]]) -> Submission:
        """Read a body beside the loop, and submit its requests. They are cancelled when the client leaves.

        Raises:
            OnwardError: what is wrong with the body, or that the engine takes no more.
        """
        submission = await self.in_thread(self._submitted, read)
        self.live.add(submission)
        client.on_leave(submission.cancel)
        if self.ending:  # since the body came
            submission.cancel()
        return submission

    def end(self) -> None:
        """Cancel all that goes on."""
        self.ending = True
        for submission in self.live:
            submission.cancel()

    def _submitted(self, read: Callable[[], tuple[ServedModel, Body]]) -> Submission:
        served, body = read()
        body = body.seeded()
        check_bounds(body, self.settings)
        submission = Submission(served, body, generations := [])
        try:
            for request in body.requests:
                generations.append(served.engine.submit(request))
        except BaseException:
            submission.cancel()
            raise
        return submission

    def _running(self) -> Iterator[tuple[str, Generation]]:
        """The requests that engines serve now, each with its model's name."""
        for submission in self.live:
            for generation in submission.generations:
                yield submission.served.name, generation

    def ended(self, submission: Submission) -> None:
        """A submission has been answered, or nobody waits for it any more. What of it goes on is cancelled."""
        self.live.discard(submission)
        submission.cancel()
        now, counted = time.monotonic(), self.metrics.of(submission.served.name)
        for generation, completion in zip(submission.generations, submission.ended(), strict=True):
            counted.note(generation, completion, now)

    def close(self) -> None:
        """End the threads that read bodies."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def parsed(raw: bytes) -> dict[str, Any]:
    """The fields of a body.

    Raises:
        BodyError: it is no JSON object.
    """
    try:
        fields = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise BodyError("the body's JSON is nested too deep", code="invalid_json") from None
    except json.JSONDecodeError as error:
        message = f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise BodyError(message, code="invalid_json") from None
    except ValueError as error:
        raise BodyError(f"the body is no JSON: {one_line(error)[:200]}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise BodyError(f"a body must be a JSON object; got {type(fields).__name__}", code="invalid_type")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
