"""The page at /: files as they are, under a policy by which nothing of it comes from elsewhere."""

from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

_FOLDER = Path(__file__).parent / "page"
_KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Where each file is asked for.
PAGE_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _KINDS
}

_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for anew, answered with 304: the files are of one version
}


def router() -> APIRouter:
    routes = APIRouter()
    for address, path in PAGE_FILES.items():
        routes.add_api_route(address, partial(_file, path), methods=["GET"], include_in_schema=address == "/")
    return routes


async def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_KINDS[path.suffix], headers=_HEADERS)
