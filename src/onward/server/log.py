"""The log: JSON lines on stderr, one for each request and each event in the server's life."""

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger("onward.server")
_MAX_LENGTH = 300  # characters of each field of an error
# The parts of an error message that may quote the body: after "got" or a colon, and in quotes.
_QUOTED = re.compile(r"[;,]? got .*|: .*|'.*'|\".*\"", re.DOTALL)


def log(event: str, **fields: Any) -> None:
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(_line("info", event, fields))


def refusal(fields: Mapping[str, Any], *, with_values: bool = False) -> dict[str, Any]:
    """The log fields that say why a request was refused. fields: from `error_fields`. with_values: include the values
    that the message quotes. They may contain prompts, which are logged only with --log-prompts."""
    message = str(fields.get("message") or "")
    reason = message if with_values else _QUOTED.sub("…", message)
    error = {"param": fields.get("param"), "code": fields.get("code"), "reason": reason}
    return {"error": {name: str(value)[:_MAX_LENGTH] for name, value in error.items() if value}}


def log_defect(error: BaseException, **fields: Any) -> None:
    """Log an unexpected error with its traceback, which clients never see."""
    fields["traceback"] = "".join(traceback.format_exception(error))
    _logger.error(_line("error", "defect", fields))


def _line(level: str, event: str, fields: dict[str, Any]) -> str:
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03}Z"
    return json.dumps({"time": stamp, "level": level, "event": event} | fields, default=str)


class _LineFormatter(logging.Formatter):
    """Formats other libraries' records (uvicorn's errors) as lines of the same kind."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == _logger.name:
            return record.getMessage()
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _line(record.levelname.lower(), "message", fields)


def log_to_stderr() -> None:
    """Write the log to stderr. Without this, the lines go wherever the application configured logging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    for name, level in ((_logger.name, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
