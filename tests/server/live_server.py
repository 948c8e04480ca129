"""A server in this process, and ways to talk to it."""

import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import httpx2
import openai

import onward
from onward.server import App, OnDemand, Settings, create_app
from onward.server.lifecycle import Server, address_of, bound, config_of

SECONDS = 60
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
# No connection uses TLS. Otherwise each request would read the machine's certificates for 30 ms.
PLAIN: dict[str, Any] = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "timeout": SECONDS}


class LiveServer:
    """An application behind uvicorn, in a thread of its own. Its engines are closed and checked at the end."""

    def __init__(
        self,
        models: Mapping[str, onward.LanguageModel],
        engine: Mapping[str, Any] | None = None,
        port: int = 0,
        on_demand: OnDemand | None = None,
        tracer_provider: Any = None,
        **settings: Any,
    ) -> None:
        self.engines = {name: onward.Engine(lm, **(engine or {})) for name, lm in models.items()}
        chosen = Settings(**{"access_log": False} | settings)
        self.app: App = create_app(self.engines, chosen, on_demand=on_demand, tracer_provider=tracer_provider)
        self.listener = bound("127.0.0.1", port)
        self.url = address_of(self.listener)
        self.port = self.listener.getsockname()[1]
        self.uvicorn = Server(config_of(self.app))
        self._thread = threading.Thread(target=self.uvicorn.run, args=([self.listener],), name="server")

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + SECONDS
        while not self.uvicorn.started:
            assert time.monotonic() < deadline
            assert self._thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.uvicorn.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.listener.close()
        for engine in self.engines.values():
            engine.close(drain=False)
            check_idle(engine)

    def wait_idle(self) -> None:
        """Wait until nothing runs; the books are then in order."""
        deadline = time.monotonic() + SECONDS
        while (
            self.app.gate.in_flight or self.app.service.live or any(_busy(engine) for engine in self.engines.values())
        ):
            assert time.monotonic() < deadline, "something runs on"
            time.sleep(0.005)
        for engine in self.engines.values():
            check_idle(engine)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, **PLAIN | options)

    def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        return httpx2.request(method, f"{self.url}{path}", json=body, **PLAIN)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", **PLAIN | options)

    def stream(self, path: str, body: Mapping[str, Any]) -> "Stream":
        """All of a stream."""
        with httpx2.stream("POST", f"{self.url}{path}", json={"stream": True, **body}, **PLAIN) as response:
            return Stream(response.status_code, dict(response.headers), response.read().decode())

    @contextmanager
    def openai(self, key: str = "none", *, strict: bool = True) -> Iterator[openai.OpenAI]:
        """OpenAI's own client. strict: it checks each answer against its types."""
        url = f"{self.url}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=strict) as client:
            yield client


class Stream:
    """The contents of a stream. events: the data of each; comments: their number."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.status, self.headers, self.text = status, headers, text
        frames = [frame for frame in text.split("\n\n") if frame]
        self.comments = sum(frame.startswith(":") for frame in frames)
        frames = [frame for frame in frames if not frame.startswith(":")]
        self.events = [next(line[6:] for line in frame.split("\n") if line.startswith("data: ")) for frame in frames]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                yield choice


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The sum of the chunks of one choice."""
    parts = [
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in deltas(chunks, index)
    ]
    return "".join(parts)


def _busy(engine: onward.Engine) -> bool:
    stats = engine.stats()
    return bool(stats.waiting or stats.running or stats.blocks_used)


def check_idle(engine: onward.Engine) -> None:
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.sequences, stats.blocks_used) == (0, 0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks
