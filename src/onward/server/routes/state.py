"""What the server does now: /health, /ready, /metrics and /stats."""

import dataclasses
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from onward import __version__
from onward.errors import EngineError
from onward.server.errors import plain_error
from onward.server.json_answer import JsonAnswer
from onward.server.metrics import CONTENT_TYPE
from onward.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        return _health(service)

    @routes.get("/ready")
    async def ready() -> Response:
        if service.draining:
            return plain_error(503, "the server shuts down", "draining", {"retry-after": "5"})
        return _health(service)

    @routes.get("/metrics")
    async def metrics() -> Response:
        snapshot = service.metrics.snapshot()
        return Response(await service.in_thread(snapshot.text), media_type=CONTENT_TYPE)

    @routes.get("/stats")
    async def stats() -> dict[str, Any]:
        return await service.in_thread(_stats, service)

    return routes


def _health(service: Service) -> Response:
    """That each engine advances, or has nothing to do; not that the process lives, which an answer shows anyway.

    It waits for no lock, so it answers where an engine hangs with one.
    """
    models: dict[str, Any] = {}
    healthy = True
    for model in service.models:
        seconds = model.engine.seconds_since_step
        hangs = seconds > service.settings.hang_seconds
        state = "hangs" if hangs else "running" if seconds else "idle"
        try:
            model.engine.check_open()
        except EngineError:
            state = "closed" if service.draining else "failed"
        healthy = healthy and state in ("running", "idle", "closed")
        models[model.name] = {"state": state, "seconds_since_step": round(seconds, 3)}
    content = {"status": "ok" if healthy else "failing", "models": models, "version": __version__}
    return JsonAnswer(content, 200 if healthy else 503)


def _stats(service: Service) -> dict[str, Any]:
    return {model.name: dataclasses.asdict(model.engine.stats()) for model in service.models}
