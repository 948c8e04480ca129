"""An answer that fails leaves nothing running, whichever part of it failed."""

import asyncio
import contextlib
import json
import threading

import pytest

from onward import LanguageModel
from onward.chat import ChatTemplate
from onward.engine import Engine
from onward.protocols import PROTOCOLS
from onward.protocols.choices import ChunkEvents
from onward.protocols.messages_events import MessageEventStream
from onward.protocols.responses_events import ResponseEventStream
from onward.server import Settings, create_app
from onward.server.resume import EventWriter
from onward.testing import ByteTokenizer, tiny_model

SECONDS = 60
URLS = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 150},
    "/v1/responses": {"input": "Once", "max_output_tokens": 150},
    "/v1/messages": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 150},
}


async def ask(app, url, body):
    """Call the application as a server of such does. Returns the status and the text of the answer."""
    raw = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    coming = [{"type": "http.request", "body": raw, "more_body": False}]
    sent = []

    async def receive():
        if not coming:
            await asyncio.Event().wait()  # the client stays
        return coming.pop()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": url, "raw_path": b""}
    scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    with contextlib.suppress(MineError):  # after the headers a server can only close the connection
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


class MineError(Exception):
    pass


def fails(*arguments, **options):
    raise MineError


@pytest.fixture
def engine():
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    lm = LanguageModel(tiny_model(seed=3), ByteTokenizer(), chat_template=template, prefix_memory=0)
    with Engine(lm) as engine:
        yield engine


async def idle(app, engine):
    """Wait until the engine is idle. The texts are long, so only cancelled ones end this soon."""
    while engine.stats().running or engine.stats().waiting:
        await asyncio.sleep(0.001)
    assert not app.service.live
    assert not app.gate.in_flight


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("broken", ["events", "writer", "begin", "whole"])
def test_a_failed_answer_leaves_nothing_running(engine, monkeypatch, url, broken):
    protocol = PROTOCOLS[url]
    events = {"/v1/completions": ChunkEvents, "/v1/responses": ResponseEventStream}.get(url, MessageEventStream)
    if broken == "events":
        monkeypatch.setattr(type(protocol), "events", fails)
    elif broken == "writer":
        monkeypatch.setattr(EventWriter, "__init__", fails)
    elif broken == "begin":
        monkeypatch.setattr(events, "begin", fails)
    else:
        monkeypatch.setattr(type(protocol), "answer", fails)
    app = create_app({"tiny": engine}, Settings())

    async def asked():
        answer = await ask(app, url, {"stream": broken != "whole", **URLS[url]})
        await asyncio.wait_for(idle(app, engine), SECONDS)
        return answer

    status, text = asyncio.run(asked())
    assert (status, broken) in {(500, "events"), (500, "writer"), (500, "whole"), (200, "begin")}
    assert "[DONE]" not in text
    assert "message_stop" not in text


def test_a_submission_for_a_cancelled_request_is_cancelled(engine, monkeypatch):
    """The submitting thread waits before the engine while the requesting task is cancelled."""
    app = create_app({"tiny": engine}, Settings())
    blocked, resume = threading.Event(), threading.Event()
    submit, submitted = engine.submit, []

    def waits(*arguments, **options):
        blocked.set()
        assert resume.wait(SECONDS)
        submitted.append(submit(*arguments, **options))
        return submitted[-1]

    monkeypatch.setattr(engine, "submit", waits)

    async def cancelled():
        asking = asyncio.create_task(ask(app, "/v1/completions", URLS["/v1/completions"]))
        await asyncio.to_thread(blocked.wait, SECONDS)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        resume.set()
        while not submitted:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(idle(app, engine), SECONDS)

    asyncio.run(cancelled())
    assert submitted[0].result(SECONDS).finish_reason == "cancelled"
