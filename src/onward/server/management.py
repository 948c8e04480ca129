"""Endpoints for operators: load and unload models on demand, and adapters (`Settings.management`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from onward.errors import OnwardError, one_line
from onward.protocols import BodyError
from onward.protocols.body import Body, BodyT, Validation, validated
from onward.server.client import Client
from onward.server.generate import BodyRoute, errors, read_logged
from onward.server.service import Service, parsed


class ModelEntry(BaseModel):
    """A model, or an adapter of the model `parent`.

    status: models on demand are loaded when a request names them; until then, the fields after size_bytes are absent.
    size_bytes: of the weights on disk, for models on demand. chat_template: whether there is one, which chats need.
    default_options: the numbers that apply where a body leaves them out; max_new_tokens null: up to the context length.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: Literal["loaded", "loading", "unloaded"]
    size_bytes: int | None = None
    max_model_len: int | None = None
    chat_template: bool | None = None
    default_options: dict[str, int | float | None] | None = None
    parent: str | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelEntry]


class Deleted(BaseModel):
    """An adapter was unloaded."""

    id: str
    object: Literal["model"]
    deleted: bool


class ModelBody(Body):
    """Which model to load or unload."""

    model: str


_Name = Annotated[str, Field(min_length=1, max_length=200)]


class AdapterBody(Body):
    """An adapter to load, in vLLM's fields. lora_path: a folder, within that of --adapters-dir. base_model_name: its
    model; not needed if there is only one."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: str | None = None


class AdapterName(Body):
    """An adapter to unload."""

    lora_name: _Name


_ERRORS = errors(400, 404, 408, 409, 413, 415, 500, 503)


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)
    models = service.models

    async def respond(request: Request, kind: type[BodyT], act: Callable[[BodyT], dict[str, Any]]) -> Response:
        if not service.settings.management:
            message = "requests may not load or unload models and adapters here: start the server with --management"
            raise BodyError(message, code="management_disabled", status=403)
        raw = await read_logged(request, service.settings)
        client = Client(request, len(raw))
        try:
            return await service.respond(client, lambda: act(validated(kind, parsed(raw), Validation())), len(raw))
        finally:
            client.close()

    def load(body: ModelBody) -> dict[str, Any]:
        models.find(body.model)
        return models.entry(body.model)

    def unload(body: ModelBody) -> dict[str, Any]:
        models.unload(body.model)
        return models.entry(body.model)

    def load_adapter(body: AdapterBody) -> dict[str, Any]:
        folder = _adapter_folder(service.settings.adapters_dir, body.lora_path)
        try:
            models.load_adapter(body.base_model_name, body.lora_name, folder)
        except BodyError:
            raise
        except OnwardError as error:
            reason = one_line(error).replace(str(folder), body.lora_path)
            raise BodyError(f"the adapter cannot be loaded: {reason}", "lora_path") from error
        return models.entry(body.lora_name)

    def unload_adapter(body: AdapterName) -> dict[str, Any]:
        models.drop_adapter(body.lora_name)
        return {"id": body.lora_name, "object": "model", "deleted": True}

    def add(path: str, response: type[BaseModel], summary: str, act: Callable[[Any], dict[str, Any]]) -> None:
        kind = act.__annotations__["body"]

        async def endpoint(request: Request, body: Any) -> Response:
            return await respond(request, kind, act)

        endpoint.__annotations__["body"] = kind
        routes.post(path, response_model=response, responses=_ERRORS, summary=summary)(endpoint)

    add("/models/load", ModelEntry, "Load a model on demand, and wait until it is loaded.", load)
    add("/models/unload", ModelEntry, "Unload a model on demand that serves no requests.", unload)
    add("/load_lora_adapter", ModelEntry, "Load an adapter.", load_adapter)
    add("/unload_lora_adapter", Deleted, "Unload an adapter.", unload_adapter)
    return routes


def _adapter_folder(root: Path | None, path: str) -> Path:
    """The folder of an adapter within `root`. Raises `BodyError`: it lies elsewhere, or doesn't exist."""
    if root is None:
        message = "this server has no folder of adapters to load: start it with --adapters-dir"
        raise BodyError(message, code="management_disabled", status=403)
    if "\0" in path:
        raise BodyError("lora_path contains a null character", "lora_path")
    folder = (root / path).resolve()
    if not folder.is_relative_to(root.resolve()) or not folder.is_dir():
        message = f"lora_path must be a folder within that of --adapters-dir; got {path!r}"
        raise BodyError(message, "lora_path")
    return folder
