"""Errors in OpenAI's format: an HTTP status and {message, type, param, code}."""

from typing import Any

from onward.errors import ContextOverflowError, EngineBusyError, EngineError, OnwardError, RequestError, TokenizerError

_MAX_LENGTH = 1000  # characters of a message, which may quote the body


class BodyError(RequestError):
    """A request body is invalid or unsupported. param: the field. code: OpenAI's error code. status: of HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message, param)
        self.code, self.status = code, status

    @property
    def param(self) -> str | None:
        """The field to blame, if there is one."""
        return self.option

    def __reduce__(self) -> tuple[type["BodyError"], tuple[str, str | None, str, int]]:
        return type(self), (str(self), self.option, self.code, self.status)


def status_of(error: OnwardError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, BodyError):
        return error.status
    if isinstance(error, RequestError | TokenizerError):
        return 400
    if isinstance(error, EngineBusyError):
        return 429
    return 503 if isinstance(error, EngineError) else 500


def error_fields(error: OnwardError) -> dict[str, Any]:
    """The object under "error" in a response."""
    status = status_of(error)
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    codes = {429: "engine_busy", 500: "server_error", 503: "engine_unavailable"}
    param, code = error.option if isinstance(error, RequestError) else None, codes.get(status)
    if isinstance(error, BodyError):
        code = error.code
    elif isinstance(error, ContextOverflowError):
        code = "context_length_exceeded"
    message = str(error)
    return {
        "message": message if len(message) <= _MAX_LENGTH else f"{message[:_MAX_LENGTH]}…",
        "type": kinds.get(status, "invalid_request_error"),
        "param": param,
        "code": code,
    }
