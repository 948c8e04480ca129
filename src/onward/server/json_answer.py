"""Answers in JSON."""

from typing import Any

from starlette.responses import JSONResponse

from onward.openai.stream import as_json


class JsonAnswer(JSONResponse):
    """JSON in UTF-8. Half a character, which JSON can write and UTF-8 cannot, goes back as JSON writes it."""

    def render(self, content: Any) -> bytes:
        return rendered(content)


def rendered(content: Any) -> bytes:
    """The body of an answer."""
    return as_json(content).encode("utf-8", "backslashreplace")
