"""The number of files that a chat over HTTP passes through before the model runs, as a measure for readers."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import onward
from onward.models.run import Run
from onward.server import App, Settings, create_app

PACKAGE = Path(onward.__file__).parent
# Files of src/onward from a request's arrival to the model's forward, and those of the server among them.
MOST, MOST_OF_SERVER = 68, 9


class Trace:
    """The files of the package that are entered, in order, while `on`, until `Run.step` is called."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.on = self.is_complete = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        if frame.f_code is Run.step.__code__:
            self.on, self.is_complete = False, True
        elif (file := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            self.files[str(file.relative_to(PACKAGE))] = None


@contextmanager
def traced() -> Iterator[Trace]:
    """A trace of this thread and of those that start in the block."""
    trace = Trace()
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


async def chat(app: App, content: str) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "stream": True}
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "query_string": b""}
    scope |= {"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "root_path": ""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]}
    await asyncio.wait_for(app(scope, receive, send), 60)
    assert sent[0]["status"] == 200


def test_the_files_executed_by_a_chat_before_the_model(lm: onward.LanguageModel) -> None:
    with traced() as trace, onward.Engine(lm) as engine:
        app = create_app({"demo": engine}, Settings(access_log=False))

        async def chats() -> None:
            for content in ("Hi", "Hello"):  # fill caches, and import what is imported lazily
                await chat(app, content)
            while engine.stats().running or app.service.live:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the engine's thread waits
            trace.on = True
            await chat(app, "Good morning")

        asyncio.run(chats())
    assert trace.is_complete
    of_server = [file for file in trace.files if file.startswith("server/")]
    assert len(of_server) <= MOST_OF_SERVER, of_server
    assert len(trace.files) <= MOST, list(trace.files)
