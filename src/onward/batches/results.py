"""The results of a batch: on disk as they arrive, and finally in the order of the input.

While a batch runs, its results are appended to a journal in a folder beside the output, `OUT.parts`, with one file per
run. At the end the output is written in the order of the input and renamed into place; for a folder, file by file,
followed by `_manifest.json`, which marks it as complete. Then the journals are removed.

A result is found by its id, a hash of its request and the model, so a line is served at least once and counts once. Ids
and offsets are in memory, about 200 bytes per line; lines are not.
"""

import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from onward.batches.line import BatchInput, BatchLine, result_line, rows_of, write_rows
from onward.errors import RequestError
from onward.util.files import write_whole

_MANIFEST, _LOCK, _JOURNALS = "_manifest.json", "lock", "*.jsonl"


class LineResult(NamedTuple):
    """A result. id: see `BatchLine.id`. text: the output line. failed: whether it is an error. tokens: generated for
    it."""

    id: str
    text: bytes
    failed: bool
    tokens: int = 0


class BatchResults:
    """The results of one batch. A context manager that locks the output against other processes.

    Results of earlier runs are included, except for failed lines, which are served again.

    destination: a file, or a folder if the batch is one. Anything else, such as a pipe, gets the results at the end,
    and has no earlier ones. Raises `RequestError`: the output cannot be read or written, is the input, contains
    anything but results of this batch, or is used by another process.
    """

    def __init__(self, destination: Path, batch: BatchInput) -> None:
        self.destination = destination
        self._batch = batch
        self._places: dict[str, tuple[Path, int]] = {}
        self._journal: IO[bytes] | None = None
        self._has_new = False
        try:
            if destination.exists():
                if os.path.samefile(destination, batch.source):
                    raise RequestError(f"{str(destination)!r} is the batch itself: choose another output")
                if destination.is_dir() != batch.source.is_dir():
                    kind = "a folder" if batch.source.is_dir() else "a file"
                    message = f"{str(batch.source)!r} is {kind}, but {str(destination)!r} is not"
                    raise RequestError(f"{message}: choose an output of the same kind")
            self._is_stream = destination.exists() and not (destination.is_file() or destination.is_dir())
            self._parts = destination.resolve().with_name(f"{destination.resolve().name}.parts")
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        try:
            if self._is_stream:
                self._parts = Path(tempfile.mkdtemp(prefix="onward-batch-"))
            self._parts.mkdir(exist_ok=True)
            self._lock = (self._parts / _LOCK).open("w")
        except OSError as error:
            raise self._failure(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except BlockingIOError:
            self._lock.close()
            raise RequestError(f"another process is using {str(self._parts)!r}: wait for it to end") from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        """Leave the folder of journals if they have results that the output lacks."""
        if self._journal is not None:
            with suppress(OSError):  # after a failed write, which was already raised
                self._journal.close()
            if not self._has_new:
                Path(self._journal.name).unlink(missing_ok=True)
        if self._is_stream or not any(self._parts.glob(_JOURNALS)):
            shutil.rmtree(self._parts, ignore_errors=True)
        self._lock.close()

    def has(self, id: str) -> bool:
        return id in self._places

    def add(self, results: Iterable[LineResult]) -> None:
        """Append results, and pass them to the operating system immediately, so that they survive this process."""
        self._has_new = True
        self._append((result.id, result.text) for result in results)

    def finish(self, fingerprint: str) -> None:
        """Write the output, and remove the journals. Every line has a result, or is invalid."""
        try:
            if self._batch.source.is_dir():
                self._write_folder(fingerprint)
            else:
                self._write(self._batch.source, self.destination, fingerprint)
            self.discard()
        except OSError as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        """Remove the journals. Raises `OSError`."""
        shutil.rmtree(self._parts)

    def _append(self, lines: Iterable[tuple[str, bytes]]) -> None:
        places: dict[str, tuple[Path, int]] = {}
        try:
            if self._journal is None:
                self._journal = (self._parts / f"{uuid.uuid4().hex}.jsonl").open("wb")
            for id, text in lines:
                places[id] = (Path(self._journal.name), self._journal.tell())
                self._journal.write(text)
            self._journal.flush()
        except OSError as error:
            raise self._failure(error) from error
        self._places |= places

    def _resume(self) -> None:
        """Find finished lines in the journals of earlier runs, and in an output, whose results are copied to a
        journal."""
        for journal in self._parts.glob(_JOURNALS):
            at = 0
            for size, custom_id, result in self._results_of(journal):
                if custom_id is not None:
                    self._places[result["id"]] = (journal, at)
                at += size
        for file in self._output_files():
            seen: set[str] = set()
            for _, custom_id, result in self._results_of(file):
                if custom_id in seen:
                    raise RequestError(
                        f"{str(file)!r} has two results for custom_id {custom_id!r}: choose another output"
                    )
                if custom_id is not None:
                    seen.add(custom_id)
                    if not self.has(result["id"]):
                        self._append([(result["id"], result_line(result))])

    def _results_of(self, file: Path) -> Iterator[tuple[int, str | None, dict[str, Any]]]:
        """The results in a file: the length of the line, the custom_id if it was served, and the result. Raises
        `RequestError`: a line is not a result, or belongs to another batch."""
        for number, text in rows_of(file, results=True):
            try:
                result = json.loads(text)
            except (ValueError, RecursionError):
                if isinstance(text, bytes) and not text.endswith(b"\n"):  # the last line, cut off while being written
                    return
                result = None
            if not isinstance(result, dict) or not {"id", "custom_id", "response", "error"} <= set(result):
                raise RequestError(f"line {number} of {str(file)!r} is not a batch result: choose another output")
            custom_id, response = result["custom_id"], result["response"]
            if custom_id is not None and custom_id not in self._batch.custom_ids:
                source = str(self._batch.source)
                message = f"{str(file)!r} has results of another batch: {source!r} has no custom_id {custom_id!r}"
                raise RequestError(f"{message}; choose another output")
            is_served = isinstance(response, dict) and response.get("status_code") == 200
            yield len(text), custom_id if is_served else None, result

    def _output_files(self) -> list[Path]:
        if self.destination.is_dir():
            return [path for file in self._batch.files if (path := self.destination / file.name).exists()]
        return [self.destination] if self.destination.is_file() else []

    def _write_folder(self, fingerprint: str) -> None:
        self.destination.mkdir(exist_ok=True)
        manifest = self.destination / _MANIFEST
        manifest.unlink(missing_ok=True)
        counts = {file.name: self._write(file, self.destination / file.name, fingerprint) for file in self._batch.files}
        content = json.dumps({"model": fingerprint, "files": counts}, indent=2) + "\n"
        self._write_file(manifest, lambda path: path.write_text(content))

    def _write(self, source: Path, file: Path, fingerprint: str) -> int:
        """Write the results of a file in the order of its lines. Returns their number."""
        count = 0

        def lines() -> Iterator[bytes]:
            nonlocal count
            for _, result in self.lines(source, fingerprint):
                assert result is not None, "every line has been served"
                count += 1
                yield result

        self._write_file(file, lambda path: write_rows(path, lines(), file))
        return count

    def lines(self, source: Path, fingerprint: str) -> Iterator[tuple[BatchLine, bytes | None]]:
        """The lines of an input file, and the result of each; None if it has not been served."""
        journals: dict[Path, IO[bytes]] = {}
        try:
            for line in self._batch.lines_of(source):
                yield line, self._line(line, fingerprint, journals)
        finally:
            for journal in journals.values():
                journal.close()

    def _line(self, line: BatchLine, fingerprint: str, journals: dict[Path, IO[bytes]]) -> bytes | None:
        """The result of a line. journals: the open ones, one for each earlier run."""
        id = line.id(fingerprint)
        if line.error is not None:
            return result_line(line.refused(id))
        if not self.has(id):
            return None
        journal, at = self._places[id]
        if journal not in journals:
            journals[journal] = journal.open("rb")
        journals[journal].seek(at)
        return journals[journal].readline().rstrip(b"\n") + b"\n"

    def _write_file(self, file: Path, write: Callable[[Path], object]) -> None:
        """Write a file atomically, with its present mode, or that of any new file."""

        def write_with_mode(temporary: Path) -> None:
            write(temporary)
            shutil.copymode(file if file.exists() else self._lock.name, temporary)

        if self._is_stream:
            write(file)
        else:
            write_whole(file, write_with_mode)

    def _failure(self, error: OSError) -> RequestError:
        return RequestError(f"the results cannot be written to {str(self.destination)!r}: {error.strerror or error}")
