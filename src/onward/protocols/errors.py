"""Errors as OpenAI's API writes them: a status and {message, type, param, code}."""

from typing import Any

from onward.errors import ContextOverflowError, EngineBusyError, EngineError, OnwardError, RequestError, TokenizerError

# Characters of a message: it may quote what was sent.
_LONGEST = 1000


class BodyError(RequestError):
    """A body asks for what is not served, or is none. param: the field. code: OpenAI's word for it. status: of HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def __reduce__(self) -> tuple[type["BodyError"], tuple[str, str | None, str, int]]:
        return type(self), (str(self), self.param, self.code, self.status)


def status_of(error: OnwardError) -> int:
    """The status of HTTP that says whose fault it is: 4xx the request's, 429 too many, 5xx ours."""
    if isinstance(error, BodyError):
        return error.status
    if isinstance(error, RequestError | TokenizerError):
        return 400
    if isinstance(error, EngineBusyError):
        return 429
    return 503 if isinstance(error, EngineError) else 500


def error_fields(error: OnwardError) -> dict[str, Any]:
    """The object under "error"."""
    status = status_of(error)
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    codes = {429: "engine_busy", 500: "server_error", 503: "engine_unavailable"}
    param, code = None, codes.get(status)
    if isinstance(error, BodyError):
        param, code = error.param, error.code
    elif isinstance(error, ContextOverflowError):
        code = "context_length_exceeded"
    message = str(error)
    return {
        "message": message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…",
        "type": kinds.get(status, "invalid_request_error"),
        "param": param,
        "code": code,
    }
