"""The files of batches: JSON lines, or Parquet with the fields of a line as columns.

A Parquet file of requests has the columns custom_id, method, url and body, which is JSON as text; one of results has
id, custom_id, and as JSON text response and error. Parquet wants pyarrow, which comes with `onward[cluster]`.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onward.errors import RequestError, one_line
from onward.text_input import TextError, parse_json, read_lines

_SUFFIXES = (".jsonl", ".parquet")
# Columns that are JSON as text; the others are texts.
_REQUEST = {"custom_id": False, "method": False, "url": False, "body": True}
_RESULT = {"id": False, "custom_id": False, "response": True, "error": True}
# Rows that are read or written at once.
_ROWS = 256


def batch_files(source: Path) -> list[Path]:
    """The file itself; of a folder, its .jsonl and .parquet files in the order of their names.

    Raises:
        RequestError: there is none.
    """
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
