"""From a body to an answer: what the endpoints that generate have in common."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from onward.completion import Completion
from onward.errors import OnwardError
from onward.openai import AnswerKey, Body
from onward.server.client import Client, read_body
from onward.server.gate import access_of
from onward.server.handover import Handover
from onward.server.json_answer import rendered
from onward.server.models import ServedModel
from onward.server.service import Service
from onward.server.settings import Settings
from onward.server.sse import EventStream, Streams
from onward.server.submission import Submission
from onward.server.told import Events

# A body as it came, and the key of its answer, to what it asks for.
Read = Callable[[bytes, AnswerKey], tuple[ServedModel, Body]]
# Makes the events of a stream, and the whole answer.
MakeEvents = Callable[[Submission], Events]
MakeAnswer = Callable[[Submission, Sequence[Completion]], dict[str, Any]]


async def answer(
    service: Service, streams: Streams, request: Request, read: Read, events: MakeEvents, whole: MakeAnswer
) -> Response:
    """Read a body, have its requests served, and answer: in one piece, or with a stream.

    Raises:
        OnwardError: what is wrong with the body, or with the engine.
    """
    access = access_of(request.scope)
    handover = Handover.of(request.scope)
    try:
        raw = await read_logged(request, service.settings)
    except ClientDisconnect:
        return _nobody()
    client = Client(request.receive)
    try:
        recipient = await service.submit(client, partial(read, raw), handover)
    except BaseException:
        client.close()
        raise

    submission = recipient.submission

    def ended() -> None:
        client.close()
        service.ended(recipient)
        access.fields |= submission.facts()

    if submission.body.stream:
        try:
            return EventStream(recipient, events(submission), client, streams, ended)
        except BaseException:  # nobody would call it later
            ended()
            raise
    try:
        completions = await submission.completions()
        content = await service.in_thread(lambda: rendered(whole(submission, completions)))
        return Response(content, media_type="application/json")
    except OnwardError:
        if client.gone:
            return _nobody()
        raise
    finally:
        ended()


async def read_logged(request: Request, settings: Settings) -> bytes:
    """A request's body, which --log-prompts writes into the request's line of the log."""
    raw = await read_body(request, settings)
    if settings.log_prompts:
        access_of(request.scope).fields["body"] = raw.decode("utf-8", "replace")
    return raw


def _nobody() -> Response:
    """The answer to a client that has left. Only the log sees its status, which is nginx's."""
    return Response(status_code=499)
