"""What a server keeps of answers, so that a request which comes again gets the same one: little, and not for long."""

import asyncio
import time
from collections import OrderedDict

from onward.openai import AnswerKey
from onward.server.submission import Submission

# The most answers that are kept, and ids of prompts and texts in all of them.
_MOST, _MOST_TOKENS = 1024, 2_000_000


class KeptAnswer:
    """The answer to what came with an Idempotency-Key.

    key: of the answer; with it the same body gives the same again. submission: None before it has begun. lock: held
    while one looks whether it has.
    """

    def __init__(self, key: AnswerKey) -> None:
        self.key = key
        self.submission: Submission | None = None
        self.lock = asyncio.Lock()

    @property
    def in_use(self) -> bool:
        return self.lock.locked() or (self.submission is not None and bool(self.submission.clients))

    @property
    def tokens(self) -> int:
        return 0 if self.submission is None else self.submission.tokens


class KeptAnswers:
    """The answers that are kept, the oldest first. All of it is the loop's.

    seconds: how long each is kept after it began.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: OrderedDict[str, tuple[float, KeptAnswer]] = OrderedDict()
        self._cut: OrderedDict[str, tuple[float, list[list[int]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def of(self, name: str, key: AnswerKey) -> KeptAnswer:
        """The answer kept under a name; a new one with this key where there is none."""
        self._forget()
        if name not in self._answers:
            self._answers[name] = time.monotonic(), KeptAnswer(key)
        return self._answers[name][1]

    def note(self, submission: Submission) -> None:
        """Nobody waits for it any more. What a stream had emitted when it was cut is kept for who takes it up again."""
        submission.tokens = _count(submission.emitted())
        submission.tokens += sum(len(request.prompt) for request in submission.body.requests)
        if submission.is_cut and submission.body.stream:
            self._cut[submission.body.key.text] = time.monotonic(), submission.emitted()
            self._forget()

    def emitted(self, key: AnswerKey) -> list[list[int]] | None:
        """What a stream that was cut had emitted; None where that is not known."""
        self._forget()
        return self._cut[key.text][1] if key.text in self._cut else None

    def _forget(self) -> None:
        """Drop what is too old, and the oldest where there is too much. What somebody waits for stays."""
        late = time.monotonic() - self._seconds
        tokens = sum(answer.tokens for _, answer in self._answers.values())
        for name, (since, answer) in list(self._answers.items()):
            if since > late and len(self._answers) <= _MOST and tokens <= _MOST_TOKENS:
                break
            if not answer.in_use:
                tokens -= answer.tokens
                del self._answers[name]
        ids = sum(_count(emitted) for _, emitted in self._cut.values())
        while self._cut:
            name, (since, emitted) = next(iter(self._cut.items()))
            if since > late and len(self._cut) <= _MOST and ids <= _MOST_TOKENS:
                break
            ids -= _count(emitted)
            del self._cut[name]


def _count(emitted: list[list[int]]) -> int:
    return sum(map(len, emitted))
