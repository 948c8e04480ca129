"""The requests of OpenAI's batches, and what is written for each.

A line of the input is {"custom_id", "method": "POST", "url", "body"}; one of the output {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. All of a result follows from its line and the model, so a batch has one
output however it is run: the `id` is a hash of both, the default seed one of the `custom_id`, and `created` is when the
input was written. What depends on the run, such as the cached ids of a prompt, is left out.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onward.errors import OnwardError, RequestError, one_line
from onward.openai.batch_files import batch_files, created_at, rows_of
from onward.openai.body import URLS
from onward.openai.errors import error_fields, status_of

# Counts of an answer's usage that depend on what else was served.
_OF_THE_RUN = ("prompt_tokens_details", "completion_tokens_details")


@dataclass(frozen=True)
class BatchLine:
    """A line of the input. error: what is wrong with it, as fields of the output's "error"; then url and body say
    nothing.

    number: of the line in its file, from 1. custom_id: None where the line has none that could be read. created: when
    the file was written, in seconds since 1970.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: Mapping[str, Any] | None = None
    created: int = 0

    @classmethod
    def read(cls, number: int, text: str | bytes, created: int = 0) -> Self:
        """Never raises: what is wrong is the line's `error`."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            return cls._wrong(number, None, "invalid_json_line", f"no JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            return cls._wrong(number, None, "invalid_json_line", f"no JSON: {one_line(error)}")
        if not isinstance(fields, dict):
            return cls._wrong(number, None, "invalid_json_line", f"a JSON object is due, got {type(fields).__name__}")
        custom_id, method, url = fields.get("custom_id"), fields.get("method"), fields.get("url")
        if not isinstance(custom_id, str) or not custom_id:
            message = f"custom_id must be a text that is not empty; got {custom_id!r}"
            return cls._wrong(number, None, "missing_required_parameter", message, "custom_id")
        if method != "POST":
            return cls._wrong(number, custom_id, "invalid_method", f"method must be POST; got {method!r}", "method")
        if not isinstance(url, str) or url not in URLS:
            message = f"url must be {' or '.join(URLS)}; got {url!r}"
            return cls._wrong(number, custom_id, "invalid_url", message, "url")
        if "body" not in fields:
            return cls._wrong(number, custom_id, "missing_required_parameter", "there is no body", "body")
        return cls(number, custom_id, url, fields["body"], created=created)

    @classmethod
    def _wrong(cls, number: int, custom_id: str | None, code: str, message: str, param: str | None = None) -> Self:
        error = {
            "message": f"line {number}: {message}",
            "type": "invalid_request_error",
            "param": param,
            "code": code,
            "line": number,
        }
        return cls(number, custom_id, error=error)

    @property
    def seed(self) -> int:
        """What the answer is drawn with if the body does not say; it follows from the custom_id."""
        name = str(self.custom_id).encode("utf-8", "backslashreplace")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 11  # 53 bits: JavaScript's numbers

    def id(self, fingerprint: str) -> str:
        """The id of its result: a hash of the request and of the fingerprint of the model that serves it."""
        content = json.dumps([self.custom_id, self.url, self.body, self.error, fingerprint], sort_keys=True)
        return f"batch_req_{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"

    def served(self, id: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the output where the request was served."""
        kind, _, _ = answer["id"].partition("-")
        usage = {name: value for name, value in answer["usage"].items() if name not in _OF_THE_RUN}
        of_line = {"id": f"{kind}-{_hash(id)}", "created": self.created, "usage": usage}
        return self._result(id, self._response(id, 200, {**answer, **of_line}), None)

    def failed(self, id: str, error: OnwardError) -> dict[str, Any]:
        """The line of the output where the request could not be served."""
        return self._result(id, self._response(id, status_of(error), {"error": error_fields(error)}), None)

    def refused(self, id: str) -> dict[str, Any]:
        """The line of the output where the line holds no request."""
        return self._result(id, None, self.error)

    def _result(self, id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"id": id, "custom_id": self.custom_id, "response": response, "error": error}

    @staticmethod
    def _response(id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{_hash(id)}", "body": body}


def _hash(id: str) -> str:
    return id.rpartition("_")[2]


def result_line(result: Mapping[str, Any]) -> bytes:
    """A result as a line of a file."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


class BatchInput:
    """The lines of a batch. Making it reads them once, to count them and to compare their ids.

    source: a file, or a folder of files (see `batch_files`). count: of the lines.

    Raises:
        RequestError: a file cannot be read, or two lines have one custom_id.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files = batch_files(source)
        self.count = 0
        seen: dict[str, tuple[Path, int]] = {}
        for file in self.files:
            for line in self.lines_of(file):
                self.count += 1
                if line.custom_id is None:
                    continue
                at = (file, line.number)
                first = seen.setdefault(line.custom_id, at)
                if first != at:
                    raise RequestError(
                        f"lines {_and(first, at)} have one custom_id, {line.custom_id!r}: results are told apart by "
                        "it, so give each line its own"
                    )
        self.custom_ids = frozenset(seen)

    def lines(self) -> Iterator[BatchLine]:
        """All lines that are not blank, read as they are asked for."""
        for file in self.files:
            yield from self.lines_of(file)

    def lines_of(self, file: Path) -> Iterator[BatchLine]:
        """Those of one file."""
        created = created_at(file)
        for number, text in rows_of(file):
            yield BatchLine.read(number, text, created)


def _and(first: tuple[Path, int], second: tuple[Path, int]) -> str:
    (file, number), (other, at) = first, second
    if file == other:
        return f"{number} and {at} of {str(file)!r}"
    return f"{number} of {str(file)!r} and {at} of {str(other)!r}"
