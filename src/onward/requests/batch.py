"""Turns requests into rows of the loop, and rows into completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from onward.checkpoint import Tokenizer
from onward.completion import Completion, Stopwatch
from onward.decoding import (
    BeamStep,
    NoText,
    Row,
    Step,
    StopStrings,
    StreamingDetokenizer,
    TextStream,
    TokenLogprobs,
)
from onward.requests.options import GenerateOptions, shared_options
from onward.requests.request import Request
from onward.sampling import fresh_seed, sample_seed
from onward.speculation import SpeculativeStep


@dataclass(frozen=True)
class Batch:
    """Requests that run together, each in `options.rows` rows beside each other.

    options: of one of the requests; all agree on the options of a whole call.
    samples: the request of each row, with the seed of that row.
    rows: the rows that the loop fills.
    """

    requests: Sequence[Request]
    options: GenerateOptions
    samples: Sequence[Request]
    rows: Sequence[Row]

    @classmethod
    def of(cls, requests: Sequence[Request], tokenizer: Tokenizer | None) -> Self:
        """Make the rows of the requests. The time limit counts from here.

        Raises:
            RequestError: the requests differ in an option of the whole call.
        """
        options = shared_options([request.options for request in requests])
        deadline = None if options.time_limit is None else time.monotonic() + options.time_limit
        samples = [sample for request in requests for sample in _samples(request)]
        return cls(requests, options, samples, [_row(sample, deadline, tokenizer) for sample in samples])

    def completions(
        self,
        step: Step,
        watch: Stopwatch,
        prompt_logprobs: Sequence[list[TokenLogprobs | None] | None],
        cached_tokens: int,
    ) -> list[Completion]:
        """A completion for each request, when all rows have ended. prompt_logprobs: an entry for each request."""
        per_request, options = self.options.rows, self.options
        texts = [
            Completion(
                text=row.text,
                token_ids=row.token_ids,
                finish_reason=row.finish_reason or "length",
                stopped_by=row.stopped_by,
                timing=watch.timing(index),
                prompt_tokens=len(sample.prompt),
                cached_tokens=cached_tokens,
                seed=None if sample.options.temperature == 0 else sample.options.seed,
                logprobs=None if options.logprobs is None else row.logprobs,
                prompt_logprobs=prompt_logprobs[index // per_request],
                score=_score(step, index),
                speculation=step.speculation(index) if isinstance(step, SpeculativeStep) else None,
            )
            for index, (sample, row) in enumerate(zip(self.samples, self.rows, strict=True))
        ]
        firsts = range(0, len(texts), per_request)
        return [_joined(texts[first : first + per_request], options) for first in firsts]


def _samples(request: Request) -> list[Request]:
    """The request once for each of its rows, each with the seed of its row."""
    options = request.options
    if options.beams > 1:
        return [request] * options.rows
    seed = fresh_seed() if request.options.seed is None else request.options.seed
    seeds = [sample_seed(seed, index) for index in range(options.rows)]
    return [replace(request, options=request.options.replace(seed=row_seed)) for row_seed in seeds]


def _row(sample: Request, deadline: float | None, tokenizer: Tokenizer | None) -> Row:
    options = sample.options
    text: TextStream = NoText()
    if tokenizer is not None:
        text = StopStrings(StreamingDetokenizer(tokenizer.decode, before=sample.prompt), options.stop)
    return Row(
        sample.max_new_tokens,
        options.stop_ids,
        text,
        stop_when=options.stop_when,
        deadline=deadline,
        cancel=options.cancel,
    )


def _score(step: Step, row: int) -> float | None:
    """The score of the text that beams found for this row; None without beams, or where it only repeats another's."""
    return step.score(row) if isinstance(step, BeamStep) else None


def _joined(texts: Sequence[Completion], options: GenerateOptions) -> Completion:
    """The first of a request's texts, with the others in its `others`."""
    first, *others = texts[: options.n]
    return replace(first, others=[text for text in others if options.beams == 1 or text.score is not None])
