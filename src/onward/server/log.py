"""The log: lines of JSON on stderr, one for each request and for what happens to the server."""

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger("onward.server")
# Characters of each text of an error.
_LONGEST = 300
# Where a message quotes the body: after "got" or a colon, and in quotes.
_QUOTED = re.compile(r"[;,]? got .*|: .*|'.*'|\".*\"", re.DOTALL)


def log(event: str, **fields: Any) -> None:
    """Write a line."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(_line("info", event, fields))


def refusal(fields: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """The part of a request's line that says why it was refused.

    fields: of the error. whole: with the values that the message quotes, which may be a prompt's content. The log has
    prompts only where --log-prompts asks for them.
    """
    message = str(fields.get("message") or "")
    reason = message if whole else _QUOTED.sub("…", message)
    error = {"param": fields.get("param"), "code": fields.get("code"), "reason": reason}
    return {"error": {name: str(value)[:_LONGEST] for name, value in error.items() if value}}


def log_defect(error: BaseException, **fields: Any) -> None:
    """Write a line about an error of ours, with its traceback. Clients never get to see that."""
    fields["traceback"] = "".join(traceback.format_exception(error))
    _logger.error(_line("error", "defect", fields))


def _line(level: str, event: str, fields: dict[str, Any]) -> str:
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03}Z"
    return json.dumps({"time": stamp, "level": level, "event": event} | fields, default=str)


class _OtherLines(logging.Formatter):
    """What other libraries log (uvicorn's errors), as lines of the same kind."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == _logger.name:
            return record.getMessage()
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _line(record.levelname.lower(), "message", fields)


def log_to_stderr() -> None:
    """Have the lines written. Without this they go where the application's logging sends them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OtherLines())
    for name, level in ((_logger.name, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
