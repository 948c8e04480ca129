"""The record of a batch, the body that creates one, and checks of its lines before any work."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from onward.batches import BatchInput, BatchLine
from onward.batches.line import rows_of
from onward.protocols import PROTOCOLS, BodyError
from onward.protocols.body import Body, FieldError
from onward.protocols.response_items import Metadata
from onward.server.models import ServedModels
from onward.util.text import brief

_HOUR, _DAY = 3600, 86_400
# Seconds for which a file can be stored: at least, at most and by default.
MIN_SECONDS, MAX_SECONDS = _HOUR, 30 * _DAY
_WINDOW = re.compile(r"([0-9]{1,3})([hd])")


Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["failed", "completed", "expired", "cancelled"]


class BatchProblem(BaseModel):
    """Why a batch failed. line: of the input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchProblems(BaseModel):
    """All reported problems of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(BaseModel):
    """The lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(BaseModel):
    """A batch. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class StoredBatch(BatchObject):
    """owner: as of a file. output_seconds: for which its results are stored. ending: how it shall end. result_ids:
    those of the output file and the error file."""

    owner: str
    output_seconds: int
    ending: Ending | None = None
    result_ids: tuple[str, str]

    @property
    def has_ended(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class ExpiresAfter(Body):
    """When a file expires: this many seconds after its creation."""

    anchor: str
    seconds: int

    @field_validator("anchor")
    @classmethod
    def check_anchor(cls, anchor: str) -> str:
        if anchor != "created_at":
            raise FieldError(f"must be 'created_at'; got {brief(anchor)}")
        return anchor

    @field_validator("seconds")
    @classmethod
    def check_seconds(cls, seconds: int) -> int:
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise FieldError(f"must be from {MIN_SECONDS} to {MAX_SECONDS}; got {brief(seconds)}")
        return seconds


class BatchBody(Body):
    """The body that creates a batch. completion_window: hours or days until it expires, such as 24h or 7d."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def check_endpoint(cls, endpoint: str) -> str:
        if endpoint not in PROTOCOLS:
            raise FieldError(f"must be {' or '.join(PROTOCOLS)}; got {brief(endpoint)}")
        return endpoint

    @field_validator("completion_window")
    @classmethod
    def check_window(cls, window: str) -> str:
        if not MIN_SECONDS <= seconds_of(window) <= MAX_SECONDS:
            raise FieldError(f"must be hours or days from '1h' to '30d', such as '24h'; got {brief(window)}")
        return window


def seconds_of(window: str) -> int:
    """The seconds of a completion window; 0 for an invalid one."""
    match = _WINDOW.fullmatch(window)
    return 0 if match is None else int(match[1]) * (_HOUR if match[2] == "h" else _DAY)


# Lines of a batch (OpenAI's limit), and problems that are reported.
_MAX_LINES, _MAX_PROBLEMS = 50_000, 100


@dataclass
class CheckedLines:
    """The number of lines, the model that all of them name, and the first problems."""

    count: int = 0
    model: str | None = None
    problems: list[BatchProblem] = field(default_factory=list)


def checked_lines(file: Path, endpoint: str, models: ServedModels, is_over: Callable[[], bool]) -> CheckedLines:
    """Check the lines of a file: that they are valid, and for this endpoint and one model. Bodies are checked when they
    run. is_over: whether nobody needs the result any more."""
    checked = CheckedLines()
    for checked.count, _ in enumerate(rows_of(file), 1):
        if checked.count > _MAX_LINES:  # before all of them are in memory
            message = f"the file has more than {_MAX_LINES:,} lines"
            checked.problems.append(BatchProblem(code="too_many_lines", message=message))
            return checked
    if not checked.count:
        checked.problems.append(BatchProblem(code="empty_file", message="the file has no lines"))
    for line in BatchInput(file).lines():
        if is_over() or len(checked.problems) >= _MAX_PROBLEMS:
            break
        problem = _problem(line, endpoint, models, checked)
        if problem is not None:
            checked.problems.append(problem)
    return checked


def _problem(line: BatchLine, endpoint: str, models: ServedModels, checked: CheckedLines) -> BatchProblem | None:
    """What is wrong with a line. The first valid one determines the model."""
    if line.error is not None:
        return BatchProblem(**{name: line.error[name] for name in ("code", "message", "param", "line")})

    def problem(code: str, param: str, message: str) -> BatchProblem:
        return BatchProblem(code=code, message=f"line {line.number}: {message}", param=param, line=line.number)

    if line.url != endpoint:
        return problem("invalid_url", "url", f"url must be the endpoint of the batch, {endpoint}; got {line.url}")
    try:
        name = models.owner(line.body.get("model") if isinstance(line.body, dict) else None)
    except BodyError as error:
        return problem(error.code, "body.model", str(error))
    checked.model = checked.model or name
    if name != checked.model:
        message = f"all lines must be for one model, {checked.model!r}; got {name!r}"
        return problem("mismatched_model", "body.model", message)
    return None
