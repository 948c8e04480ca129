"""Files of OpenAI's batches: requests as lines of JSON, and a line of JSON for the result of each.

A line of the input is {"custom_id", "method": "POST", "url", "body"}; one of the output {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. The output is what makes a batch resumable: a `custom_id` that has a
response of status 200 there is done.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from onward.errors import OnwardError, RequestError, one_line
from onward.files import write_whole
from onward.openai.body import URLS
from onward.openai.errors import error_fields, status_of


@dataclass(frozen=True)
class BatchLine:
    """A line of the input. error: what is wrong with it, as fields of the output's "error"; then url and body say
    nothing.

    number: of the line in its file, from 1. custom_id: None where the line has none that could be read.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, number: int, text: bytes) -> Self:
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
        return cls(number, custom_id, url, fields["body"])

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

    def served(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the output where the request was served."""
        return self._result(self._response(200, body), None)

    def failed(self, error: OnwardError) -> dict[str, Any]:
        """The line of the output where the request could not be served."""
        return self._result(self._response(status_of(error), {"error": error_fields(error)}), None)

    def refused(self) -> dict[str, Any]:
        """The line of the output where the line holds no request."""
        return self._result(None, self.error)

    def _result(self, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }

    @staticmethod
    def _response(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}


class BatchInput:
    """The lines of a batch. Making it reads the file once, to count the lines and to compare their ids.

    Raises:
        RequestError: the file cannot be read, or two lines have one custom_id.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = 0
        numbers: dict[str, int] = {}
        for line in self.lines():
            self.count += 1
            if line.custom_id is None:
                continue
            first = numbers.setdefault(line.custom_id, line.number)
            if first != line.number:
                raise RequestError(
                    f"lines {first} and {line.number} of {str(file)!r} have one custom_id, {line.custom_id!r}: results "
                    "are told apart by it, so give each line its own"
                )
        self.custom_ids = frozenset(numbers)

    def lines(self) -> Iterator[BatchLine]:
        """The lines that are not blank, read as they are asked for."""
        if self.file.exists() and not self.file.is_file():
            raise RequestError(f"the batch {str(self.file)!r} is no file: it is read twice, so it cannot be a pipe")
        try:
            with self.file.open("rb") as content:
                for number, text in enumerate(content, 1):
                    if text.strip():
                        yield BatchLine.read(number, text)
        except OSError as error:
            raise RequestError(f"the batch {str(self.file)!r} cannot be read: {error.strerror or error}") from error


class BatchOutput:
    """The results of a batch, a line each, as they come. A context manager that holds the file open.

    What an earlier run left is kept as far as it is of use: lines that were served. `done` has their ids. A line that a
    kill cut short, and those that failed, are dropped before the first new one is written, so in the end every line of
    the input has one result.

    Raises:
        RequestError: the file cannot be read or written, is the input, or holds anything but results of this batch.
    """

    def __init__(self, file: Path, batch: BatchInput) -> None:
        self.file = file
        self.done: set[str] = set()
        self._content: IO[bytes] | None = None
        self._batch = batch
        try:
            if file.exists():
                if os.path.samefile(file, batch.file):
                    raise RequestError(f"{str(file)!r} is the batch itself: name another file for the results")
                if file.is_file():
                    self._resume()
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        try:
            self._content = self.file.open("ab")
        except OSError as error:
            raise self._failure(error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._content is not None
        try:
            self._content.close()
        except OSError as failure:  # of what write could not hand on, which has raised
            if kind is None:
                raise self._failure(failure) from failure

    def write(self, result: Mapping[str, Any]) -> None:
        """Append a result, and hand it to the system at once: what is written survives the end of this process."""
        assert self._content is not None, "the file is open inside of with"
        text = json.dumps(result, ensure_ascii=False, allow_nan=False)
        try:
            self._content.write(f"{text}\n".encode("utf-8", "backslashreplace"))
            self._content.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _resume(self) -> None:
        """Read what is done, and drop the rest."""
        dropped = False
        for text, custom_id in self._results():
            if custom_id is None:
                dropped = True
            elif custom_id in self.done:
                raise RequestError(f"{str(self.file)!r} has two results of custom_id {custom_id!r}: name another file")
            else:
                self.done.add(custom_id)
                dropped = dropped or not text.endswith(b"\n")
        if dropped:
            write_whole(self.file, self._write_done)

    def _write_done(self, temporary: Path) -> None:
        with temporary.open("wb") as content:
            for text, custom_id in self._results():
                if custom_id is not None:
                    content.write(text.rstrip(b"\r\n") + b"\n")
        shutil.copymode(self.file, temporary)

    def _results(self) -> Iterator[tuple[bytes, str | None]]:
        """The lines of the file, each with its custom_id where it was served."""
        with self.file.open("rb") as content:
            for number, text in enumerate(content, 1):
                try:
                    result = json.loads(text)
                except (ValueError, RecursionError):
                    if not text.endswith(b"\n"):  # the last one, which was being written
                        yield text, None
                        return
                    result = None
                yield text, self._served_id(result, number)

    def _served_id(self, result: Any, number: int) -> str | None:
        if not isinstance(result, dict) or not {"custom_id", "response", "error"} <= set(result):
            raise RequestError(f"line {number} of {str(self.file)!r} is no result of a batch: name another file")
        custom_id, response = result["custom_id"], result["response"]
        if custom_id is not None and custom_id not in self._batch.custom_ids:
            raise RequestError(
                f"{str(self.file)!r} has a result of custom_id {custom_id!r}, which {str(self._batch.file)!r} does not "
                "have: it is of another batch, so name another file"
            )
        is_served = isinstance(response, dict) and response.get("status_code") == 200
        return custom_id if is_served else None

    def _failure(self, error: OSError) -> RequestError:
        return RequestError(f"the results cannot be written to {str(self.file)!r}: {error.strerror or error}")
