"""The page at /: static files, with a policy that forbids loading anything from other sites."""

from functools import partial
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, Response

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
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated on each load: the files must be of one version
}


def router() -> APIRouter:
    routes = APIRouter()
    for url, path in PAGE_FILES.items():
        routes.add_api_route(
            url, partial(_file, path), methods=["GET"], include_in_schema=url == "/", response_class=HTMLResponse
        )
    return routes


async def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_KINDS[path.suffix], headers=_HEADERS)
