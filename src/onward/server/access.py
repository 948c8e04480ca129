"""The checks before a request's body is read, in a server and in an ingress: access, and whether there is room."""

from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from onward.errors import EngineError
from onward.protocols import BodyError
from onward.server.client import too_large
from onward.server.models import Settings
from onward.server.page_files import PAGE_FILES
from onward.util.api_keys import ApiKeys

# Paths that need no API key: for monitoring, and the page, which asks its user for the key.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ready", "/openapi.json"})


class Access:
    """Checks the Host header, the API key, shutdown, concurrent requests and the declared length of a body."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._keys = settings, ApiKeys(settings.api_keys)
        self._hosts = {name.lower() for name in settings.hosts}

    def check(self, scope: Scope, headers: Mapping[bytes, bytes], *, in_flight: int, draining: bool) -> None:
        """Raise an `OnwardError` if the request is refused. in_flight: requests including this one. draining: whether
        the server is shutting down."""
        self._check_host(headers.get(b"host", b""))
        if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers.get(b"authorization"))
        if scope["method"] != "POST":
            return
        if draining:
            raise EngineError("the server is shutting down and takes no more requests")
        if in_flight > self._settings.max_requests:
            message = f"the server is at its limit of {self._settings.max_requests} concurrent requests"
            raise BodyError(message, code="too_many_requests", status=503)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._settings.max_body:
            raise too_large(self._settings)

    def _check_host(self, host: bytes) -> None:
        """Refuse unknown names: DNS rebinding lets another site's page reach this machine under its own name."""
        name = host.decode("latin-1").lower()
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
        if self._hosts and name.strip("[]") not in self._hosts:
            message = f"this server does not answer to the name {name!r}; allow it with --allow-host"
            raise BodyError(message, code="unknown_host", status=403)

    def _check_key(self, authorization: bytes | None) -> None:
        scheme, _, key = (authorization or b"").partition(b" ")
        matches = self._keys.contains(key.strip())
        if self._keys and (scheme.lower() != b"bearer" or not matches):
            problem = "no API key" if authorization is None else "a wrong API key"
            message = f"{problem}: this server requires the header 'Authorization: Bearer KEY'"
            raise BodyError(message, code="invalid_api_key", status=401)


def with_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The application, with CORS headers for the origins in the settings, also on rejected requests."""
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
