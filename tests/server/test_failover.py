"""An ingress loses the replica that serves a stream, after any of its messages, and another replica continues."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from live_server import SECONDS
from test_stream_resumption import BODIES, PIECEWISE, RESPONSES, Frames, frames_of, joined, without_cached

import onward
from onward.cluster.call import ProxiedRequest, ReplicaLostError, Reply, RouteAttempt
from onward.cluster.channel import ReplyQueue, serve_into
from onward.cluster.ingress import Ingress, RetryOptions
from onward.server import App, Settings, create_app


class Replicas:
    """Two replicas in this process. lost: the number of replies after which the first one dies. replies: of it."""

    names = frozenset("ab")

    def __init__(self, one: App, other: App) -> None:
        self.apps = {"a": one, "b": other}
        self.lost: int | None = None
        self.replies = 0

    async def serve(self, call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        name = "b" if "a" in route.avoid else "a"
        route.assign(name)
        queue = ReplyQueue(name, "same", gather=0.0)
        serving = asyncio.ensure_future(serve_into(self.apps[name], call, 0, queue))
        batches, count = queue.batches(), 0
        try:
            async for reply in (reply async for batch in batches for reply in batch.items):
                if name == "a" and count == self.lost:
                    raise ReplicaLostError("died", died=True)
                count += 1
                self.replies = max(count, self.replies)
                yield reply
                if reply.is_last:
                    return
        finally:
            await batches.aclose()
            serving.cancel()


async def frames(ingress: Ingress, url: str, body: dict[str, Any], **headers: str) -> Frames:
    sent: list[Any] = []
    received = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode(), "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(b"content-type", b"application/json"), (b"idempotency-key", b"one")]
    pairs += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": url, "query_string": b"", "headers": pairs}
    await asyncio.wait_for(ingress(scope, receive, send), SECONDS)
    return Frames(frame for frame in frames_of(sent) if not frame.startswith(":"))


@pytest.mark.parametrize("body", BODIES)
def test_a_stream_continues_after_any_message(lm: onward.LanguageModel, body: str) -> None:
    url, asked = BODIES[body]
    settings = Settings(access_log=False)
    with onward.Engine(lm) as one, onward.Engine(lm) as other:
        replicas = Replicas(create_app({"demo": one}, settings), create_app({"demo": other}, settings))
        ingress: Any = Ingress(replicas, RetryOptions(quarantine=0.0), settings)  # type: ignore[arg-type]

        def check_same(got: Frames, expected: Frames) -> None:
            if url in PIECEWISE:
                assert without_cached(got) == without_cached(expected)
            else:
                assert joined(got.data) == joined(expected.data)

        async def lost() -> None:
            whole = await frames(ingress, url, asked)
            count = replicas.replies
            for replicas.lost in range(count):
                check_same(await frames(ingress, url, asked), whole)
            if not whole[0].startswith("id: "):
                return
            at = len(whole) // 2  # a client that resumes a stream doesn't notice either
            for replicas.lost in range(count):
                rest = await frames(ingress, url, asked, last_event_id=whole.id(at))
                check_same(Frames([*whole[: at + 1], *rest]), whole)

        asyncio.run(lost())


def test_a_turn_of_a_conversation_continues(lm: onward.LanguageModel, tmp_path: Path) -> None:
    """Replicas that share a store continue the same items, also after the turn is in the conversation."""
    settings = Settings(access_log=False, response_store=str(tmp_path / "responses.db"))
    item = {"id": "msg_1", "type": "message", "role": "user", "content": "A story."}
    asked = {"input": "Another.", "conversation": "conv_1", "max_output_tokens": 8, "seed": 3}
    with onward.Engine(lm) as one, onward.Engine(lm) as other:
        apps = [create_app({"demo": engine}, settings) for engine in (one, other)]
        store, second = (app.service.store for app in apps)
        assert store is not None
        assert second is not None
        store.create("", {"id": "conv_1"}, [item])
        replicas = Replicas(*apps)
        ingress: Any = Ingress(replicas, RetryOptions(quarantine=0.0), settings)  # type: ignore[arg-type]

        async def lost() -> None:
            whole = await frames(ingress, RESPONSES, asked)
            count = replicas.replies
            for replicas.lost in range(count):
                assert without_cached(await frames(ingress, RESPONSES, asked)) == without_cached(whole)
            response = whole.data[-1]["response"]
            assert second.get("", response["id"]) == response
            assert [each["id"] for each in second.context("", "conv_1")][2:] == [response["output"][0]["id"]]

        asyncio.run(lost())
        for each in (store, second):
            each.close()


def test_a_deployment_refuses_background_responses(lm: onward.LanguageModel) -> None:
    sent: list[Any] = []
    received = [{"type": "http.request", "body": b'{"input": "x", "background": true}', "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    with onward.Engine(lm) as engine:
        app = create_app({"demo": engine}, Settings(access_log=False))
        ingress: Any = Ingress(Replicas(app, app), RetryOptions())  # type: ignore[arg-type]
        scope = {"type": "http", "method": "POST", "path": RESPONSES, "query_string": b""}
        scope["headers"] = [(b"content-type", b"application/json")]
        asyncio.run(asyncio.wait_for(ingress(scope, receive, send), SECONDS))
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["param"] == "background"
