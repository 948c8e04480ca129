"""Endpoints for operators: load and unload models and adapters, and update weights (`Settings.management`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response
from torch import Tensor

from onward.checkpoint import CheckpointFolder
from onward.checkpoint.weights import read_by_stock_name
from onward.engine.updates import InFlight
from onward.errors import CheckpointError, ConfigError, OnwardError, RequestError, SourceError, one_line
from onward.language_model import LanguageModel
from onward.models import architecture_of, read_config
from onward.protocols import BodyError
from onward.protocols.body import Body, Validation, expected, validated
from onward.server.generate import BodyRoute, errors, respond
from onward.server.service import Service
from onward.util.lanes import Lane


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


class WeightsBody(Body):
    """New weights of a model. weights_path: a folder of a checkpoint in floats, within that of --weights-dir.
    in_flight: what happens to requests that have started; "finish" by default. version: the number of the weights."""

    model: str
    weights_path: Annotated[str, Field(min_length=1, max_length=4096)]
    in_flight: Annotated[InFlight | None, expected("finish, recompute or keep", "invalid_value")] = None
    version: Annotated[int | None, Field(ge=1, lt=2**53)] = None


class UpdatedModel(ModelEntry):
    """A model with new weights, and their number."""

    weights_version: int


class AdapterName(Body):
    """An adapter to unload."""

    lora_name: _Name


_ERRORS = errors(400, 404, 408, 409, 413, 415, 500, 503)


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)
    models = service.models

    def load(body: ModelBody) -> dict[str, Any]:
        models.find(body.model)
        return models.entry(body.model)

    def unload(body: ModelBody) -> dict[str, Any]:
        models.unload(body.model)
        return models.entry(body.model)

    def load_adapter(body: AdapterBody) -> dict[str, Any]:
        folder = _folder_within(service.settings.adapters_dir, "--adapters-dir", body.lora_path, "lora_path")
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

    def update_weights(body: WeightsBody) -> dict[str, Any]:
        folder = _folder_within(service.settings.weights_dir, "--weights-dir", body.weights_path, "weights_path")
        if models.owner(body.model) != body.model:
            raise BodyError(f"{body.model!r} is an adapter: name its model", "model")
        engine = models.find(body.model).engine
        try:
            weights = _weights(engine.lm, folder)
            version = engine.update_weights(weights, in_flight=body.in_flight or "finish", version=body.version)
        except (CheckpointError, ConfigError, RequestError, SourceError) as error:
            of_version = isinstance(error, RequestError) and error.option == "version"
            reason = one_line(error).replace(str(folder), body.weights_path)
            field = "version" if of_version else "weights_path"
            raise BodyError(f"the weights were not updated: {reason}", field) from error
        return {**models.entry(body.model), "weights_version": version}

    def add(
        path: str,
        response: type[BaseModel],
        summary: str,
        act: Callable[[Any], dict[str, Any]],
        lane: Lane | None = None,
    ) -> None:
        kind = act.__annotations__["body"]

        async def endpoint(request: Request, body: Any) -> Response:
            if not service.settings.management:
                message = "requests may not change the models and adapters here: start the server with --management"
                raise BodyError(message, code="management_disabled", status=403)
            return await respond(service, request, lambda fields: act(validated(kind, fields, Validation())), lane)

        endpoint.__annotations__["body"] = kind
        routes.post(path, response_model=response, responses=_ERRORS, summary=summary)(endpoint)

    add("/models/load", ModelEntry, "Load a model on demand, and wait until it is loaded.", load)
    add("/models/unload", ModelEntry, "Unload a model on demand that serves no requests.", unload)
    add("/models/weights", UpdatedModel, "Update the weights of a model.", update_weights, service.updates)
    add("/load_lora_adapter", ModelEntry, "Load an adapter.", load_adapter)
    add("/unload_lora_adapter", Deleted, "Unload an adapter.", unload_adapter)
    return routes


def _folder_within(root: Path | None, flag: str, path: str, field: str) -> Path:
    """A folder within `root`, the folder of a flag. Raises `BodyError`: it lies elsewhere, or doesn't exist."""
    if root is None:
        message = f"this server has no folder for {field}: start it with {flag}"
        raise BodyError(message, code="management_disabled", status=403)
    if "\0" in path:
        raise BodyError(f"{field} contains a null character", field)
    folder = (root / path).resolve()
    if not folder.is_relative_to(root.resolve()) or not folder.is_dir():
        raise BodyError(f"{field} must be a folder within that of {flag}; got {path!r}", field)
    return folder


def _weights(lm: LanguageModel, path: Path) -> dict[str, Tensor]:
    """The weights of a folder, which must be those of the same architecture. Raises `OnwardError`."""
    folder, own = CheckpointFolder(path), architecture_of(lm.model)
    config = read_config(folder.config)
    if own is not None and config.serving(1) != own.serving(1):
        raise CheckpointError("its config.json describes another architecture than the model's")
    return read_by_stock_name(folder, config)[0]
