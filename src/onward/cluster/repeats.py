"""Requests that come again under one `Idempotency-Key` get the same answer, for the key of that answer is kept."""

from collections import OrderedDict
from collections.abc import Mapping

from onward.openai import AnswerKey, BodyError
from onward.server.handover import idempotency_of

# The most that are remembered.
_MOST = 10_000


class Repeats:
    """The keys of answers to what came with an Idempotency-Key, of each caller (the header Authorization).

    An answer's key fixes all that is drawn for it, so nothing of the answer has to be kept. seconds: how long a key is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()

    def answer_key(self, headers: Mapping[bytes, bytes], digest: bytes, now: float) -> str:
        """Of the answer to a request with these headers; a new one where it comes first. digest: of all that it asks.

        Raises:
            BodyError: another request came under its Idempotency-Key, or that is none.
        """
        name = idempotency_of(headers)
        if name is None:
            return AnswerKey.new().text
        while self._kept and (len(self._kept) >= _MOST or now - next(iter(self._kept.values()))[0] > self._seconds):
            self._kept.popitem(last=False)
        _, asked, key = self._kept.setdefault(name, (now, digest, AnswerKey.new().text))
        if asked != digest:
            message = "this Idempotency-Key came with another body before: give each request its own"
            raise BodyError(message, code="idempotency_key_reused", status=422)
        return key
