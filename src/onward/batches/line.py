"""The lines of OpenAI's batches: requests and results.

An input line is {"custom_id", "method": "POST", "url", "body"}, an output line {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. A result is determined by its line and the model, so a batch has one
output however it is run: the `id` is a hash of both, the default seed one of the `custom_id`, and `created` is the
input file's modification time. Values that depend on the run, such as cached tokens, are omitted.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onward.errors import OnwardError, RequestError, one_line
from onward.protocols import PROTOCOLS, ResponseKey, protocol_of, status_of
from onward.util.text import brief
from onward.util.text_input import LONGEST_LINE, TextError, check_value, parse_json, parse_request_json, read_lines

_SUFFIXES = (".jsonl", ".parquet")
# Columns of Parquet files, and whether their strings are JSON.
_REQUEST = {"custom_id": False, "method": False, "url": False, "body": True}
_RESULT = {"id": False, "custom_id": False, "response": True, "error": True}
_BATCH_ROWS = 256  # rows read or written at once


def batch_files(source: Path) -> list[Path]:
    """The file itself, or a folder's .jsonl and .parquet files, sorted by name. Raises `RequestError`: there are
    none."""
    if not source.is_dir():
        return [source]
    files = sorted(file for file in source.iterdir() if file.suffix in _SUFFIXES and not file.name.startswith("."))
    if not files:
        raise RequestError(f"the folder {str(source)!r} has no {' or '.join(_SUFFIXES)} files")
    return files


def rows_of(file: Path, *, results: bool = False) -> Iterator[tuple[int, str | bytes]]:
    """Read the rows of a file lazily, as JSON lines with their numbers from 1; without blank lines. results: read a
    file of results instead of requests. Raises `RequestError`: the file cannot be read."""
    if file.exists() and not file.is_file():
        raise RequestError(f"the batch {str(file)!r} is not a file: it is read twice, so it cannot be a pipe")
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


def write_rows(file: Path, lines: Iterable[bytes], target: Path) -> None:
    """Write results, each a JSON line, to a file. target: the final file, whose name determines the format."""
    if target.suffix == ".parquet":
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
                known = ", ".join(columns)
                raise RequestError(f"{str(file)!r} lacks the columns {', '.join(missing)}: a Parquet batch has {known}")
            for batch in content.iter_batches(_BATCH_ROWS, columns=list(columns)):
                for row in batch.to_pylist():
                    yield _row_text(row, columns)
    except ArrowInvalid as error:
        raise RequestError(f"the batch {str(file)!r} cannot be read: {one_line(error)}") from error


def _row_text(row: dict[str, Any], columns: dict[str, bool]) -> str:
    """A row as a JSON line. A string that should be JSON but isn't becomes the line, which is then invalid."""
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
            row = json.loads(line)
            for name in ("response", "error"):
                row[name] = None if row[name] is None else json.dumps(row[name])
            rows.append(row)
            if len(rows) == _BATCH_ROWS:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(arrow.Table.from_pylist(rows, schema))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RequestError("Parquet files require pyarrow: pip install 'onward[cluster]'") from error
    return pyarrow, pyarrow.parquet


def _unreadable(file: Path, error: OSError) -> RequestError:
    return RequestError(f"the batch {str(file)!r} cannot be read: {error.strerror or error}")


# Usage counts that depend on the other requests.
_RUN_COUNTS = (
    "accepted_prediction_tokens",
    "cache_read_input_tokens",
    "cached_tokens",
    "rejected_prediction_tokens",
)


@dataclass(frozen=True)
class BatchLine:
    """An input line. number: in its file, from 1. custom_id: None if it is unreadable. error: what is wrong with the
    line, as the output's "error"; then url and body are unset. created: the file's modification time, in seconds since
    1970."""

    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: Mapping[str, Any] | None = None
    created: int = 0

    @classmethod
    def read(cls, number: int, text: str | bytes, created: int = 0) -> Self:
        """Parse a line. Never raises: an invalid line has an `error`."""
        if len(text) > LONGEST_LINE:
            message = f"the line is longer than {LONGEST_LINE:,} bytes, the maximum for a request"
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
            message = f"custom_id must be a non-empty string; got {brief(custom_id)}"
            return cls._wrong(number, None, "missing_required_parameter", message, "custom_id")
        if method != "POST":
            message = f"method must be POST; got {brief(method)}"
            return cls._wrong(number, custom_id, "invalid_method", message, "method")
        if not isinstance(url, str) or url not in PROTOCOLS:
            message = f"url must be {' or '.join(PROTOCOLS)}; got {brief(url)}"
            return cls._wrong(number, custom_id, "invalid_url", message, "url")
        if "body" not in fields:
            return cls._wrong(number, custom_id, "missing_required_parameter", "body is required", "body")
        return cls(number, custom_id, url, fields["body"], created=created)

    def repeated(self, first: str) -> Self:
        """This line, refused because its custom_id is not unique. first: the line that has it."""
        message = f"{first} already has the custom_id {self.custom_id!r}: they must be unique"
        return self._wrong(self.number, None, "duplicate_custom_id", message, "custom_id")

    @classmethod
    def _wrong(cls, number: int, custom_id: str | None, code: str, message: str, param: str | None = None) -> Self:
        error = {"message": f"line {number}: {message}", "type": "invalid_request_error", "param": param, "code": code}
        return cls(number, custom_id, error=error | {"line": number})

    @property
    def seed(self) -> int:
        """The default seed, derived from the custom_id."""
        name = str(self.custom_id).encode("utf-8", "backslashreplace")
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 11  # 53 bits: JavaScript's numbers

    def id(self, fingerprint: str) -> str:
        """The id of the result: a hash of the request and of the serving model's fingerprint."""
        content = json.dumps([self.custom_id, self.url, self.body, self.error, fingerprint], sort_keys=True)
        return f"batch_req_{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"

    def key(self, id: str) -> ResponseKey:
        """The key of the response. id: of the result."""
        return ResponseKey(ResponseKey.new(self.created).text[:12] + _hash(id)[:20])

    def served(self, id: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The output line of a served request."""
        body = {**answer, "usage": _reproducible(answer["usage"])}
        if "created" in answer:
            kind, _, _ = answer["id"].partition("-")
            body |= {"id": f"{kind}-{_hash(id)}", "created": self.created}
        return self._result(id, 200, body)

    def failed(self, id: str, error: OnwardError) -> dict[str, Any]:
        """The output line of a failed request."""
        return self._result(id, status_of(error), protocol_of(self.url).error(error, f"req_{_hash(id)}"))

    def refused(self, id: str) -> dict[str, Any]:
        """The output line of an invalid line."""
        return {"id": id, "custom_id": self.custom_id, "response": None, "error": self.error}

    def expired(self, id: str) -> dict[str, Any]:
        """The output line of a line that was not served before its batch expired."""
        error = {"code": "batch_expired", "message": "the batch expired before this line was served"}
        return {"id": id, "custom_id": self.custom_id, "response": None, "error": error}

    def _result(self, id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": f"req_{_hash(id)}", "body": body}
        return {"id": id, "custom_id": self.custom_id, "response": response, "error": None}


def _custom_id_in(text: str | bytes) -> str | None:
    """The custom_id of a line with values that no request can contain."""
    try:
        fields = parse_json(text)
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        check_value(custom_id)
    except TextError:
        return None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _reproducible(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The counts that do not depend on the run."""
    counts = {name: _reproducible(value) if isinstance(value, Mapping) else value for name, value in usage.items()}
    return {name: value for name, value in counts.items() if name not in _RUN_COUNTS and value != {}}


def _hash(id: str) -> str:
    return id.rpartition("_")[2]


def result_line(result: Mapping[str, Any]) -> bytes:
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


class BatchInput:
    """The lines of a batch, which are read once on creation to count them and compare their ids.

    If several lines have the same custom_id, the first is served and the others are refused. source: a file, or a
    folder of files (see `batch_files`). count: number of lines. Raises `RequestError`: a file cannot be read.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files = batch_files(source)
        self.count = 0
        self._first: dict[str, tuple[Path, int]] = {}  # the first line of each custom_id
        for file in self.files:
            for line in self._read(file):
                self.count += 1
                if line.custom_id is not None:
                    self._first.setdefault(line.custom_id, (file, line.number))

    @property
    def custom_ids(self) -> AbstractSet[str]:
        return self._first.keys()

    def lines(self) -> Iterator[BatchLine]:
        """All lines that are not blank, read lazily."""
        for file in self.files:
            yield from self.lines_of(file)

    def lines_of(self, file: Path) -> Iterator[BatchLine]:
        """The lines of one file."""
        for line in self._read(file):
            at = (file, line.number)
            first = at if line.custom_id is None else self._first.get(line.custom_id, at)
            place = f"line {first[1]}" if first[0] == file else f"line {first[1]} of {str(first[0])!r}"
            yield line if first == at else line.repeated(place)

    def _read(self, file: Path) -> Iterator[BatchLine]:
        try:
            created = int(file.stat().st_mtime)
        except OSError as error:
            raise _unreadable(file, error) from error
        for number, text in rows_of(file):
            yield BatchLine.read(number, text, created)
