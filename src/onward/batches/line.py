"""The requests of OpenAI's batches, and what is written for each.

A line of the input is {"custom_id", "method": "POST", "url", "body"}; one of the output {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. All of a result follows from its line and the model, so a batch has one
output however it is run: the `id` is a hash of both, the default seed one of the `custom_id`, and `created` is when the
input was written. What depends on the run, such as the cached ids of a prompt, is left out.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onward.errors import OnwardError, RequestError, one_line
from onward.protocols.errors import error_fields, status_of
from onward.protocols.schema import URLS
from onward.util.text import brief
from onward.util.text_input import LONGEST_LINE, TextError, check_value, parse_json, parse_request_json, read_lines

_SUFFIXES = (".jsonl", ".parquet")
# Columns that are JSON as text; the others are texts.
_REQUEST = {"custom_id": False, "method": False, "url": False, "body": True}
_RESULT = {"id": False, "custom_id": False, "response": True, "error": True}
# Rows that are read or written at once.
_ROWS = 256


def batch_files(source: Path) -> list[Path]:
    """The file itself; of a folder, its .jsonl and .parquet files in the order of their names. Raises `RequestError`:
    there is none."""
    if not source.is_dir():
        return [source]
    files = sorted(file for file in source.iterdir() if file.suffix in _SUFFIXES and not file.name.startswith("."))
    if not files:
        raise RequestError(f"the folder {str(source)!r} has no {' or '.join(_SUFFIXES)} files: name one that has")
    return files


def created_at(file: Path) -> int:
    """When it was written, in seconds since 1970."""
    try:
        return int(file.stat().st_mtime)
    except OSError as error:
        raise _unreadable(file, error) from error


def rows_of(file: Path, *, results: bool = False) -> Iterator[tuple[int, str | bytes]]:
    """The rows of a file as lines of JSON with their numbers, from 1, read as they are asked for; no blank lines.

    results: of a file of results, not of requests.

    Raises:
        RequestError: the file cannot be read.
    """
    if file.exists() and not file.is_file():
        raise RequestError(f"the batch {str(file)!r} is no file: it is read twice, so it cannot be a pipe")
    try:
        if file.suffix == ".parquet":
            yield from enumerate(_parquet_rows(file, _RESULT if results else _REQUEST), 1)
            return
        with file.open("rb") as content:
            for number, text in enumerate(content if results else read_lines(content), 1):
                if text.strip():
                    yield number, text
    except OSError as error:
        raise _unreadable(file, error) from error


def write_rows(file: Path, lines: Iterable[bytes], like: Path) -> None:
    """Results, each a line of JSON, into a file. like: the file that it becomes, whose name says how."""
    if like.suffix == ".parquet":
        _write_parquet(file, lines)
        return
    with file.open("wb") as content:
        content.writelines(lines)


def _parquet_rows(file: Path, columns: dict[str, bool]) -> Iterator[str]:
    _, parquet = _pyarrow()
    from pyarrow import ArrowInvalid

    try:
        with parquet.ParquetFile(file) as content:
            missing = [name for name in columns if name not in content.schema_arrow.names]
            if missing:
                raise RequestError(
                    f"{str(file)!r} has no column {', '.join(missing)}: a batch in Parquet has {', '.join(columns)}"
                )
            for batch in content.iter_batches(_ROWS, columns=list(columns)):
                for row in batch.to_pylist():
                    yield _row_text(row, columns)
    except ArrowInvalid as error:
        raise RequestError(f"the batch {str(file)!r} cannot be read: {one_line(error)}") from error


def _row_text(row: dict[str, Any], columns: dict[str, bool]) -> str:
    """The row as a line of JSON. A text that should be JSON and is not stands for the line, which is none then."""
    fields = dict(row)
    for name, is_json in columns.items():
        if is_json and row[name] is not None:
            try:
                fields[name] = parse_json(row[name])
            except (TypeError, AttributeError, TextError):
                return str(row[name])
    return json.dumps(fields, default=str)


def _write_parquet(file: Path, lines: Iterable[bytes]) -> None:
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(name, arrow.string()) for name in _RESULT])
    with parquet.ParquetWriter(file, schema) as writer:
        rows: list[dict[str, str | None]] = []
        for line in lines:
            result = json.loads(line)
            rows.append(
                {
                    name: json.dumps(result[name]) if is_json and result[name] is not None else result[name]
                    for name, is_json in _RESULT.items()
                }
            )
            if len(rows) == _ROWS:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(arrow.Table.from_pylist(rows, schema))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RequestError("Parquet files want pyarrow: pip install 'onward[cluster]'") from error
    return pyarrow, pyarrow.parquet


def _unreadable(file: Path, error: OSError) -> RequestError:
    return RequestError(f"the batch {str(file)!r} cannot be read: {error.strerror or error}")


# Counts of an answer's usage that depend on what else was served.
_OF_THE_RUN = ("cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")


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
        """Never raises: an unreadable line has an `error`."""
        if len(text) > LONGEST_LINE:
            message = f"the line is longer than {LONGEST_LINE:,} bytes, the most that a request may have"
            return cls._wrong(number, None, "invalid_json_line", message)
        try:
            fields = parse_request_json(text)
        except TextError as error:
            message = f"the line is not valid JSON: {error}" if error.at is None else str(error)
            return cls._wrong(number, _custom_id_in(text), "invalid_json_line", message, error.at)
        if not isinstance(fields, dict):
            message = f"a line must be a JSON object; got {type(fields).__name__}"
            return cls._wrong(number, None, "invalid_json_line", message)
        custom_id, method, url = fields.get("custom_id"), fields.get("method"), fields.get("url")
        if not isinstance(custom_id, str) or not custom_id:
            message = f"custom_id must be a text that is not empty; got {brief(custom_id)}"
            return cls._wrong(number, None, "missing_required_parameter", message, "custom_id")
        if method != "POST":
            message = f"method must be POST; got {brief(method)}"
            return cls._wrong(number, custom_id, "invalid_method", message, "method")
        if not isinstance(url, str) or url not in URLS:
            message = f"url must be {' or '.join(URLS)}; got {brief(url)}"
            return cls._wrong(number, custom_id, "invalid_url", message, "url")
        if "body" not in fields:
            return cls._wrong(number, custom_id, "missing_required_parameter", "there is no body", "body")
        return cls(number, custom_id, url, fields["body"], created=created)

    def repeated(self, first: str) -> Self:
        """The line where its custom_id is taken. first: the line that has it."""
        message = f"{first} has the custom_id {self.custom_id!r} already: give each line its own"
        return self._wrong(self.number, None, "duplicate_custom_id", message, "custom_id")

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
        usage = _lasting(answer["usage"])
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


def _custom_id_in(text: str | bytes) -> str | None:
    """The custom_id of a line that holds what no request can hold."""
    try:
        fields = parse_json(text)
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        check_value(custom_id)
    except TextError:
        return None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _lasting(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The counts that do not depend on the run."""
    counts = {name: _lasting(value) if isinstance(value, Mapping) else value for name, value in usage.items()}
    return {name: value for name, value in counts.items() if name not in _OF_THE_RUN and value != {}}


def _hash(id: str) -> str:
    return id.rpartition("_")[2]


def result_line(result: Mapping[str, Any]) -> bytes:
    """A result as a line of a file."""
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


class BatchInput:
    """The lines of a batch. Making it reads them once, to count them and to compare their ids.

    Where several lines have one custom_id, the first is served and the others are refused.

    source: a file, or a folder of files (see `batch_files`). count: of the lines.

    Raises:
        RequestError: a file cannot be read.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files = batch_files(source)
        self.count = 0
        self._first: dict[str, tuple[Path, int]] = {}  # the place of each custom_id
        for file in self.files:
            for line in self._read(file):
                self.count += 1
                if line.custom_id is not None:
                    self._first.setdefault(line.custom_id, (file, line.number))

    @property
    def custom_ids(self) -> AbstractSet[str]:
        return self._first.keys()

    def lines(self) -> Iterator[BatchLine]:
        """All lines that are not blank, read as they are asked for."""
        for file in self.files:
            yield from self.lines_of(file)

    def lines_of(self, file: Path) -> Iterator[BatchLine]:
        """Those of one file."""
        for line in self._read(file):
            at = (file, line.number)
            first = at if line.custom_id is None else self._first.get(line.custom_id, at)
            yield line if first == at else line.repeated(_shown(first, file))

    def _read(self, file: Path) -> Iterator[BatchLine]:
        created = created_at(file)
        for number, text in rows_of(file):
            yield BatchLine.read(number, text, created)


def _shown(at: tuple[Path, int], file: Path) -> str:
    """A place as a line of `file` names it."""
    return f"line {at[1]}" if at[0] == file else f"line {at[1]} of {str(at[0])!r}"
