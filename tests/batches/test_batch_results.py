"""The results of a batch on disk: no written result is lost, and nothing else is overwritten."""

import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.batches import BatchInput, BatchResults, LineResult
from onward.batches.line import result_line
from onward.errors import OnwardError, RequestError

PRINT = "a model"


def write(file: Path, *custom_ids: str) -> Path:
    line = {"method": "POST", "url": "/v1/completions", "body": "é"}
    file.write_text("".join(json.dumps({"custom_id": custom_id, **line}) + "\n" for custom_id in custom_ids))
    return file


def answers(batch: BatchInput, *, skip: int = 0) -> Iterator[LineResult]:
    for line in list(batch.lines())[skip:]:
        id = line.id(PRINT)
        yield LineResult(id, result_line(line.served(id, {"id": "cmpl-1", "usage": {}, "text": "é\n"})), False)


def done(results: BatchResults, batch: BatchInput) -> list[bool]:
    return [results.has(line.id(PRINT)) for line in batch.lines()]


def finished(out: Path, batch: BatchInput) -> bytes:
    """The output, and the unfinished lines."""
    with BatchResults(out, batch) as results:
        results.add(each for each, is_done in zip(answers(batch), done(results, batch), strict=True) if not is_done)
        results.finish(PRINT)
    return out.read_bytes()


@settings(max_examples=40)
@given(share=st.floats(0, 1), of_output=st.booleans())
def test_whole_lines_survive_a_kill_at_any_byte(
    share: float, of_output: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    batch = BatchInput(write(folder / "in.jsonl", "a", "b", "c", "d"))
    whole = finished(folder / "whole.jsonl", batch)
    out, parts = folder / "out.jsonl", folder / "out.jsonl.parts"
    if of_output:
        file = out
        out.write_bytes(whole)
    else:
        with BatchResults(out, batch) as results:
            results.add(answers(batch))
        (file,) = parts.glob("*.jsonl")
    assert file.read_bytes() == whole
    size = round(share * len(whole))
    file.write_bytes(whole[:size])
    # A line counts from its last brace on; its end may be lost.
    count = whole[:size].count(b"\n") + (whole[size : size + 1] == b"\n")
    with BatchResults(out, batch) as results:
        assert done(results, batch) == [True] * count + [False] * (4 - count)
    assert finished(out, batch) == whole
    assert not parts.exists()


def test_stopped_runs_leave_only_finished_results(tmp_path: Path) -> None:
    batch, out = BatchInput(write(tmp_path / "in.jsonl", "a", "b")), tmp_path / "out.jsonl"
    with BatchResults(out, batch):
        pass
    assert list(tmp_path.iterdir()) == [batch.source]
    whole = finished(out, batch)
    with BatchResults(out, batch) as results:
        assert done(results, batch) == [True, True]
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}, "nothing was new"
    assert out.read_bytes() == whole


def test_output_keeps_its_mode_or_gets_the_default(tmp_path: Path) -> None:
    batch, out = BatchInput(write(tmp_path / "in.jsonl", "a")), tmp_path / "out.jsonl"
    before = os.umask(0o027)
    try:
        finished(out, batch)
        assert stat.S_IMODE(out.stat().st_mode) == 0o640
        out.chmod(0o600)
        finished(out, batch)
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_symlinked_output_stays_a_symlink(tmp_path: Path) -> None:
    batch, out = BatchInput(write(tmp_path / "in.jsonl", "a")), tmp_path / "out.jsonl"
    (tmp_path / "there").mkdir()
    out.symlink_to(tmp_path / "there" / "real.jsonl")
    whole = finished(out, batch)
    assert out.is_symlink()
    assert (tmp_path / "there" / "real.jsonl").read_bytes() == whole


def test_a_pipe_gets_the_results_at_the_end(tmp_path: Path) -> None:
    batch, pipe = BatchInput(write(tmp_path / "in.jsonl", "b", "a")), tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    with BatchResults(pipe, batch) as results:
        results.add(answers(batch))
        reader.start()
        results.finish(PRINT)
        reader.join(60)
    assert [json.loads(line)["custom_id"] for line in read[0].splitlines()] == ["b", "a"]
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "pipe"}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("in.jsonl", "is the batch itself"),
        ("link.jsonl", "is the batch itself"),
        ("folder", "'in.jsonl' is a file, but 'folder' is not"),
        ("other.jsonl", "has no custom_id 'other'"),
        ("double.jsonl", "two results for custom_id 'a'"),
        ("notes.jsonl", "line 1 of 'notes.jsonl' is not a batch result"),
        ("torn.jsonl", "line 1 of 'torn.jsonl' is not a batch result"),
        ("no/folder/out.jsonl", "cannot be written to"),
    ],
)
def test_unrelated_output_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = BatchInput(write(Path("in.jsonl"), "a", "b"))
    Path("link.jsonl").symlink_to("in.jsonl")
    Path("folder").mkdir()
    result: dict[str, Any] = {"id": "1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    Path("double.jsonl").write_bytes(result_line(result) * 2)
    Path("torn.jsonl").write_bytes(result_line(result)[:9] + b"\n" + result_line(result))
    Path("other.jsonl").write_bytes(result_line(result | {"custom_id": "other"}))
    Path("notes.jsonl").write_text("dear diary\n")
    files = set(Path().iterdir())
    with pytest.raises(OnwardError, match=message), BatchResults(Path(out), batch):
        pass
    assert set(Path().iterdir()) == files


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    batch = BatchInput(write(tmp_path / "in.jsonl", "a"))
    with (
        BatchResults(tmp_path / "out.jsonl", batch),
        pytest.raises(RequestError, match="another process is using"),
        BatchResults(tmp_path / "out.jsonl", batch),
    ):
        pass


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no .jsonl or .parquet files"):
        BatchInput(tmp_path)
