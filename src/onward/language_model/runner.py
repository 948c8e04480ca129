"""Runs requests through the decode loop, and yields pieces and completions."""

import math
import time
from collections import abc
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from torch import Tensor

from onward.cache import KVCache
from onward.constraints import AfterText, JsonSchema
from onward.decoding import (
    BatchSchedule,
    BeamOptions,
    BeamSearch,
    CacheManager,
    FinishReason,
    RowCacheManager,
    Sequence,
    SharedCache,
    StepRouter,
    decode_loop,
)
from onward.decoding.loop import run_to_end
from onward.decoding.replay import ReplayedSequence, ReplayStep
from onward.decoding.shared_cache import PinnedPrefix
from onward.decoding.speculation.step import speculation_of
from onward.errors import RequestError
from onward.language_model.chat import AnswerParser, ToolGrammar
from onward.language_model.completion import Completion, Piece, Timing
from onward.language_model.options import ConstraintMaker
from onward.language_model.request import Request
from onward.models import Cache, Run
from onward.models.adapters import Adapters
from onward.sampling import ConstraintState, fresh_seed, sample_seed
from onward.tokenizer import NoTextStream, StopStrings, StreamingDetokenizer, TextStream, Tokenizer, special_tokens


class RequestState:
    """The state of one request: a sequence for each of its `n` texts, or one beam search.

    deadline: on the clock `time.monotonic`; infinity for none. kind: the class of the texts' sequences.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, adapters: Adapters, kind: type[Sequence] = Sequence
    ) -> None:
        """Create the sequences and start the time limit. Raises `RequestError` if the adapter has been dropped."""
        self.request = request
        self.options = options = request.options
        self.deadline = math.inf if options.time_limit is None else time.monotonic() + options.time_limit
        adapter = adapters.steered(options.adapter, options.steering)
        constraint = options.new_constraint(tokenizer, request.answer)
        marks = None if request.answer is None else dict(request.answer.marks)
        searches = options.beams > 1
        base = 0 if searches else fresh_seed() if options.seed is None else options.seed
        self.sequences: list[Sequence] = []
        self._version = 0  # of the weights of the last step
        for index in range(1 if searches else options.n):
            text: TextStream = NoTextStream()
            if tokenizer is not None:
                detokenizer = StreamingDetokenizer(tokenizer.decode, before=request.prompt)
                text = StopStrings(detokenizer, options.stop, marks, special_tokens(tokenizer))
            arguments = request.prompt, request.max_new_tokens, options.stop_ids, text
            kinds: dict[str, Any] = {
                "sampling": options if searches else options.with_values(seed=sample_seed(base, index)),
                "adapter": adapter,
                "salt": options.cache_salt,
                "top_logprobs": options.logprobs,
                "prompt_top": None if index else options.prompt_logprobs,
                "sampling_logprobs": options.sampling_logprobs,
                "taps": options.taps,
                "stop_when": options.stop_when,
                "deadline": self.deadline,
                "cancel": options.cancel,
                "constraint": None if constraint is None else ConstraintState(constraint.fork(), options.stop_ids),
            }
            if searches:
                beams = BeamOptions(options.beams, options.length_penalty, options.early_stopping)
                sequence: Sequence = BeamSearch(beams, *arguments, **kinds)
            else:
                sequence = kind(*arguments, **kinds)
            if self.sequences:
                sequence.leader = leader = self.sequences[0]
                sequence.capture = None if leader.capture is None else leader.capture.after_prompt(0)
            if sequence.streams:  # beams are parsed at the end
                sequence.parser = self._new_parser(sequence)
            self.sequences.append(sequence)

    @property
    def has_ended(self) -> bool:
        return not any(sequence.pending for sequence in self.sequences)

    @property
    def has_tokens(self) -> bool:
        return any(sequence.lap_seconds for sequence in self.sequences)

    def replay(self, emitted: abc.Sequence[abc.Sequence[int]]) -> None:
        """Start each text with ids that were emitted elsewhere; beam search, which emits nothing before its end,
        restarts. Raises `RequestError` for ids that the text cannot have."""
        for sequence, ids in zip(self.sequences, emitted, strict=False):
            if sequence.streams:
                _replay(sequence, ids)

    def end(self, reason: FinishReason) -> None:
        for sequence in self.sequences:
            if sequence.pending:
                sequence.end(reason)

    def new_pieces(self, version: int) -> tuple[list[Piece], list[Piece]]:
        """The pieces that no earlier call has returned: those of replayed ids, and the others. Pieces with logprobs
        wait for these. version: of the weights of the last step."""
        replayed: list[tuple[int, Piece]] = []
        new = []
        self._version = version
        for choice, sequence in enumerate(self.sequences):
            versions = sequence.weights_versions
            for at, token, text, drafted in sequence.deliver():
                if not versions or versions[-1][1] != version:
                    versions.append((at, version))
                logprobs = sequence.logprobs[at] if sequence.top_logprobs is not None else None
                message = None if sequence.parser is None else sequence.parser.read(sequence, at, text)
                taps = None if sequence.capture is None else sequence.capture.of_token(at)
                piece = Piece(text, token, logprobs, choice, message, taps, drafted, version)
                if at < sequence.replayed:
                    replayed.append((at, piece))
                else:
                    new.append(piece)
        replayed.sort(key=itemgetter(0))
        return [piece for _, piece in replayed], new

    def completion(self) -> Completion:
        """The completion of the first text, with the others' in `others`. All sequences must have ended."""
        texts = [
            self._completion(sequence, text, score)
            for sequence in self.sequences
            for score, text in sequence.results(self.options.n)
        ]
        return replace(texts[0], others=texts[1:])

    @cached_property
    def _reported(self) -> Request:
        """The request in its completions, which keep no draft model and no event alive."""
        return replace(self.request, options=self.options.with_values(draft=None, cancel=None))

    def _completion(self, timed: Sequence, text: Sequence, score: float | None) -> Completion:
        """The completion of a text of a sequence, which is the sequence itself or one of its beams."""
        request, options = self.request, self.options
        parser = timed.parser
        if parser is None and (parser := self._new_parser(text)) is not None:
            parser.read(text, len(text.token_ids) - 1, text.text)
        return Completion(
            text=text.text,
            token_ids=text.token_ids,
            finish_reason=text.finish_reason or "length",
            stopped_by=text.stopped_by,
            timing=Timing.of(timed.lap_seconds, timed.waited),
            prompt_tokens=len(request.prompt),
            cached_tokens=next((each.cached for each in self.sequences if each.cached is not None), 0),
            seed=self._seed(text),
            logprobs=None if options.logprobs is None else text.logprobs,
            prompt_logprobs=None if options.prompt_logprobs is None else self.sequences[0].prompt_logprobs,
            score=score,
            speculation=speculation_of(text),
            json_schema=_json_schema(options.constrained_by),
            message=None if parser is None else parser.message(),
            reasoning_tokens=None if parser is None else parser.reasoning_tokens(text.ends),
            # A search, which begins again with new weights, delivers no tokens before its end.
            weights_versions=timed.weights_versions or ([(0, self._version)] if text.token_ids else []),
            taps=(taps := self._taps(text)),
            embedding=None if request.pooling is None or not taps else request.pooling(taps),
            request=self._reported,
        )

    def _taps(self, text: Sequence) -> dict[str, Tensor] | None:
        of_prompt = self.sequences[0].capture
        return None if of_prompt is None or text.capture is None else text.capture.results(of_prompt)

    def _new_parser(self, sequence: Sequence) -> AnswerParser | None:
        answer = self.request.answer
        return None if answer is None else AnswerParser(answer, sequence.prompt, self._seed(sequence))

    def _seed(self, sequence: Sequence) -> int | None:
        assert sequence.sampling is not None
        return None if self.options.temperature == 0 or self.options.beams > 1 else sequence.sampling.seed


def _replay(sequence: Sequence, token_ids: abc.Sequence[int]) -> None:
    for at, token in enumerate(token_ids):
        if sequence.finish_reason is not None:
            raise RequestError(
                f"the text ends ({sequence.finish_reason!r}) with {at} of the {len(token_ids)} ids in emitted: "
                "give those that were emitted for this prompt and these options"
            )
        if sequence.constraint is not None and not sequence.constraint.admits(token):
            raise RequestError(
                f"emitted[{at}] is id {token}, which the request's constraint forbids there: give the ids "
                "that were emitted for this prompt and these options"
            )
        sequence.replay(token)


def _json_schema(constraint: ConstraintMaker | None) -> JsonSchema | None:
    """The schema of the text, or of the part after reasoning."""
    if isinstance(constraint, AfterText):
        constraint = constraint.grammar
    if isinstance(constraint, ToolGrammar):
        return constraint.json_schema
    return constraint if isinstance(constraint, JsonSchema) else None


Pieces = Generator[Piece, None, list[Completion]]


@dataclass(frozen=True)
class Runner:
    """Runs requests together. tokenizer: None for empty texts. chunk: the maximum number of prompt tokens processed at
    once."""

    run: Run
    tokenizer: Tokenizer | None
    chunk: int
    prefix_cache: SharedCache
    adapters: Adapters

    def pieces(self, requests: abc.Sequence[Request], cache: Cache | PinnedPrefix | None = None) -> Pieces:
        """Validate the requests, and return a generator that runs the decode loop.

        cache: has `options.rows` rows for each request, and is overwritten; or a `PinnedPrefix`, which one request
            continues. None uses the prefix cache.
        """
        rows = sum(request.options.rows for request in requests)
        if isinstance(cache, PinnedPrefix) and rows != 1:
            options = requests[0].options
            raise RequestError(
                f"a session generates one text at a time: leave out n and beams; got n={options.n}, "
                f"beams={options.beams}",
                option="n" if options.n > 1 else "beams",
            )
        if isinstance(cache, KVCache) and cache.batch != rows:
            row_counts = {request.options.rows for request in requests}
            suffix = "" if row_counts == {1} else f" of {' or '.join(map(str, sorted(row_counts)))} rows each"
            raise RequestError(
                f"the cache was made for {cache.batch} rows, but there are {len(requests)} prompts{suffix}"
            )
        jobs = [RequestState(request, self.tokenizer, self.adapters) for request in requests]
        return self._pieces(jobs, rows, cache)

    def stream(self, request: Request, cache: Cache | PinnedPrefix | None) -> Generator[Piece, None, Completion]:
        """The pieces of a request for one text. The generator returns its completion."""
        if request.options.rows > 1:
            raise RequestError("stream yields a single text: use generate for n or beams above 1")
        return _only(self.pieces([request], cache))

    def replay(self, request: Request, token_ids: abc.Sequence[int]) -> ReplayedSequence:
        """The sequence of a request for one text after a replay of these ids."""
        (sequence,) = RequestState(request, self.tokenizer, self.adapters, ReplayedSequence).sequences
        assert isinstance(sequence, ReplayedSequence), "a request without beams"
        sequence.set_output(token_ids)
        model = self.run.model
        with self.prefix_cache.lease(model, 1, sequence.longest) as slots:
            run_to_end(ReplayStep(self.run, slots), slots, [sequence], self.chunk, vocab_size=model.vocab_size)
        return sequence

    def _pieces(self, jobs: abc.Sequence[RequestState], rows: int, cache: Cache | PinnedPrefix | None) -> Pieces:
        started = time.perf_counter()
        run, model = self.run, self.run.model
        lease: AbstractContextManager[CacheManager]
        if isinstance(cache, PinnedPrefix):
            lease = cache.turn(model, jobs[0].sequences[0])
        elif cache is not None:
            lease = nullcontext(RowCacheManager.wrap(model, cache, rows))
        else:
            lease = self.prefix_cache.lease(model, rows, max(job.request.longest for job in jobs))
        sequences = [sequence for job in jobs for sequence in job.sequences]
        with (
            lease as slots,
            closing(BatchSchedule(slots, sequences, self.chunk, vocab_size=model.vocab_size)) as schedule,
        ):
            steps = StepRouter(run, slots, rows=len(sequences), max_len=max(each.longest for each in sequences))
            for job in jobs:
                steps.join(job.sequences, job.options.draft)
            preparation = time.perf_counter() - started
            for sequence in sequences:
                sequence.record_step(preparation)
            for seconds in decode_loop(steps, schedule, slots):
                for sequence in sequences:
                    sequence.record_step(seconds)
                for job in jobs:
                    for piece in job.new_pieces(model.weights_lock.version)[1]:
                        yield piece
                        if isinstance(cache, PinnedPrefix):
                            cache.check(job.sequences[0])
        return [job.completion() for job in jobs]


def drained(pieces: Pieces) -> list[Completion]:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            completions: list[Completion] = end.value
            return completions


def _only(pieces: Pieces) -> Generator[Piece, None, Completion]:
    (completion,) = yield from pieces
    return completion
