"""Batches that run in the server's engines, beside other requests.

A batch has a record, a JSON file in the folder of files, and while it runs a journal of results (batches/results.py).
So a batch that was interrupted by the end of the server continues where it was. Its results are those of
`onward batch`.

Batches are checked one after another. Then those of one client run one at a time, and those of two clients at once.
All of them are one client of an engine, and serve one line each while other requests run.
"""

import asyncio
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onward.batches import BatchInput, BatchJob, BatchResults, EngineReplica, Progress
from onward.batches.line import result_line
from onward.errors import EngineError, OnwardError
from onward.protocols import BodyError
from onward.server.files.records import (
    BatchProblem,
    BatchProblems,
    Ending,
    RequestCounts,
    StoredBatch,
    checked_lines,
)
from onward.server.files.store import FileStore, new_id
from onward.server.log import log, log_defect
from onward.server.metrics import Metrics
from onward.server.models import ServedModels
from onward.server.served import ServedModel
from onward.util.lanes import Lane

# Batches that run at once, and the name of all of them in an engine.
_RUNNING, _CLIENT = 2, "batches"
_MAX_RECORDS = 10_000  # of batches
_QUIET_SECONDS = 3.0  # without other requests, before a batch serves more than one line
_CLOSE_SECONDS = 5.0  # for interrupted lines to end
_RECORD_SECONDS = 30 * 86_400  # for which the record of an ended batch is stored


@dataclass
class _Run:
    """A batch that waits or runs. job: while its lines are served, with the way to interrupt it."""

    future: "Future[None]"
    job: BatchJob | None = None
    interrupt: Callable[[], object] | None = None


class Batches:
    """The batches of a server. Any thread may call.

    share: of an engine's sequences that lines may take while no other requests run. busy: whether others do.
    """

    def __init__(
        self, models: ServedModels, files: FileStore, metrics: Metrics, share: float, busy: Callable[[], bool]
    ) -> None:
        self._models, self._files, self._metrics, self._share, self._busy = models, files, metrics, share, busy
        self._records: dict[str, StoredBatch] = {}  # the oldest first
        self._runs: dict[str, _Run] = {}
        self._checks_lane, self._runs_lane = Lane("batch-check", 1), Lane("batch", _RUNNING)
        self._changing = threading.RLock()
        self._stopped = False
        self._last_busy = -math.inf

    @property
    def running(self) -> int:
        """The batches that wait or run in this process."""
        return len(self._runs)

    def open(self) -> None:
        """Continue the unfinished batches in the folder of files."""
        with self._changing:
            records = self._files.records("batch_", StoredBatch)
            self._records = {each.id: each for each in sorted(records, key=lambda each: each.created_at)}
            for batch in self._records.values():
                if not batch.has_ended:
                    self._files.pin(batch.input_file_id)
                    self._start(batch)
                else:
                    shutil.rmtree(self._journals(batch), ignore_errors=True)
            self._files.remove_hidden()

    def create(self, owner: str, fields: Mapping[str, Any], seconds: int, output_seconds: int) -> StoredBatch:
        """Create a batch. fields: of the body. seconds: until it expires. output_seconds: for which its results are
        stored. Raises `BodyError`: the file does not exist, or the batch cannot be stored."""
        file = self._files.find(owner, fields["input_file_id"], "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id must be a file with the purpose batch; {file.id} has the purpose {file.purpose}"
            raise BodyError(message, "input_file_id")
        now = int(time.time())
        batch = StoredBatch(
            **fields,
            id=new_id("batch_"),
            status="validating",
            created_at=now,
            expires_at=now + seconds,
            request_counts=RequestCounts(),
            owner=owner,
            output_seconds=output_seconds,
            result_ids=(new_id("file-"), new_id("file-")),
        )
        with self._changing:
            if len(self._records) >= _MAX_RECORDS:
                raise BodyError(f"this server stores at most {_MAX_RECORDS:,} batches", None, "too_many_batches", 429)
            self._files.save(batch)
            self._files.pin(file.id)
            self._records[batch.id] = batch
            self._start(batch)
        return batch

    def find(self, owner: str, id: str) -> StoredBatch:
        """Raises `BodyError`: the client has no such batch."""
        batch = self._records.get(id)
        if batch is None or batch.owner != owner:
            raise BodyError(f"no batch {id[:64]!r}", None, "batch_not_found", 404)
        return batch

    def listed(self, owner: str) -> list[StoredBatch]:
        """All batches of a client, the oldest first."""
        with self._changing:
            return [batch for batch in self._records.values() if batch.owner == owner]

    def cancel(self, owner: str, id: str) -> StoredBatch:
        """Begin no more lines. Raises `BodyError`: the client has no such batch, or it has ended."""
        batch = self.find(owner, id)
        with self._changing:
            if batch.has_ended or batch.status == "finalizing":
                message = f"a batch with the status {batch.status} cannot be cancelled"
                raise BodyError(message, None, "batch_not_cancellable", 409)
            if batch.ending is None:
                batch.status, batch.cancelling_at = "cancelling", int(time.time())
                self._end_early(batch, "cancelled")
        return batch

    def expire(self) -> None:
        """End the batches whose time is over, and forget old ones."""
        now = time.time()
        with self._changing:
            for batch in list(self._records.values()):
                if batch.has_ended and batch.created_at + _RECORD_SECONDS <= now:
                    self._files.forget(batch.id)
                    del self._records[batch.id]
                elif not batch.has_ended and batch.ending is None and batch.expires_at <= now:
                    self._end_early(batch, "expired")

    def stop(self) -> None:
        """Begin no more lines: unfinished batches continue with the next server that has the same folder."""
        with self._changing:
            self._stopped = True
            for id, run in list(self._runs.items()):
                if run.future.cancel():
                    del self._runs[id]
                elif run.job is not None:
                    run.job.stop()

    def interrupt(self) -> None:
        """Drop the lines that are running, after `stop`."""
        with self._changing:
            for run in self._runs.values():
                if run.interrupt is not None:
                    run.interrupt()

    async def close(self) -> None:
        """Stop and interrupt everything, and wait for it."""
        self.stop()
        end = time.monotonic() + _CLOSE_SECONDS
        while self.running and time.monotonic() < end:
            self.interrupt()
            await asyncio.sleep(0.02)

    def _start(self, batch: StoredBatch) -> None:
        """Queue the next phase of a batch."""
        if self._stopped:
            return
        if batch.ending is None and batch.status == "validating":
            lane, phase = self._checks_lane, self._check
        else:
            lane, phase = (self._runs_lane if batch.ending is None else self._checks_lane), self._run
        started = threading.Event()  # the run is registered

        def work() -> None:
            started.wait()
            try:
                self._guarded(batch, phase)
            finally:
                with self._changing:
                    del self._runs[batch.id]
                    if not batch.has_ended and phase == self._check:
                        self._start(batch)

        self._runs[batch.id] = _Run(lane.submit(work, batch.owner))
        started.set()

    def _end_early(self, batch: StoredBatch, ending: Ending) -> None:
        batch.ending = ending
        self._files.save(batch)
        run = self._runs.get(batch.id)
        if run is None or run.future.cancel():
            self._start(batch)
        elif run.job is not None:
            run.job.stop()

    def _guarded(self, batch: StoredBatch, phase: Callable[[StoredBatch], None]) -> None:
        """Run a phase. A batch that was interrupted stays as it is; any other error ends it."""
        try:
            phase(batch)
        except (EngineError, asyncio.CancelledError) as error:
            log("batch interrupted", batch=batch.id, reason=str(error) or "the server shuts down")
        except Exception as error:
            problem = BatchProblem(code="server_error", message="the batch failed; the server's log has the details")
            if isinstance(error, BodyError):
                problem = BatchProblem(code=error.code, message=str(error))
            elif isinstance(error, OnwardError):
                log("batch failed", batch=batch.id, reason=str(error))
            else:
                log_defect(error, batch=batch.id)
            if not batch.has_ended:
                with suppress(OnwardError):  # of a full disk
                    self._fail(batch, [problem])

    def _check(self, batch: StoredBatch) -> None:
        """Check the lines of a batch, and find its model."""
        checked = checked_lines(
            self._files.path(batch.input_file_id), batch.endpoint, self._models, lambda: batch.ending is not None
        )
        if checked.problems:
            self._fail(batch, checked.problems)
            return
        with self._changing:
            batch.request_counts.total = checked.count
            if batch.ending is None:
                batch.model, batch.status, batch.in_progress_at = checked.model, "in_progress", int(time.time())
                self._files.save(batch)

    def _run(self, batch: StoredBatch) -> None:
        """Serve the lines of a batch, and store the results."""
        if batch.model is None:  # it has never been checked
            self._end(batch, batch.ending or "failed")
            return
        with self._models.holding(batch.model) as served:
            self._run_with(served, batch)

    def _run_with(self, served: ServedModel, batch: StoredBatch) -> None:
        lines = BatchInput(self._files.path(batch.input_file_id))
        self._journals(batch).mkdir(mode=0o700, exist_ok=True)
        stored = sum(journal.stat().st_size for journal in self._journals(batch).iterdir())
        reserved, counted = 0, Progress(lines.count)

        def show(progress: Progress) -> None:
            nonlocal reserved, counted
            self._count(batch, progress, counted)
            counted = replace(progress)
            try:
                self._files.reserve(batch.owner, stored + progress.nbytes - reserved)
                reserved = stored + progress.nbytes
            except BodyError as error:
                with self._changing:
                    batch.ending = "failed"
                    batch.errors = BatchProblems(data=[BatchProblem(code=error.code, message=str(error))])
                job.stop()

        with BatchResults(self._files.folder / batch.id, lines) as results:
            most = max(1, int(self._share * served.engine.max_sequences))
            replica = EngineReplica(served.engine, _reader(served), _CLIENT)
            limit = partial(self._limit, most)
            job = BatchJob(lines, results, lambda: replica, chunk=1, ahead=most, limit=limit, show=show)
            try:
                fingerprint = asyncio.run(self._serve(batch, job))
                if batch.ending is None and job.progress.over < job.progress.lines:
                    return  # the server is shutting down
            finally:
                self._files.reserve(batch.owner, -reserved)
            self._count(batch, job.progress, counted)
            self._conclude(batch, results, lines, fingerprint)

    def _limit(self, most: int) -> int:
        """The lines that a batch may serve now."""
        now = time.monotonic()
        if self._busy():
            self._last_busy = now
        is_quiet = now - self._last_busy >= _QUIET_SECONDS
        return max(1, most // max(1, self._runs_lane.running)) if is_quiet else 1

    async def _serve(self, batch: StoredBatch, job: BatchJob) -> str:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._changing:
            run = self._runs[batch.id]
            run.job, run.interrupt = job, partial(loop.call_soon_threadsafe, task.cancel)
            if self._stopped or batch.ending is not None:
                job.stop()
        try:
            return await job.serve()
        finally:
            with self._changing:
                run.job = run.interrupt = None

    def _count(self, batch: StoredBatch, progress: Progress, counted: Progress) -> None:
        """Update the counts of lines, and the metrics, which include those of `counted`."""
        completed = progress.done_before + progress.served
        batch.request_counts = RequestCounts(total=progress.lines, completed=completed, failed=progress.failed)
        lines = self._metrics.batch_lines
        lines[batch.model or "", "completed"] += progress.served - counted.served
        lines[batch.model or "", "failed"] += progress.failed - counted.failed

    def _conclude(self, batch: StoredBatch, results: BatchResults, lines: BatchInput, fingerprint: str) -> None:
        """Write the results to an output file and an error file."""
        with self._changing:
            ending = batch.ending or "completed"
            if ending == "completed":
                batch.status, batch.finalizing_at = "finalizing", int(time.time())
            self._files.save(batch)
        output, errors = (self._files.create(batch.owner, unlimited=True) for _ in range(2))
        try:
            for line, result in results.lines(lines.source, fingerprint):
                if result is None:
                    if ending == "expired":
                        errors.write(result_line(line.expired(line.id(fingerprint))))
                elif _is_served(result):
                    output.write(result)
                else:
                    errors.write(result)
            ids: list[str | None] = []
            for file, name, id in zip((output, errors), ("output", "error"), batch.result_ids, strict=True):
                if file.nbytes:
                    file.commit(f"{batch.id}_{name}.jsonl", "batch_output", batch.output_seconds, id)
                ids.append(id if file.nbytes else None)
        finally:
            output.discard()
            errors.discard()
        batch.output_file_id, batch.error_file_id = ids
        self._end(batch, ending)
        with suppress(OSError):
            results.discard()

    def _fail(self, batch: StoredBatch, problems: list[BatchProblem]) -> None:
        with self._changing:
            batch.errors = BatchProblems(data=problems)
            self._end(batch, "failed")

    def _end(self, batch: StoredBatch, ending: Ending) -> None:
        with self._changing:
            batch.status = ending
            setattr(batch, f"{ending}_at", int(time.time()))
            self._files.save(batch)
            self._files.unpin(batch.input_file_id)
        self._metrics.batches[ending] += 1
        log("batch ended", batch=batch.id, status=ending, **batch.request_counts.model_dump())

    def _journals(self, batch: StoredBatch) -> Path:
        return self._files.folder / f"{batch.id}.parts"


def _reader(served: ServedModel) -> Any:
    """The reader of `onward batch`: the limit of new tokens, if none is set, is the model's."""
    options = {name: value for name, value in served.reader.options.items() if value is not None}
    return replace(served.reader, options=options, streams=False)


def _is_served(result: bytes) -> bool:
    response = json.loads(result)["response"]
    return response is not None and response["status_code"] == 200
