"""The ASGI application: the endpoints, behind the gate."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from onward import __version__
from onward.engine import Engine
from onward.errors import EngineError, OnwardError
from onward.protocols import Limits, error_fields, status_of
from onward.protocols.body import documented
from onward.server import generate
from onward.server.client import MemoryFullError
from onward.server.errors import CompactJSONResponse, draining_answer, error_answer, plain_error
from onward.server.gate import CLIENT_CLOSED, Gate, access_of
from onward.server.generate import errors
from onward.server.log import log_defect, refusal
from onward.server.metrics import CONTENT_TYPE
from onward.server.service import Service
from onward.server.settings import Settings
from onward.server.sse import OpenStreams
from onward.util.option_names import checks_option_names


class App:
    """The ASGI application that `create_app` returns; any ASGI server can run it.

    service: the models, settings and metrics. routes: the inner FastAPI application.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.streams = OpenStreams(service.settings, service.count_memory)
        self.routes = _routes(service, self.streams, self._lifespan)
        self.gate = Gate(self.routes, service)
        self._outer = self.gate.with_cors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outer(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        watcher = asyncio.create_task(self.streams.watch())
        try:
            yield
        finally:
            watcher.cancel()


@checks_option_names
def create_app(engines: Mapping[str, Engine], settings: Settings | None = None) -> App:
    """Return an ASGI application that serves engines, each under its name. It does not close them.

        app = onward.server.create_app({"demo": onward.Engine(onward.load("demo"))})

    Raises:
        RequestError: no engines. TokenizerError: a model without a tokenizer.
    """
    return App(Service(engines, Settings() if settings is None else settings))


def _routes(service: Service, streams: OpenStreams, lifespan: object) -> FastAPI:
    app = FastAPI(
        title="Onward",
        version=__version__,
        description="OpenAI's API, served by Onward engines.",
        docs_url=None,  # FastAPI's documentation pages load assets from a CDN
        redoc_url=None,
        default_response_class=CompactJSONResponse,
        lifespan=cast("None", lifespan),
    )
    openapi = app.openapi

    def document() -> dict[str, Any]:
        with documented(Limits.of(service.settings.limits)):
            return openapi()

    app.openapi = document  # type: ignore[method-assign]
    key = [Security(HTTPBearer(auto_error=False))]  # which the gate checks
    for prefix in ("/v1", ""):
        app.include_router(generate.router(service, streams), prefix=prefix, dependencies=key)
        app.include_router(_models(service), prefix=prefix, dependencies=key)
    for url, path in PAGE_FILES.items():
        endpoint = partial(_page_file, path)
        app.add_api_route(url, endpoint, methods=["GET"], include_in_schema=url == "/", response_class=HTMLResponse)

    @app.exception_handler(OnwardError)
    async def on_error(request: Request, error: OnwardError) -> Response:
        fields = error_fields(error)
        service.metrics.refusals[fields["code"] or "invalid_request"] += 1
        access = access_of(request.scope)
        access.fields |= refusal(fields, with_values=service.settings.log_prompts)
        if status_of(error) >= 500 and not isinstance(error, MemoryFullError):
            log_defect(error, id=access.id)
        return error_answer(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"no such URL: {request.url.path}" if error.status_code == 404 else error.detail
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", "").split(", ")
        if "GET" in allowed and "HEAD" not in allowed:
            headers["Allow"] += ", HEAD"
        access_of(request.scope).fields |= refusal({"code": code})
        return plain_error(error.status_code, message, code, headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.get("/health", responses=_UNHEALTHY)
    async def health() -> Response:
        return _health(service)

    @app.get("/ready", responses=_UNHEALTHY)
    async def ready() -> Response:
        if service.draining:
            return draining_answer()
        return _health(service)

    @app.get("/metrics", responses=errors(), response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await service.status(service.metrics.snapshot()), media_type=CONTENT_TYPE)

    @app.get("/stats", responses=errors())
    async def stats() -> dict[str, Any]:
        engines = {model.name: model.engine for model in service.models}
        return await service.status(lambda: {name: asdict(engine.stats()) for name, engine in engines.items()})

    return app


_UNHEALTHY: dict[int | str, Any] = {503: {"description": "Not healthy, or not ready."}}


class ModelEntry(BaseModel):
    """A model, or an adapter of the model `parent`. chat_template: whether there is one, which chats need.
    default_options: the numbers that apply where a body leaves them out; max_new_tokens null: up to the context length.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    chat_template: bool
    default_options: dict[str, int | float | None]
    parent: str | None = None


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelEntry]


def _models(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/models", response_model=ModelList, response_model_exclude_unset=True, responses=errors())
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.models.listed()}

    @routes.get(
        "/models/{name:path}", response_model=ModelEntry, response_model_exclude_unset=True, responses=errors(404)
    )
    async def model(name: str) -> dict[str, Any]:
        listed = service.models.find(name).listed()
        return next(fields for fields in listed if fields["id"] == name)

    return routes


def _health(service: Service) -> Response:
    """Report whether every engine is idle or making progress. It takes no lock, so it answers even if an engine hangs
    while holding one."""
    models: dict[str, Any] = {}
    for model in service.models:
        seconds = model.engine.seconds_since_step
        state = "hangs" if seconds > service.settings.hang_seconds else "running" if seconds else "idle"
        try:
            model.engine.check_open()
        except EngineError:
            state = "closed" if service.draining else "failed"
        models[model.name] = {"state": state, "seconds_since_step": round(seconds, 3)}
    healthy = all(model["state"] in ("running", "idle", "closed") for model in models.values())
    content = {"status": "ok" if healthy else "failing", "models": models, "version": __version__}
    return CompactJSONResponse(content, 200 if healthy else 503)


# The page at /: static files, with a policy that forbids loading anything from other sites.
_FOLDER = Path(__file__).parent / "page"
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The files by URL path.
PAGE_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _KINDS
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated on each load: the files must be of one version
}


async def _page_file(path: Path) -> Response:
    return FileResponse(path, media_type=_KINDS[path.suffix], headers=_PAGE_HEADERS)
