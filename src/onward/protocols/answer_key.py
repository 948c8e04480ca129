"""What an answer is told apart by, and all that is drawn for it beside its tokens."""

import datetime
import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import Self

from onward.errors import RequestError

_TEXT = re.compile("[0-9a-f]{32}")
_MILLISECOND_DIGITS = 12  # of 32; the others are drawn
LAST_SECOND = int(datetime.datetime.max.replace(microsecond=0, tzinfo=datetime.UTC).timestamp())


@dataclass(frozen=True)
class ResponseKey:
    """Fixes an answer's id, when it was created, the ids of its items, and the seed of a body that gives none. A chat
    template that writes the date gets the time of the key.

    So the same body with the same key gives the same answer, on any server of the same model.

    text: 32 hexadecimal digits: milliseconds since 1970, then 80 random bits, as in a UUID of version 7 (RFC 9562).

    Raises:
        RequestError: another text.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not _TEXT.fullmatch(self.text):
            raise RequestError(f"the key of an answer is 32 hexadecimal digits (ResponseKey.new()); got {self.text!r}")

    @classmethod
    def new(cls, created: int | None = None) -> Self:
        """A key of the current time. created: of another time, in seconds since 1970; times before 1970 and after the
        year 9999 become the nearest that a key has."""
        milliseconds = time.time_ns() // 1_000_000 if created is None else min(max(0, created), LAST_SECOND) * 1000
        return cls(f"{milliseconds:0{_MILLISECOND_DIGITS}x}{os.urandom(10).hex()}")

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return int(self.text[:_MILLISECOND_DIGITS], 16) // 1000

    @property
    def time(self) -> datetime.datetime:
        """When the answer was created, in UTC: the time that its prompt is rendered with."""
        return datetime.datetime.fromtimestamp(min(self.created, LAST_SECOND), datetime.UTC)

    @property
    def seed(self) -> int:
        """53 bits, which JavaScript's numbers hold."""
        return int(self.derived("seed"), 16) >> 75

    def derived(self, what: str) -> str:
        """32 hexadecimal digits that tell a part of the answer from others."""
        return hashlib.blake2b(f"{self.text} {what}".encode(), digest_size=16).hexdigest()
