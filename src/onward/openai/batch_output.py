"""The results of a batch that one engine serves: a file that grows by a line for each."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from onward.errors import RequestError
from onward.files import write_whole
from onward.openai.batch import BatchInput, result_line


class BatchOutput:
    """The results of a batch, a line each, as they come. A context manager that holds the file open.

    What an earlier run left is kept as far as it is of use: lines that were served. `done` has the ids of their results
    by custom_id. A line that a kill cut short, and those that failed, are dropped before the first new one is written,
    so in the end every line of the input has one result.

    Raises:
        RequestError: the file cannot be read or written, is the input, or holds anything but results of this batch.
    """

    def __init__(self, file: Path, batch: BatchInput) -> None:
        self.file = file
        self.done: dict[str, str] = {}
        self._content: IO[bytes] | None = None
        self._batch = batch
        try:
            if file.exists():
                if os.path.samefile(file, batch.source):
                    raise RequestError(f"{str(file)!r} is the batch itself: name another file for the results")
                if file.is_file():
                    self._resume()
        except OSError as error:
            raise self._failure(error) from error

    def drop_changed(self, fingerprint: str) -> None:
        """Drop what lines that have changed were answered, or another model: nothing of that kind is done."""
        if not self.done:
            return
        ids = {line.custom_id: line.id(fingerprint) for line in self._batch.lines() if line.custom_id in self.done}
        changed = [name for name, id in self.done.items() if ids.get(name) != id]
        if changed:
            for name in changed:
                del self.done[name]
            self._rewrite()

    def sort(self) -> None:
        """Bring the results into the order of the batch's lines. Nothing happens to what is no file, such as a pipe."""
        if not self.file.is_file():
            return
        places: dict[str | int, int] = {}  # by custom_id, or by number where the line has none
        at = 0
        with self.file.open("rb") as content:
            for text in content:
                result = json.loads(text)
                places[_place(result["custom_id"], result["error"])] = at
                at += len(text)
        order = [places[line.custom_id or line.number] for line in self._batch.lines()]
        if order == sorted(order):
            return

        def write(temporary: Path) -> None:
            with self.file.open("rb") as content, temporary.open("wb") as ordered:
                for at in order:
                    content.seek(at)
                    ordered.write(content.readline())
            shutil.copymode(self.file, temporary)

        try:
            write_whole(self.file, write)
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
        try:
            self._content.write(result_line(result))
            self._content.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _resume(self) -> None:
        """Read what is done, and drop the rest."""
        dropped = False
        for text, custom_id, id in self._results():
            if custom_id is None:
                dropped = True
            elif custom_id in self.done:
                raise RequestError(f"{str(self.file)!r} has two results of custom_id {custom_id!r}: name another file")
            else:
                self.done[custom_id] = id
                dropped = dropped or not text.endswith(b"\n")
        if dropped:
            self._rewrite()

    def _rewrite(self) -> None:
        """Keep what is done alone."""
        write_whole(self.file, self._write_done)

    def _write_done(self, temporary: Path) -> None:
        with temporary.open("wb") as content:
            for text, custom_id, _ in self._results():
                if custom_id in self.done:
                    content.write(text.rstrip(b"\r\n") + b"\n")
        shutil.copymode(self.file, temporary)

    def _results(self) -> Iterator[tuple[bytes, str | None, str]]:
        """The lines of the file, each with its custom_id, where it was served, and its id."""
        with self.file.open("rb") as content:
            for number, text in enumerate(content, 1):
                try:
                    result = json.loads(text)
                except (ValueError, RecursionError):
                    if not text.endswith(b"\n"):  # the last one, which was being written
                        yield text, None, ""
                        return
                    result = None
                custom_id = served_id(result, number, self.file, self._batch)
                yield text, custom_id, result["id"]

    def _failure(self, error: OSError) -> RequestError:
        return RequestError(f"the results cannot be written to {str(self.file)!r}: {error.strerror or error}")


def served_id(result: Any, number: int, file: Path, batch: BatchInput) -> str | None:
    """The custom_id of a row of a file of results, where it was served.

    Raises:
        RequestError: it is no result, or one of another batch.
    """
    if not isinstance(result, dict) or not {"id", "custom_id", "response", "error"} <= set(result):
        raise RequestError(f"line {number} of {str(file)!r} is no result of a batch: name another file")
    custom_id, response = result["custom_id"], result["response"]
    if custom_id is not None and custom_id not in batch.custom_ids:
        raise RequestError(
            f"{str(file)!r} has a result of custom_id {custom_id!r}, which {str(batch.source)!r} does not have: it is "
            "of another batch, so name another file"
        )
    is_served = isinstance(response, dict) and response.get("status_code") == 200
    return custom_id if is_served else None


def _place(custom_id: str | None, error: Mapping[str, Any] | None) -> str | int:
    if custom_id is not None:
        return custom_id
    assert error is not None, "what has no custom_id is refused"
    line: int = error["line"]
    return line
