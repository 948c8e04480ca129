"""The endpoints of stored responses and conversations."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from onward.protocols import BodyError, ParsedBody, ResponseKey
from onward.protocols.body import AtMost, Body, Validation, validated
from onward.protocols.protocol import Item
from onward.protocols.response_items import NEEDS_STORE, Metadata, messages_of, with_ids
from onward.protocols.responses import ResponseBody, Responses
from onward.protocols.responses_events import Response as ResponseObject
from onward.server.client import Client, owner_of
from onward.server.errors import CompactJSONResponse
from onward.server.generate import BodyRoute, errors, read_logged
from onward.server.response_store import CONVERSATION, INPUT, RESPONSE, ResponseStore, not_found
from onward.server.resume import ResumeRequest
from onward.server.served import ServedModel
from onward.server.service import Service, parsed

_Result = TypeVar("_Result")
Items = Annotated[list[dict[str, Any]], AtMost("messages", "items")]


class ConversationBody(Body):
    """A body of /v1/conversations."""

    items: Items | None = None
    metadata: Metadata = None


class ConversationChange(Body):
    """A body that changes a conversation. metadata: null removes it."""

    metadata: Metadata = None


class ItemsBody(Body):
    """A body with items for a conversation."""

    items: Annotated[Items, Field(min_length=1)]


class Conversation(BaseModel):
    """A conversation: items that responses continue and are added to."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ItemList(BaseModel):
    """A page of items. first_id, last_id: empty if there are none."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(BaseModel):
    """What was deleted."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class TokenCount(BaseModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


_READ, _WRITE = errors(400, 404, 503), errors(400, 404, 408, 413, 415, 422, 500, 503)
_MAX_PAGE = 100
_PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": 20}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The last item of the page before."},
]
# What to do with the store, for an owner.
_Use = Callable[[ResponseStore, str], _Result]


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    _add_responses(routes, service)
    _add_conversations(routes, service)
    return routes


async def _use(service: Service, request: Request, kind: str, function: _Use[_Result]) -> _Result:
    """Use the store in a thread. kind: the beginning of the id in the path. Raises `BodyError`."""
    if service.store is None:
        raise BodyError(f"this {NEEDS_STORE}", code="not_stored", status=404)
    if not (id := request.path_params.get("id", kind)).startswith(kind):
        raise not_found(id)
    client = request.scope["onward.client"]
    return await service.run(client, partial(function, service.store, owner_of(client)))


def _add_responses(routes: APIRouter, service: Service) -> None:
    use = partial(_use, service)
    bodies = APIRouter(route_class=BodyRoute)

    async def current(request: Request, id: str) -> dict[str, Any]:
        response = await use(request, RESPONSE, lambda store, owner: store.get(owner, id))
        return response if service.background is None else service.background.current(response)

    @routes.get("/responses/{id}", summary="Retrieve a response.", response_model=ResponseObject, responses=_READ)
    async def retrieve(request: Request, id: str) -> Response:
        for name in ("stream", "starting_after"):
            if request.query_params.get(name, "false") != "false":
                raise BodyError(f"{name} is not supported for stored responses: remove it", name, "unsupported_value")
        return CompactJSONResponse(await current(request, id))

    @routes.post(
        "/responses/{id}/cancel",
        summary="Cancel a response that is generated in the background.",
        response_model=ResponseObject,
        responses=_READ,
    )
    async def cancel(request: Request, id: str) -> Response:
        response = await current(request, id)
        if not response["background"]:
            message = f"only responses with background: true can be cancelled, and {id!r} has none: disconnect instead"
            raise BodyError(message, code="not_in_background")
        if service.background is not None:
            await service.background.cancel(id)
        return CompactJSONResponse(await current(request, id))

    @routes.delete("/responses/{id}", summary="Delete a response.", response_model=Deleted, responses=_READ)
    async def delete(request: Request, id: str) -> Response:
        await current(request, id)  # checks its owner
        if service.background is not None:
            await service.background.cancel(id)
        await use(request, RESPONSE, lambda store, owner: store.delete(owner, id))
        return CompactJSONResponse({"id": id, "object": "response", "deleted": True})

    @routes.get(
        "/responses/{id}/input_items",
        summary="List the items of a response's input, with those that it continues.",
        response_model=ItemList,
        responses=_READ,
        openapi_extra={"parameters": _PAGE},
    )
    async def input_items(request: Request, id: str) -> Response:
        items = await use(request, RESPONSE, lambda store, owner: store.context(owner, id, through=INPUT))
        return _page(items, request.query_params)

    def read_prompt(raw: bytes, client: str, key: ResponseKey) -> tuple[ServedModel, ParsedBody]:
        fields = parsed(raw)
        served = service.models.find(fields.get("model"))
        return served, served.reader.read(Responses.path, fields, key, stored=service.stored_items(client))

    @bodies.post(
        "/responses/input_tokens",
        summary="Count the tokens of a response's prompt.",
        response_model=TokenCount,
        responses=_WRITE,
    )
    async def input_tokens(request: Request, body: ResponseBody) -> Response:
        raw = await read_logged(request, service.settings)
        client = Client(request, len(raw))
        try:
            read = await service.parse(client, partial(read_prompt, raw, client.name), ResumeRequest.of(request.scope))
        finally:
            client.close()
        count = len(read.requests[0].prompt)
        return CompactJSONResponse({"object": "response.input_tokens", "input_tokens": count})

    routes.include_router(bodies)


def _add_conversations(routes: APIRouter, service: Service) -> None:
    use, limits = partial(_use, service), service.settings.body_limits
    bodies = APIRouter(route_class=BodyRoute)
    documented: Any = {"response_model": Conversation, "responses": _WRITE}
    listed: Any = {"response_model": ItemList, "responses": _WRITE}

    async def read(request: Request, model: type[Body]) -> tuple[Any, ResponseKey, list[Item]]:
        """A body, and its items with ids from a key."""
        raw, key = await read_logged(request, service.settings), ResumeRequest.of(request.scope).key

        def make() -> tuple[Any, ResponseKey, list[Item]]:
            body = validated(model, parsed(raw), Validation(limits))
            items: list[Item] = getattr(body, "items", None) or []
            messages_of((), items, limits, "items")  # checks them
            return body, key, with_ids(items, key)

        return await service.run(request.scope["onward.client"], make)

    @bodies.post("/conversations", summary="Create a conversation.", **documented)
    async def create(request: Request, body: ConversationBody) -> Response:
        body, key, items = await read(request, ConversationBody)
        new = {"id": f"{CONVERSATION}{key.text}", "object": "conversation", "created_at": key.created}
        new["metadata"] = body.metadata or {}
        await use(request, CONVERSATION, lambda store, owner: store.create(owner, new, items))
        return CompactJSONResponse(new)

    @routes.get("/conversations/{id}", summary="Retrieve a conversation.", **documented)
    async def retrieve(request: Request, id: str) -> Response:
        return CompactJSONResponse(await use(request, CONVERSATION, lambda store, owner: store.get(owner, id)))

    @bodies.post("/conversations/{id}", summary="Change the metadata of a conversation.", **documented)
    async def update(request: Request, body: ConversationChange, id: str) -> Response:
        body, *_ = await read(request, ConversationChange)
        fields = {"metadata": body.metadata or {}}
        return CompactJSONResponse(
            await use(request, CONVERSATION, lambda store, owner: store.update(owner, id, fields))
        )

    @routes.delete(
        "/conversations/{id}", summary="Delete a conversation and its items.", response_model=Deleted, responses=_READ
    )
    async def delete(request: Request, id: str) -> Response:
        await use(request, CONVERSATION, lambda store, owner: store.delete(owner, id))
        return CompactJSONResponse({"id": id, "object": "conversation.deleted", "deleted": True})

    @bodies.post("/conversations/{id}/items", summary="Add items to a conversation.", **listed)
    async def add(request: Request, body: ItemsBody, id: str) -> Response:
        _, _, items = await read(request, ItemsBody)
        await use(request, CONVERSATION, lambda store, owner: store.add_items(owner, id, items))
        return _list_of(items, has_more=False)

    @routes.get(
        "/conversations/{id}/items",
        summary="List the items of a conversation.",
        openapi_extra={"parameters": _PAGE},
        **listed,
    )
    async def items(request: Request, id: str) -> Response:
        all_items = await use(request, CONVERSATION, lambda store, owner: store.context(owner, id))
        return _page(all_items, request.query_params)

    @routes.get("/conversations/{id}/items/{item}", summary="Retrieve an item of a conversation.", responses=_READ)
    async def item(request: Request, id: str, item: str) -> dict[str, Any]:
        all_items = await use(request, CONVERSATION, lambda store, owner: store.context(owner, id))
        found = [each for each in all_items if each["id"] == item]
        if not found:
            raise not_found(item)
        return found[-1]

    @routes.delete("/conversations/{id}/items/{item}", summary="Delete an item of a conversation.", **documented)
    async def delete_item(request: Request, id: str, item: str) -> Response:
        left = await use(request, CONVERSATION, lambda store, owner: store.delete_item(owner, id, item))
        return CompactJSONResponse(left)

    routes.include_router(bodies)


def _page(items: Sequence[Item], query: Mapping[str, str]) -> Response:
    """The page of a list that a query asks for. Raises `BodyError`: a parameter is invalid."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _MAX_PAGE):
        raise BodyError(f"limit must be a whole number from 1 to {_MAX_PAGE}; got {limit[:80]!r}", "limit")
    if order not in ("asc", "desc"):
        raise BodyError(f"order must be asc or desc; got {order[:80]!r}", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise BodyError(f"after must be the id of an item of this list; got {after[:80]!r}", "after")
        start = places[0] + 1
    page = ordered[start : start + int(limit)]
    return _list_of(page, has_more=start + len(page) < len(ordered))


def _list_of(items: Sequence[Item], *, has_more: bool) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    fields = {"data": items, "first_id": first, "last_id": last, "has_more": has_more}
    return CompactJSONResponse({"object": "list", **fields})
