"""What a job has answered so far, on the disk; in the end its output.

While a job runs, its results are in a folder beside the output, `OUT.parts`, in shards of some lines each. A shard is
written whole or not at all. At the end the output is written in the order of the input and renamed into place, for a
folder file by file and at last `_manifest.json`, which says that it is whole. Then the shards go.

A result is found by its id, a hash of its request and of the model. So a line is served at least once, and counts once:
two results of one id are the same. Of a line that has changed there is none. Ids and places are in memory, some 200
bytes a line; lines are not.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from onward.errors import RequestError
from onward.files import write_whole
from onward.openai.batch import BatchInput, BatchLine, result_line
from onward.openai.batch_files import rows_of, write_rows
from onward.openai.batch_output import served_id

_MANIFEST, _LOCK, _SHARDS = "_manifest.json", "lock", "*.jsonl"


class BatchResults:
    """The results of one job. A context manager that keeps other processes from the same output.

    What earlier runs answered is there, but for lines that failed: those are served again.

    Raises:
        RequestError: the output cannot be read or written, is the input, holds anything but results of this batch, or
            another process works at it.
    """

    def __init__(self, destination: Path, batch: BatchInput) -> None:
        self.destination = destination
        self._batch = batch
        self._parts = destination.with_name(f"{destination.name}.parts")
        self._places: dict[str, tuple[Path, int]] = {}
        if destination.exists():
            if os.path.samefile(destination, batch.source):
                raise RequestError(f"{str(destination)!r} is the batch itself: name another place for the results")
            if destination.is_dir() != batch.source.is_dir():
                kind = "a folder" if batch.source.is_dir() else "a file"
                raise RequestError(f"{str(batch.source)!r} is {kind}, and {str(destination)!r} is not: name one alike")

    def __enter__(self) -> Self:
        try:
            self._parts.mkdir(exist_ok=True)
            self._lock = (self._parts / _LOCK).open("w")
        except OSError as error:
            raise self._failure(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except BlockingIOError:
            self._lock.close()
            raise RequestError(f"another process works at {str(self._parts)!r}: let it end first") from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        """Leave the folder of shards where it has any."""
        with suppress(OSError):
            if not any(self._parts.glob(_SHARDS)):
                shutil.rmtree(self._parts)
        self._lock.close()

    def has(self, id: str) -> bool:
        """Whether there is a result of this id."""
        return id in self._places

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Put results on the disk, all or none of them."""
        self._add_lines(map(result_line, results))

    def finish(self, fingerprint: str) -> None:
        """Write the output, and remove the shards. Every line has a result, or is none itself."""
        try:
            if self._batch.source.is_dir():
                self._write_folder(fingerprint)
            else:
                self._write(self._batch.source, self.destination, fingerprint)
            shutil.rmtree(self._parts)
        except OSError as error:
            raise self._failure(error) from error

    # ── shards ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _add_lines(self, lines: Iterable[bytes]) -> None:
        shard, places = self._parts / f"{uuid.uuid4().hex}.jsonl", dict[str, tuple[Path, int]]()

        def write(temporary: Path) -> None:
            with temporary.open("wb") as content:
                for line in lines:
                    places[json.loads(line)["id"]] = (shard, content.tell())
                    content.write(line)

        try:
            write_whole(shard, write)
        except OSError as error:
            raise self._failure(error) from error
        self._places |= places

    def _resume(self) -> None:
        """Find what is done: in shards, and in an output of before, which becomes one."""
        for unfinished in self._parts.glob(".*.jsonl.*"):
            unfinished.unlink()  # by a kill
        for shard in self._parts.glob(_SHARDS):
            at = 0
            with shard.open("rb") as content:
                for number, text in enumerate(content, 1):
                    result = json.loads(text)
                    if served_id(result, number, shard, self._batch) is not None:
                        self._places[result["id"]] = (shard, at)
                    at += len(text)
        if any(True for _ in self._of_output()):
            self._add_lines(self._of_output())

    def _of_output(self) -> Iterator[bytes]:
        """The results of lines that were served, of the output as it is, if there is one."""
        for file in self._output_files():
            for number, text in rows_of(file, results=True):
                try:
                    result = json.loads(text)
                except (ValueError, RecursionError):
                    result = None
                if served_id(result, number, file, self._batch) is not None and not self.has(result["id"]):
                    yield result_line(result)

    def _output_files(self) -> list[Path]:
        if self.destination.is_dir():
            return [file for file in map(self._output_of, self._batch.files) if file.exists()]
        return [self.destination] if self.destination.exists() else []

    # ── the output ──────────────────────────────────────────────────────────────────────────────────────────────

    def _output_of(self, file: Path) -> Path:
        """Where the results of an input file go."""
        return self.destination / file.name

    def _write_folder(self, fingerprint: str) -> None:
        self.destination.mkdir(exist_ok=True)
        manifest = self.destination / _MANIFEST
        manifest.unlink(missing_ok=True)
        counts = {file.name: self._write(file, self._output_of(file), fingerprint) for file in self._batch.files}
        described = {"model": fingerprint, "files": counts}
        write_whole(manifest, lambda temporary: temporary.write_text(json.dumps(described, indent=2) + "\n"))

    def _write(self, source: Path, file: Path, fingerprint: str) -> int:
        """The results of a file in the order of its lines. Returns how many these are."""
        count = 0
        shards: dict[Path, IO[bytes]] = {}

        def lines() -> Iterator[bytes]:
            nonlocal count
            for line in self._batch.lines_of(source):
                count += 1
                yield self._line(line, fingerprint, shards)

        try:
            write_whole(file, lambda temporary: write_rows(temporary, lines(), file))
        finally:
            for content in shards.values():
                content.close()
        return count

    def _line(self, line: BatchLine, fingerprint: str, shards: dict[Path, IO[bytes]]) -> bytes:
        """The result of a line. shards: those that are open; chunks end nearly in order, so a few are enough."""
        id = line.id(fingerprint)
        if line.error is not None:
            return result_line(line.refused(id))
        shard, at = self._places[id]
        if shard not in shards:
            if len(shards) >= 16:
                shards.pop(next(iter(shards))).close()
            shards[shard] = shard.open("rb")
        shards[shard].seek(at)
        return shards[shard].readline()

    def _failure(self, error: OSError) -> RequestError:
        return RequestError(f"the results cannot be written to {str(self.destination)!r}: {error.strerror or error}")
