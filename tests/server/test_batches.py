"""Batches over HTTP: the results of `onward batch`, also after interruptions, and their owners."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from live_server import MESSAGES, PLAIN, LiveServer, text_of
from openai.types import Batch

import onward
from onward.batches import BatchInput, BatchJob, BatchResults, EngineReplica
from onward.protocols import BodyReader

Start = Callable[..., LiveServer]
SECONDS = 120
URL = "/v1/completions"


def line(at: object, body: Mapping[str, Any] | None = None, url: str = URL) -> dict[str, Any]:
    usual = {"model": "demo", "prompt": f"Once {at}", "max_tokens": 6, "temperature": 1.0}
    return {"custom_id": f"line-{at}", "method": "POST", "url": url, "body": usual if body is None else body}


def content_of(lines: list[Any]) -> bytes:
    return "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines).encode()


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any = URL, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
    return client.batches.create(
        **{"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **fields}
    )


def has_ended(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


def wait(client: openai.OpenAI, id: str, condition: Callable[[Batch], bool] = has_ended) -> Batch:
    end = time.monotonic() + SECONDS
    while not condition(batch := client.batches.retrieve(id)):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def text_at(client: openai.OpenAI, id: str | None) -> bytes:
    return b"" if id is None else client.files.content(id).read()


def by_command(lm: onward.LanguageModel, source: bytes, created: int, folder: Path) -> bytes:
    """The output of `onward batch` for a file with this modification time."""
    folder.mkdir()
    (folder / "in.jsonl").write_bytes(source)
    os.utime(folder / "in.jsonl", (created, created))
    batch = BatchInput(folder / "in.jsonl")
    with BatchResults(folder / "out.jsonl", batch) as results, onward.Engine(lm) as engine:
        replica = EngineReplica(engine, BodyReader(lm, "demo"))
        asyncio.run(BatchJob(batch, results, lambda: replica, chunk=1, ahead=8).run())
    return (folder / "out.jsonl").read_bytes()


def served(results: bytes, ok: bool = True) -> bytes:
    """The results with the status 200, or the others."""
    lines = [each for each in results.splitlines(keepends=True) if each]
    return b"".join(each for each in lines if ((json.loads(each)["response"] or {}).get("status_code") == 200) == ok)


LINES: list[Any] = [
    *(line(at) for at in range(12)),
    line("seeded", {"model": "demo", "prompt": "A", "max_tokens": 4, "temperature": 1.0, "seed": 3, "n": 2}),
    line("no limit", {"prompt": "The end"}),
    line("wrong", {"model": "demo", "prompt": "A", "max_tokens": -2}),
    line("unknown", {"model": "demo", "prompt": "A", "no_such_field": 1}),
    line("stream", {"model": "demo", "prompt": "A", "stream": True}),
]


def test_results_equal_those_of_the_command(server: LiveServer, lm: onward.LanguageModel, tmp_path: Path) -> None:
    with server.openai() as client:
        batch = begin(client, LINES, metadata={"a": "b"})
        assert batch.status == "validating"
        assert (batch.metadata, batch.endpoint, batch.completion_window) == ({"a": "b"}, URL, "24h")
        done = wait(client, batch.id)
        assert done.status == "completed"
        counts = done.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (len(LINES), len(LINES) - 3, 3)
        times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert list(times) == sorted(time or 0 for time in times), times
        assert done.expires_at == done.created_at + 24 * 3600
        source = client.files.retrieve(done.input_file_id)
        whole = by_command(lm, content_of(LINES), source.created_at, tmp_path / "command")
        assert text_at(client, done.output_file_id) == served(whole)
        assert text_at(client, done.error_file_id) == served(whole, ok=False)
        assert done.output_file_id is not None
        assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
        assert done in list(client.batches.list())
    metrics = server.get("/metrics").text
    assert 'onward_batches_total{status="completed"} 1.0' in metrics
    assert f'onward_batch_lines_total{{model="demo",result="completed"}} {len(LINES) - 3}.0' in metrics


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    ],
)
def test_each_endpoint_has_batches(server: LiveServer, url: str, body: dict[str, Any]) -> None:
    with server.openai() as client:
        done = wait(client, begin(client, [line(1, body, url)], url).id)
        result = json.loads(text_at(client, done.output_file_id))
        assert (result["custom_id"], result["response"]["status_code"]) == ("line-1", 200)


# Lines, and of each problem the line, the code and the param.
INVALID: list[tuple[list[Any], list[tuple[int | None, str, str | None]]]] = [
    ([], [(None, "empty_file", None)]),
    (["", "  "], [(None, "empty_file", None)]),
    ([line(1), "{"], [(2, "invalid_json_line", None)]),
    ([line(1), "[1]", line(1)], [(2, "invalid_json_line", None), (3, "duplicate_custom_id", "custom_id")]),
    ([{**line(1), "custom_id": 3}], [(1, "missing_required_parameter", "custom_id")]),
    ([{**line(1), "method": "GET"}], [(1, "invalid_method", "method")]),
    ([line(1, url="/v1/images")], [(1, "invalid_url", "url")]),
    ([line(1, {"messages": MESSAGES}, "/v1/chat/completions")], [(1, "invalid_url", "url")]),
    ([line(1), line(2, {"model": "other", "prompt": "A"})], [(2, "model_not_found", "body.model")]),
]


@pytest.mark.parametrize("invalid", INVALID, ids=[each[1][0][1] + str(at) for at, each in enumerate(INVALID)])
def test_a_file_with_invalid_lines_fails_before_any_work(server: LiveServer, invalid: Any) -> None:
    lines, problems = invalid
    with server.openai() as client:
        batch = wait(client, begin(client, lines).id)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert [(each.line, each.code, each.param) for each in batch.errors.data or []] == problems


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"input_file_id": "file-1"}, 404, "input_file_id"),
    ({"input_file_id": "../lock"}, 404, "input_file_id"),
    ({"input_file_id": 1}, 400, "input_file_id"),
    ({"endpoint": "/v1/images"}, 400, "endpoint"),
    ({"endpoint": None}, 400, "endpoint"),
    ({"completion_window": "1s"}, 400, "completion_window"),
    ({"completion_window": "31d"}, 400, "completion_window"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    ({"metadata": {f"{at}": "" for at in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after.anchor"),
    ({"no_such_field": 1}, 400, "no_such_field"),
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{at}-{each[2]}" for at, each in enumerate(BAD)])
def test_invalid_bodies_are_refused(server: LiveServer, bad: Any) -> None:
    fields, status, param = bad
    with server.openai() as client:
        file = client.files.create(file=("a", content_of([line(1)])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h", **fields}
    answer = server.post("/v1/batches", {name: value for name, value in body.items() if value is not None})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_an_owner_is_an_api_key(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=("first-key", "second-key"))
    with server.openai("first-key") as first, server.openai("second-key") as second:
        batch = begin(first, [line(1)])
        for call in (second.batches.retrieve, second.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        assert list(second.batches.list()) == []
        done = wait(first, batch.id)
        with pytest.raises(openai.NotFoundError):
            second.files.content(done.output_file_id or "")
        assert [each.id for each in first.batches.list()] == [batch.id]


def slow(count: int, tokens: int = 200) -> list[Any]:
    body = {"model": "demo", "prompt": "A", "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    return [line(at, body) for at in range(count)]


def stored(lm: onward.LanguageModel, folder: Path) -> LiveServer:
    return LiveServer({"demo": lm}, {"max_sequences": 4}, files_dir=folder)


def completed(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.completed


def some(batch: Batch) -> bool:
    return completed(batch) >= 2


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_cancelled_batch_keeps_its_finished_lines(start: Start, lm: onward.LanguageModel, tmp_path: Path) -> None:
    server = start({"demo": lm}, engine={"max_sequences": 4})
    lines = slow(60)
    with server.openai() as client:
        batch, waiting = begin(client, lines), begin(client, lines)
        wait(client, batch.id, some)
        assert client.batches.cancel(waiting.id).status == "cancelling"
        ended = wait(client, waiting.id)
        assert (ended.status, ended.output_file_id) == ("cancelled", None), "it has not begun"
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended = wait(client, batch.id)
        assert (ended.status, ended.error_file_id) == ("cancelled", None)
        assert ended.cancelled_at is not None
        assert ended.cancelling_at is not None
        finished = text_at(client, ended.output_file_id).splitlines()
        assert ended.request_counts is not None
        assert 2 <= len(finished) == ended.request_counts.completed < len(lines)
        created = client.files.retrieve(batch.input_file_id).created_at
        first = content_of(lines[: len(finished)])
        whole = by_command(lm, first, created, tmp_path / "command").splitlines()
        assert set(finished) & set(whole) == set(whole), "lines are served about in order, and bit for bit"
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
    server.wait_idle()


def test_a_batch_continues_after_restarts(tmp_path: Path, lm: onward.LanguageModel) -> None:
    lines = slow(40)
    id, seen = "", 0
    for _ in range(3):
        with stored(lm, tmp_path / "files") as server, server.openai() as client:
            if not id:
                id = begin(client, lines).id
            wait(client, id, lambda batch, before=seen: completed(batch) > before)  # type: ignore[misc]
            server.app.batches.stop()
            until(lambda live=server: not live.app.batches.running)  # type: ignore[misc]
            seen = completed(client.batches.retrieve(id))
            assert 0 < seen < len(lines), "it stops at the end of a line"
            assert client.batches.retrieve(id).status == "in_progress"
    with stored(lm, tmp_path / "files") as server, server.openai() as client:
        done = wait(client, id)
        assert done.status == "completed"
        created = client.files.retrieve(done.input_file_id).created_at
        whole = by_command(lm, content_of(lines), created, tmp_path / "command")
        assert text_at(client, done.output_file_id) == whole
        metrics = server.get("/metrics").text
    assert f'onward_batch_lines_total{{model="demo",result="completed"}} {len(lines) - seen}.0' in metrics
    assert not list((tmp_path / "files").glob("*.parts"))


def test_a_killed_server_loses_no_line(tmp_path: Path, lm: onward.LanguageModel) -> None:
    """A kill leaves the folder as it is while a batch runs."""
    lines = slow(40)
    with stored(lm, tmp_path / "files") as server, server.openai() as client:
        id = begin(client, lines).id
        wait(client, id, some)
        shutil.copytree(tmp_path / "files", tmp_path / "left")
    for file in (tmp_path / "files").glob("file-*"):  # with its time
        if (tmp_path / "left" / file.name).exists():
            shutil.copystat(file, tmp_path / "left" / file.name)
    with stored(lm, tmp_path / "left") as server, server.openai() as client:
        done = wait(client, id)
        created = client.files.retrieve(done.input_file_id).created_at
        whole = by_command(lm, content_of(lines), created, tmp_path / "command")
        assert (done.status, text_at(client, done.output_file_id)) == ("completed", whole)
        metrics = server.get("/metrics").text
    assert f'result="completed"}} {len(lines)}.0' not in metrics, "some were there"


def test_an_input_deleted_during_its_batch_is_removed_at_the_end(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, engine={"max_sequences": 4})
    with server.openai() as client:
        batch = begin(client, slow(12))
        wait(client, batch.id, some)
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)
        done = wait(client, batch.id)
        assert (done.status, len(text_at(client, done.output_file_id).splitlines())) == ("completed", 12)
        until(lambda: not server.app.files.path(batch.input_file_id).exists())
        assert [file.id for file in client.files.list()] == [done.output_file_id]


def test_a_batch_expires(tmp_path: Path, lm: onward.LanguageModel) -> None:
    lines = slow(40)
    with stored(lm, tmp_path / "files") as server, server.openai() as client:
        id = begin(client, lines).id
        wait(client, id, some)
        server.app.batches.find("", id).expires_at = int(time.time()) - 1
        server.app.batches.expire()
        done = wait(client, id)
        assert done.status == "expired"
        output, errors = text_at(client, done.output_file_id), text_at(client, done.error_file_id)
        late = [json.loads(each) for each in errors.splitlines()]
        assert len(output.splitlines()) + len(late) == len(lines)
        assert {each["error"]["code"] for each in late} == {"batch_expired"}
        assert {each["response"] for each in late} == {None}


def test_results_that_exceed_the_space_end_the_batch(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, files_space=30_000, engine={"max_sequences": 4})
    with server.openai() as client:
        done = wait(client, begin(client, slow(60, 20)).id)
        assert (done.status, done.errors and (done.errors.data or [])[0].code) == ("failed", "files_space")
        assert text_at(client, done.output_file_id)


def test_other_requests_run_during_a_batch(start: Start, lm: onward.LanguageModel) -> None:
    """Their text is the same, and the batch serves one line at a time."""
    server = start({"demo": lm}, engine={"max_sequences": 8})
    body = {"prompt": "Once", "max_tokens": 60, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    alone = text_of(server.stream(URL, body).chunks)
    with server.openai() as client:
        batch = begin(client, slow(200, 20))
        wait(client, batch.id, some)
        most = []
        long = {**body, "max_tokens": 400, "stream": True}
        with httpx2.stream("POST", f"{server.url}{URL}", json=long, **PLAIN) as response:
            for at, _ in enumerate(response.iter_lines()):
                if at > 150:  # the lines that ran before have ended
                    most.append(server.engines["demo"].stats().running)
        assert text_of(server.stream(URL, body).chunks) == alone
        assert max(most) <= 2
        client.batches.cancel(batch.id)
        assert wait(client, batch.id).status == "cancelled"
