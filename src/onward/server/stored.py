"""Stored items for a body's reader, and responses that are generated in the background."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from onward.errors import OnwardError
from onward.protocols import ParsedBody
from onward.protocols.protocol import Item
from onward.protocols.response_items import with_ids
from onward.server.errors import DEFECT
from onward.server.log import log_defect
from onward.server.response_store import BASE, ResponseStore, ResponseStoreError
from onward.server.submission import ActiveRequest


@dataclass(frozen=True)
class OwnedItems:
    """The stored items of one owner, for a body. response: the id of its response; None if nothing is generated. limit:
    maximum characters of the items before it."""

    store: ResponseStore
    owner: str
    response: str | None
    limit: int

    def before(self, previous: str | None, conversation: str | None) -> list[Item]:
        if previous is not None:
            return self.store.context(self.owner, previous, "previous_response_id", limit=self.limit)
        assert conversation is not None, "one of them is given"
        if self.response is None:
            return self.store.context(self.owner, conversation, "conversation", limit=self.limit)
        self.store.begin(self.owner, self.response, conversation)
        return self.store.context(self.owner, self.response, "conversation", through=BASE, limit=self.limit)

    def item(self, id: str, param: str) -> Item:
        return self.store.item(self.owner, id, param)


def put(store: ResponseStore, owner: str, body: ParsedBody, response: dict[str, Any], *, is_final: bool = True) -> None:
    """Store the response to a body. If that fails, the log says so: the client still gets the response."""
    assert body.storage is not None, "the response is to be stored"
    items = with_ids(body.storage.items, body.key)
    try:
        store.put(owner, response, items, body.storage.base, is_final=is_final)
    except ResponseStoreError as error:
        log_defect(error, id=response["id"])


class _Job(NamedTuple):
    """A response in the background. is_stored: whether it is in the store yet. task: that generates it."""

    active: ActiveRequest
    is_stored: asyncio.Event
    task: asyncio.Task[None]


class BackgroundResponses:
    """Responses that are generated in the background. They belong to no client, and end with the server.

    finish: called with a request that has ended. running: by id.
    """

    def __init__(self, store: ResponseStore, finish: Callable[[ActiveRequest, object], None]) -> None:
        self._store, self._finish = store, finish
        self.running: dict[str, _Job] = {}
        self._cancelled: set[str] = set()

    async def start(self, active: ActiveRequest, owner: str) -> dict[str, Any]:
        """Continue a submitted request without its client. Returns the queued response."""
        events: Any = active.body.protocol.events(active.body)
        queued: dict[str, Any] = events.response("queued")
        if queued["id"] not in self.running:  # else the request was repeated with its Idempotency-Key
            active.subscribers.add(self)
            is_stored = asyncio.Event()
            task = asyncio.create_task(self._run(active, owner, events, queued, is_stored))
            self.running[queued["id"]] = _Job(active, is_stored, task)
        await self.running[queued["id"]].is_stored.wait()
        return queued

    async def cancel(self, id: str) -> None:
        """Cancel a response, and wait until it is stored as cancelled. One that has ended does not change."""
        if id in self.running:
            self._cancelled.add(id)
            self.running[id].active.cancel()
            await asyncio.shield(self.running[id].task)

    def current(self, response: dict[str, Any]) -> dict[str, Any]:
        """A stored response in its current state."""
        if response["status"] not in ("queued", "in_progress"):
            return response
        if response["id"] not in self.running:
            error = {"code": "server_error", "message": "the server stopped before the response was complete"}
            return response | {"status": "failed", "error": error}
        has_begun = any(generation.tokens for generation in self.running[response["id"]].active.generations)
        return response | {"status": "in_progress" if has_begun else "queued"}

    async def _run(
        self, active: ActiveRequest, owner: str, events: Any, queued: dict[str, Any], is_stored: asyncio.Event
    ) -> None:
        id = queued["id"]
        try:
            await asyncio.to_thread(put, self._store, owner, active.body, queued, is_final=False)
            is_stored.set()
            try:
                (completion,) = await active.completions()
                response = events.whole(completion)
            except Exception as error:
                shown = error if isinstance(error, OnwardError) else OnwardError(DEFECT)
                response = events.response("cancelled") if id in self._cancelled else events.failure(shown)
                if shown is not error:
                    log_defect(error, id=id)
            await asyncio.to_thread(put, self._store, owner, active.body, response)
        finally:
            is_stored.set()
            self._cancelled.discard(id)
            del self.running[id]
            self._finish(active, self)
