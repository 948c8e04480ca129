"""/v1/models."""

from typing import Any

from fastapi import APIRouter

from onward.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.listed() for model in service.models]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.models.find(name).listed()

    return routes
