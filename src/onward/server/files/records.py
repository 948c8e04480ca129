"""The record of a batch, and the body that creates one."""

import re
from typing import Literal

from pydantic import BaseModel, field_validator

from onward.protocols import PROTOCOLS
from onward.protocols.body import Body, FieldError
from onward.util.text import brief

_HOUR, _DAY = 3600, 86_400
# Seconds for which a file can be stored: at least, at most and by default.
MIN_SECONDS, MAX_SECONDS = _HOUR, 30 * _DAY
_WINDOW = re.compile(r"([0-9]{1,3})([hd])")
# Pairs of metadata, and characters of their names and values.
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512


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
    metadata: dict[str, str] | None = None
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

    @field_validator("metadata")
    @classmethod
    def check_metadata(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        pairs = metadata or {}
        is_long = any(len(name) > _MAX_NAME or len(value) > _MAX_VALUE for name, value in pairs.items())
        if len(pairs) > _MAX_PAIRS or is_long:
            limits = f"names of {_MAX_NAME} and values of {_MAX_VALUE} characters"
            raise FieldError(f"may have at most {_MAX_PAIRS} pairs, with {limits}")
        return metadata


def seconds_of(window: str) -> int:
    """The seconds of a completion window; 0 for an invalid one."""
    match = _WINDOW.fullmatch(window)
    return 0 if match is None else int(match[1]) * (_HOUR if match[2] == "h" else _DAY)
