"""The ASGI application: the endpoints, behind the gate."""

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

import onward.ops
from onward import __version__
from onward.engine import Engine
from onward.errors import EngineError, OnwardError
from onward.language_model.fingerprint import build_fingerprint
from onward.protocols import BodyError
from onward.protocols.body import documented
from onward.server import generate, management, response_routes
from onward.server.errors import CompactJSONResponse, draining_answer, error_answer
from onward.server.files.batches import Batches
from onward.server.files.routes import FileRoutes
from onward.server.files.store import FileStore
from onward.server.gate import CLIENT_CLOSED, Gate, access_of
from onward.server.generate import errors
from onward.server.log import log_defect, refusal
from onward.server.management import ModelEntry, ModelList
from onward.server.metrics import CONTENT_TYPE
from onward.server.on_demand import OnDemand
from onward.server.service import Service
from onward.server.settings import Settings
from onward.server.sse import OpenStreams
from onward.util.option_names import checks_option_names

_EXPIRY_INTERVAL = 10.0  # seconds


class App:
    """The ASGI application that `create_app` returns; any ASGI server can run it.

    service: the models, settings and metrics. routes: the inner FastAPI application. files, batches: on disk.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        settings = service.settings
        self.streams = OpenStreams(settings, service.tick)
        self.files = FileStore(settings.files_dir, settings.files_space)
        self.batches = Batches(
            service.models, self.files, service.metrics, settings.batch_share, lambda: bool(service.live)
        )
        service.metrics.files_bytes = lambda: self.files.used
        self.routes = _routes(service, self.streams, FileRoutes(service, self.files, self.batches), self._lifespan)
        self.gate = Gate(self.routes, service)
        self._outer = self.gate.with_cors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outer(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.files.open()
        self.batches.open()
        watchers = [asyncio.create_task(watch) for watch in (self.streams.watch(), self._expire())]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self.batches.close()
            self.files.close()
            if self.service.store is not None:
                self.service.store.close()
            await asyncio.to_thread(self.service.models.close)
            if self.service.tracing is not None:
                await asyncio.to_thread(self.service.tracing.close)

    async def _expire(self) -> None:
        """End what is too old, every few seconds."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL)
            for expire in (self.batches.expire, self.files.expire):
                try:
                    await asyncio.to_thread(expire)
                except Exception as error:
                    log_defect(error)


@checks_option_names
def create_app(
    engines: Mapping[str, Engine],
    settings: Settings | None = None,
    *,
    on_demand: OnDemand | None = None,
    tracer_provider: Any = None,
) -> App:
    """Return an ASGI application that serves engines, each under its name. It does not close them.

        app = onward.server.create_app({"demo": onward.Engine(onward.load("demo"))})

    on_demand: further models, which are loaded when requests name them. The application closes their engines.
    tracer_provider: an OpenTelemetry `TracerProvider` for the spans of requests, in place of `Settings.otlp_endpoint`.

    Raises:
        RequestError: no engines and no models on demand. TokenizerError: a model without a tokenizer.
    """
    return App(Service(engines, Settings() if settings is None else settings, on_demand, tracer_provider))


def _routes(service: Service, streams: OpenStreams, files: FileRoutes, lifespan: object) -> FastAPI:
    app = FastAPI(
        title="Onward",
        version=__version__,
        description="OpenAI's API and Anthropic's Messages, served by Onward engines.",
        docs_url=None,  # FastAPI's documentation pages load assets from a CDN
        redoc_url=None,
        default_response_class=CompactJSONResponse,
        lifespan=cast("None", lifespan),
        telemetry={"tracing": False},  # the gate makes the spans
    )
    openapi = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            with documented(service.settings.body_limits):
                schemas = openapi()["components"]["schemas"]
            schemas |= generate.error_schemas()
            for name in sorted(schemas):
                schemas[name] = schemas.pop(name)
        return openapi()

    app.openapi = document  # type: ignore[method-assign]
    # The gate checks the key, in either header.
    key = [Security(HTTPBearer(auto_error=False)), Security(APIKeyHeader(name="x-api-key", auto_error=False))]
    for prefix in ("/v1", ""):
        app.include_router(generate.router(service, streams), prefix=prefix, dependencies=key)
        app.include_router(response_routes.router(service), prefix=prefix, dependencies=key)
        app.include_router(management.router(service), prefix=prefix, dependencies=key)
        app.include_router(_models(service), prefix=prefix, dependencies=key)
        app.include_router(files.router(), prefix=prefix, dependencies=key)
    for url, path in PAGE_FILES.items():
        endpoint = partial(_page_file, path)
        options: dict[str, Any] = {"include_in_schema": url == "/", "response_class": HTMLResponse}
        app.add_api_route(url, endpoint, methods=["GET"], summary="A page to try the models.", **options)

    @app.exception_handler(OnwardError)
    async def on_error(request: Request, error: OnwardError) -> Response:
        access = access_of(request.scope)
        service.note_refusal(error, access)
        return error_answer(error, request.scope["path"], access.id)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"no such URL: {request.url.path}" if error.status_code == 404 else error.detail
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", "").split(", ")
        if "GET" in allowed and "HEAD" not in allowed:
            headers["Allow"] += ", HEAD"
        access = access_of(request.scope)
        access.fields |= refusal({"code": code})
        failure = BodyError(message, code=code, status=error.status_code)
        return error_answer(failure, request.scope["path"], access.id, headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.get("/health", responses=_UNHEALTHY, summary="Whether every engine works.")
    async def health() -> Response:
        return _health(service)

    @app.get("/ready", responses=_UNHEALTHY, summary="Whether the server takes requests.")
    async def ready() -> Response:
        if service.draining:
            return draining_answer()
        return _health(service)

    @app.get("/version", responses=errors(), summary="The versions that compute.")
    async def version() -> Version:
        return await service.status(Version.of_process)

    @app.get("/metrics", responses=errors(), response_class=PlainTextResponse, summary="Metrics for Prometheus.")
    async def metrics() -> Response:
        return Response(await service.status(service.metrics.snapshot()), media_type=CONTENT_TYPE)

    @app.get("/stats", responses=errors(), summary="The state of each engine.")
    async def stats() -> dict[str, Any]:
        engines = {model.name: model.engine for model in service.models}
        return await service.status(lambda: {name: asdict(engine.stats()) for name, engine in engines.items()})

    return app


_UNHEALTHY: dict[int | str, Any] = {503: {"description": "Not healthy, or not ready."}}


class Version(BaseModel):
    """The versions that compute. build: equal ones have the same code and native library. instruction_set: of the
    kernels; null if PyTorch's operators run."""

    version: str
    build: str
    torch: str
    python: str
    instruction_set: str | None

    @classmethod
    def of_process(cls) -> "Version":
        ops = onward.ops.choice()
        return cls(
            version=__version__,
            build=build_fingerprint(),
            torch=torch.__version__,
            python=platform.python_version(),
            instruction_set=ops.isa if ops.form == "native" else None,
        )


_Result = TypeVar("_Result")


def _models(service: Service) -> APIRouter:
    routes = APIRouter()

    async def listing(function: Callable[[], _Result]) -> _Result:
        """Call a function in a thread if it reads the folder of models."""
        return function() if service.models.are_fixed else await asyncio.to_thread(function)

    @routes.get(
        "/models",
        response_model=ModelList,
        response_model_exclude_unset=True,
        responses=errors(),
        summary="All models and adapters.",
    )
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": await listing(service.models.listed)}

    @routes.get(
        "/models/{name:path}",
        response_model=ModelEntry,
        response_model_exclude_unset=True,
        responses=errors(404),
        summary="One model or adapter.",
    )
    async def model(name: str) -> dict[str, Any]:
        return await listing(partial(service.models.entry, name))

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
    models |= {name: {"state": state, "seconds_since_step": 0.0} for name, state in service.models.unloaded().items()}
    content = {"status": "ok" if healthy else "failing", "models": models, "version": __version__}
    return CompactJSONResponse(content, 200 if healthy else 503)


# The pages at / and /docs: static files, with a policy that forbids loading anything from other sites.
_FOLDER = Path(__file__).parent / "page"
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
# The files by URL path.
PAGE_FILES = {
    _PAGES.get(path.name, f"/page/{path.name}"): path for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS
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
