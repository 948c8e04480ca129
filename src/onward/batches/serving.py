"""Lines of a batch through an engine."""

import asyncio
import hashlib
import json
from typing import Any, NamedTuple

import onward
from onward.engine import Engine, Generation
from onward.engine.fingerprint import bits_fingerprint
from onward.errors import EngineBusyError, EngineError, OnwardError, one_line
from onward.openai import AnswerKey, BatchLine, Body, BodyReader, answer_body
from onward.requests import Request


class Served(NamedTuple):
    """result: the line of the output. failed: whether it says why there is no answer. tokens: generated for it."""

    result: dict[str, Any]
    failed: bool
    tokens: int = 0


def fingerprint_of(reader: BodyReader) -> str:
    """A hash of all that a line's answer follows from beside the line: the model, what runs it, and the settings."""
    lm = reader.lm
    parts = {
        "version": onward.__version__,
        "bits": bits_fingerprint(lm.model),
        "adapters": {name: bits_fingerprint(lm.model, loaded) for name, loaded in lm.adapters.items()},
        "defaults": repr(lm.defaults),
        "name": reader.model,
        "options": reader.options,
        "variables": reader.variables,
    }
    content = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.blake2b(content.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


class LineServer:
    """Serves lines through an engine, never more at once than it takes. For one asyncio loop."""

    def __init__(self, engine: Engine, reader: BodyReader, fingerprint: str) -> None:
        self._engine, self._reader, self._fingerprint = engine, reader, fingerprint
        self._running: set[asyncio.Future[Any]] = set()

    async def begin(self, line: BatchLine) -> "asyncio.Future[Served]":
        """Submit a line's requests as soon as the engine takes them. What it gives back ends with what came of them.

        Raises:
            EngineError: the engine has failed; what is given back may raise it too.
        """
        id = line.id(self._fingerprint)
        if line.error is not None:
            return _known(Served(line.refused(id), True))
        generations: list[Generation] = []
        try:
            body = self._reader.read(line.url, line.body, AnswerKey.new(line.created), line.seed)
            for request in body.requests:
                generations.append(await self._submitted(request, generations))
        except Exception as error:
            for generation in generations:
                generation.cancel()
            return _known(_failure(line, id, error))
        task = asyncio.ensure_future(self._finish(line, id, body, generations))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _submitted(self, request: Request, earlier: list[Generation]) -> Generation:
        """earlier: those of the same line."""
        while True:
            try:
                return self._engine.submit(request)
            except EngineBusyError as error:
                if self._running:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                elif earlier:
                    await earlier[-1]
                else:
                    await asyncio.sleep(error.retry_after)

    async def _finish(self, line: BatchLine, id: str, body: Body, generations: list[Generation]) -> Served:
        tokenizer = self._reader.lm.tokenizer
        assert tokenizer is not None, "a batch needs one"
        try:
            completions = [await generation for generation in generations]
            answer = answer_body(body, completions, tokenizer, onward.__version__)
        except Exception as error:
            return _failure(line, id, error)
        return Served(line.served(id, answer), False, answer["usage"]["completion_tokens"])


def _failure(line: BatchLine, id: str, error: Exception) -> Served:
    """An engine that has failed ends more than the line; any other error is of the line alone, a defect too."""
    if isinstance(error, EngineError):
        raise error
    if not isinstance(error, OnwardError):
        error = OnwardError(f"the text could not be finished: {type(error).__name__}: {one_line(error)}")
    return Served(line.failed(id, error), True)


def _known(served: Served) -> "asyncio.Future[Served]":
    future: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
    future.set_result(served)
    return future
