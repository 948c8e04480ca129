"""The key of a response, from which everything random about it except its tokens derives."""

import datetime
import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import Self

from onward.errors import RequestError

_TEXT = re.compile("[0-9a-f]{32}")
_MILLISECOND_DIGITS = 12  # of 32; the others are random
LAST_SECOND = int(datetime.datetime.max.replace(microsecond=0, tzinfo=datetime.UTC).timestamp())


@dataclass(frozen=True)
class ResponseKey:
    """Determines a response's id, creation time, item ids, and its seed if the body has none.

    The same body with the same key gives the same response, on any server of the same model.

    text: 32 hexadecimal digits: milliseconds since 1970, then 80 random bits, as in a UUID of version 7 (RFC 9562).
    Raises `RequestError`: any other text.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not _TEXT.fullmatch(self.text):
            raise RequestError(f"a response key is 32 hexadecimal digits (ResponseKey.new()); got {self.text!r}")

    @classmethod
    def new(cls, created: int | None = None) -> Self:
        """Return a key of the current time. created: of another time, in seconds since 1970, clamped to 1970 through
        9999."""
        milliseconds = time.time_ns() // 1_000_000 if created is None else min(max(0, created), LAST_SECOND) * 1000
        return cls(f"{milliseconds:0{_MILLISECOND_DIGITS}x}{os.urandom(10).hex()}")

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return int(self.text[:_MILLISECOND_DIGITS], 16) // 1000

    @property
    def time(self) -> datetime.datetime:
        """The creation time in UTC, which chat templates see as the current time."""
        return datetime.datetime.fromtimestamp(min(self.created, LAST_SECOND), datetime.UTC)

    @property
    def seed(self) -> int:
        """53 bits, so that JavaScript numbers can hold it."""
        return int(self.derived("seed"), 16) >> 75

    def derived(self, part: str) -> str:
        """32 hexadecimal digits that identify a part of the response."""
        return hashlib.blake2b(f"{self.text} {part}".encode(), digest_size=16).hexdigest()
