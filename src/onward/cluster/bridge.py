"""An ASGI application called within its process, with all that it sends between two looks in one item."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from onward.cluster.call import Call, Item

# How often a replica says that it is well.
HEARTBEAT = 0.5
# Seconds in which what comes is gathered into one item, for an item costs as much as many tokens of a small model.
GATHER = 0.02
# Seconds that the application gets for its last words when nobody listens any more.
_LAST_WORDS = 5.0

App = Callable[[Any, Any, Any], Awaitable[None]]


async def served(
    app: App, call: Call, replica: str, fingerprint: str, heartbeat: float = HEARTBEAT, gather: float = GATHER
) -> AsyncGenerator[Item, None]:
    """Serve a call and yield its answer as it comes, and an item at least every `heartbeat` seconds.

    Items are `gather` seconds apart or more. Closing it is to the application as if the client had left.
    """
    messages: list[Any] = []
    changed, gone = asyncio.Event(), asyncio.Event()
    requests = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        changed.set()

    running = asyncio.ensure_future(app(_scope(call), receive, send))
    running.add_done_callback(lambda _: changed.set())
    since = -math.inf  # the last item
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat):
                    await changed.wait()
            if not running.done():
                await asyncio.sleep(since + gather - time.monotonic())
            changed.clear()
            since, over = time.monotonic(), running.done()
            new = tuple(messages)
            messages.clear()
            yield Item(replica, fingerprint, new)
            if over:
                running.result()
                return
    finally:
        gone.set()
        await asyncio.wait([running], timeout=_LAST_WORDS)
        running.cancel()


def _scope(call: Call) -> dict[str, Any]:
    begun: dict[str, Any] = {"answer": call.answer_key}
    if call.emitted is not None:
        begun["emitted"] = call.emitted
    if last := call.last_event_id or call.named_headers.get("last-event-id"):
        begun["last_event_id"] = last
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "root_path": "",
        "query_string": call.query,
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {},
        "onward": begun,
    }
