"""A job whose replicas die has the same output as one whose replicas live, and no line counts twice."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.batches import BatchInput, BatchJob, BatchLine, BatchResults, LineResult, Progress, ReplicaDiedError
from onward.batches.line import result_line
from onward.errors import EngineError, RequestError

PRINT = "a model"


class Killed(BaseException):
    """Ends a job at once. A KeyboardInterrupt would leave asyncio an unawaited task."""


class Fake:
    """A replica that answers with the custom_id, unless `fate` says that it dies over these lines."""

    def __init__(self, fate: Callable[[Sequence[BatchLine]], bool], fingerprint: str = PRINT) -> None:
        self._fate, self._fingerprint = fate, fingerprint
        self._dead = False

    async def load(self) -> str:
        await asyncio.sleep(0)
        return self._fingerprint

    async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
        for _ in lines:
            await asyncio.sleep(0)
        self._dead = self._dead or self._fate(lines)
        if self._dead:
            raise ReplicaDiedError("killed")
        return [self._answer(line) for line in lines]

    def close(self) -> None:
        self._dead = True

    def _answer(self, line: BatchLine) -> LineResult:
        id = line.id(self._fingerprint)
        if line.body == "bad":
            return LineResult(id, result_line(line.failed(id, RequestError("no"))), True)
        answer = line.served(id, {"id": "cmpl-1", "usage": {}, "seed": line.seed})
        return LineResult(id, result_line(answer), False, 2)


def write(file: Path, count: int, *, prefix: str = "", bad: Sequence[int] = (), torn: Sequence[int] = ()) -> Path:
    lines = []
    for at in range(count):
        line: dict[str, Any] = {"custom_id": f"{prefix}{at}", "method": "POST", "url": "/v1/completions"}
        line["body"] = "bad" if at in bad else at
        lines.append("{" if at in torn else json.dumps(line))
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def serve(
    source: Path,
    out: Path,
    fate: Callable[[Sequence[BatchLine]], bool] = lambda lines: False,
    replicas: int = 2,
    **amounts: int,
) -> Progress:
    batch = BatchInput(source)
    with BatchResults(out, batch) as results:
        return asyncio.run(BatchJob(batch, results, lambda: Fake(fate), replicas, **amounts).run())


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 300),
    replicas=st.integers(1, 5),
    chunk=st.sampled_from([1, 5, 32]),
    deaths=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
def test_crashes_leave_the_file_of_an_undisturbed_run(
    count: int,
    replicas: int,
    chunk: int,
    deaths: float,
    seed: int,
    stops: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """stops: runs before the last one end after this number of chunks, as if the driver were killed."""
    folder = tmp_path_factory.mktemp("job")
    source = write(folder / "in.jsonl", count, bad=range(0, count, 7), torn=range(3, count, 11))
    assert serve(source, folder / "still.jsonl", replicas=1).over == count
    generator = random.Random(seed)
    for stop in stops:
        chunks = iter(range(stop))

        def fate(lines: Sequence[BatchLine], chunks: Any = chunks) -> bool:
            if next(chunks, None) is None:
                raise Killed
            return False

        with suppress(Killed):
            serve(source, folder / "out.jsonl", fate, replicas, chunk=chunk)
    served = Counter[str | None]()

    def dies(lines: Sequence[BatchLine]) -> bool:
        """Never often enough over a line for the line to be to blame."""
        served.update(line.custom_id for line in lines)
        return max(served[line.custom_id] for line in lines) <= 2 and generator.random() < deaths

    serve(source, folder / "out.jsonl", dies, replicas, chunk=chunk)
    assert (folder / "out.jsonl").read_bytes() == (folder / "still.jsonl").read_bytes()
    assert not (folder / "out.jsonl.parts").exists()


def test_finished_lines_are_not_repeated(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", 200, bad=[7]), tmp_path / "out.jsonl"
    chunks = iter(range(3))
    asked: list[str | None] = []

    def three(lines: Sequence[BatchLine]) -> bool:
        if next(chunks, None) is None:
            raise Killed
        return False

    with pytest.raises(Killed):
        serve(source, out, three, replicas=1)
    progress = serve(source, out, lambda lines: asked.extend(line.custom_id for line in lines) or False)
    assert (progress.done_before, progress.served, progress.failed) == (95, 104, 1)
    assert len(set(asked)) == len(asked) == 105, "what failed is asked again"
    before = out.read_bytes()
    assert serve(source, out).done_before == 199
    assert out.read_bytes() == before


def test_a_line_that_kills_replicas_fails_alone(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl"
    progress = serve(source, out, lambda lines: any(line.custom_id == "41" for line in lines))
    assert (progress.served, progress.failed) == (99, 1)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["custom_id"] for result in results if result["response"]["status_code"] != 200] == ["41"]
    assert results[41]["response"]["status_code"] == 500
    assert "3 replicas died" in results[41]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(("chunk", "ahead"), [(1, 6), (4, 3)])
def test_lines_in_flight_per_replica_are_limited(tmp_path: Path, chunk: int, ahead: int) -> None:
    """Its engine is never short of lines, and memory holds no more."""
    running, most = 0, 0

    class Slow(Fake):
        async def serve(self, lines: Sequence[BatchLine]) -> list[LineResult]:
            nonlocal running, most
            running += len(lines)
            most = max(most, running)
            results = await super().serve(lines)
            running -= len(lines)
            return results

    batch = BatchInput(write(tmp_path / "in.jsonl", 50))
    with BatchResults(tmp_path / "out.jsonl", batch) as results:
        start = lambda: Slow(lambda lines: False)  # noqa: E731
        asyncio.run(BatchJob(batch, results, start, chunk=chunk, ahead=ahead).run())
    assert most == chunk * ahead


def test_an_input_folder_gives_an_output_folder_with_a_manifest(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name, count in (("b.jsonl", 3), ("a.jsonl", 40)):
        write(source / name, count, prefix=name)
    assert serve(source, out).served == 43
    assert sorted(file.name for file in out.iterdir()) == ["_manifest.json", "a.jsonl", "b.jsonl"]
    assert json.loads((out / "_manifest.json").read_text()) == {"model": PRINT, "files": {"a.jsonl": 40, "b.jsonl": 3}}
    named = [json.loads(line)["custom_id"] for line in (out / "b.jsonl").read_text().splitlines()]
    assert named == ["b.jsonl0", "b.jsonl1", "b.jsonl2"]
    assert serve(source, out).done_before == 43


def test_parquet_equals_json_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = write(tmp_path / "in.jsonl", 600, bad=[3])
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for row in rows:
        row["body"] = json.dumps(row["body"])
    rows[5]["body"] = '1, "method": "POST"'
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert serve(tmp_path / "in.parquet", tmp_path / "out.parquet").failed == 2
    found = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in found] == [None if at == 5 else str(at) for at in range(600)]
    assert json.loads(found[5]["error"])["code"] == "invalid_json_line"
    assert json.loads(found[3]["response"])["status_code"] == 400
    assert json.loads(found[4]["response"])["body"]["seed"] == BatchLine(5, "4").seed
    assert serve(tmp_path / "in.parquet", tmp_path / "out.parquet").done_before == 598
    parquet.write_table(arrow.Table.from_pylist([{"custom_id": "a"}]), tmp_path / "short.parquet")
    with pytest.raises(RequestError, match=r"lacks the columns method, url, body"):
        BatchInput(tmp_path / "short.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(RequestError, match=r"text.parquet' cannot be read"):
        BatchInput(tmp_path / "text.parquet")


def test_unavailable_replicas_raise_one_error(tmp_path: Path) -> None:
    batch = BatchInput(write(tmp_path / "in.jsonl", 300))

    class Dying(Fake):
        async def load(self) -> str:
            raise ReplicaDiedError("no memory")

    def run(start: Callable[[], Fake]) -> None:
        with BatchResults(tmp_path / "out.jsonl", batch) as results:
            asyncio.run(BatchJob(batch, results, start, 2).run())

    with pytest.raises(EngineError, match="3 replicas in a row died while loading: no memory"):
        run(lambda: Dying(lambda lines: False))
    prints = iter(["one", "other"])
    with pytest.raises(RequestError, match="replicas would give different results"):
        run(lambda: Fake(lambda lines: False, next(prints)))
