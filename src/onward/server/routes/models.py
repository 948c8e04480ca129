"""/v1/models."""

from typing import Any

from fastapi import APIRouter

from onward.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.models.listed()}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        listed = service.models.find(name).listed()
        return next(fields for fields in listed if fields["id"] == name)

    return routes
