"""Runs requests through the decode loop, and yields pieces and completions."""

import time
from collections import abc
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from onward.cache import KVCache
from onward.decoding import (
    BatchSchedule,
    BeamSearch,
    BeamStep,
    CacheManager,
    DecodeStep,
    RowCacheManager,
    SamplerCache,
    ScheduledSequence,
    Sequence,
    SharedCache,
    Step,
    decode_loop,
)
from onward.decoding.loop import Failed
from onward.decoding.pinned_prefix import PinnedPrefix, Turn
from onward.decoding.speculation import SpeculativeStep, Speculator
from onward.decoding.speculation.pace import LENGTHS
from onward.decoding.speculation.step import draft_forced
from onward.decoding.step import Emitted
from onward.errors import RequestError
from onward.language_model.completion import Completion, Piece
from onward.language_model.job import RequestState
from onward.language_model.request import Request
from onward.models import Cache, Run
from onward.models.adapters import Adapters
from onward.tokenizer import Tokenizer


class StepRouter:
    """A `Step` that runs each sequence with its kind of step: plain, beam search, or speculative with its drafter.

    Sequences of one kind run together. If any sequence without a draft has a constraint, all of them run with a step
    that drafts the tokens that constraints force.

    failed: called for a failed search, as in `decode_loop`. run_step: runs the step of one kind.
    """

    def __init__(
        self,
        run: Run,
        slots: CacheManager,
        failed: Failed | None = None,
        run_step: Callable[[Step, abc.Sequence[ScheduledSequence]], Emitted] = lambda step, work: step(work),
    ) -> None:
        self._run, self._slots, self._run_step = run, slots, run_step
        device, vocab_size = run.model.device, run.model.vocab_size
        self._plain = DecodeStep(run, slots, SamplerCache(device), device)
        self._beams = BeamStep(self._plain, run, slots, device, failed)
        self._forced = SpeculativeStep(
            self._plain, run, slots, SamplerCache(device), device, longest=LENGTHS[-1], vocab_size=vocab_size
        )
        self._speculative: dict[Speculator, Step] = {}
        self._special: dict[Sequence, Step] = {}  # of sequences whose step is not the plain one

    def join(self, sequences: abc.Sequence[Sequence], draft: Speculator | None) -> None:
        """Choose the step of these sequences. draft: the drafter of all of them. Preempted sequences join again, and
        keep the state of their drafts."""
        for sequence in sequences:
            if isinstance(sequence, BeamSearch):
                self._special[sequence] = self._beams
        if draft is None:
            constrained = [
                each for each in sequences if each.constraint is not None and not isinstance(each, BeamSearch)
            ]
            draft_forced(sequence for sequence in constrained if sequence.drafting is None)
            self._special.update(dict.fromkeys(constrained, self._forced))
            return
        device, vocab_size = self._run.model.device, self._run.model.vocab_size
        if draft not in self._speculative:
            used = set(self._special.values())
            self._speculative = {drafter: step for drafter, step in self._speculative.items() if step in used}
            sampler = SamplerCache(device)
            self._speculative[draft] = draft.step(self._plain, self._run, self._slots, sampler, device, vocab_size)
        if new := [sequence for sequence in sequences if sequence.drafting is None]:
            draft.join(new, vocab_size, device)
        self._special.update(dict.fromkeys(sequences, self._speculative[draft]))

    def leave(self, sequences: abc.Iterable[Sequence]) -> None:
        """Forget sequences that have ended. An unused drafter's step is dropped when a new drafter joins."""
        for sequence in sequences:
            self._special.pop(sequence, None)

    def by_kind(self, work: abc.Sequence[ScheduledSequence]) -> list[tuple[Step, abc.Sequence[int]]]:
        """Divide work by kind: steps with the indices of their items."""
        if not self._special:
            return [(self._plain, range(len(work)))]
        kinds: dict[Step, list[int]] = {}
        for index, (sequence, _) in enumerate(work):
            kinds.setdefault(self._special.get(sequence, self._plain), []).append(index)
        if self._forced in kinds and self._plain in kinds:
            kinds[self._forced] = sorted([*kinds[self._forced], *kinds.pop(self._plain)])
        return list(kinds.items())

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        kinds = self.by_kind(work)
        if len(kinds) == 1:
            return self._run_step(kinds[0][0], work)
        emitted: Emitted = [[] for _ in work]
        for step, indices in kinds:
            for index, tokens in zip(indices, self._run_step(step, [work[at] for at in indices]), strict=True):
                emitted[index] = tokens
        return emitted


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
        jobs = [RequestState(request, self.tokenizer, self.adapters) for request in requests]
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
        return self._pieces(jobs, rows, cache)

    def stream(self, request: Request, cache: Cache | PinnedPrefix | None) -> Generator[Piece, None, Completion]:
        """The pieces of a request for one text. The generator returns its completion."""
        if request.options.rows > 1:
            raise RequestError("stream yields a single text: use generate for n or beams above 1")
        return _only(self.pieces([request], cache))

    def _pieces(self, jobs: abc.Sequence[RequestState], rows: int, cache: Cache | PinnedPrefix | None) -> Pieces:
        started = time.perf_counter()
        if isinstance(cache, PinnedPrefix):
            turn = self._turn(jobs[0], cache)
            yield from self._decode(jobs, turn.slots, turn, started)
        elif cache is not None:
            yield from self._decode(jobs, RowCacheManager.wrap(self.run.model, cache, rows), None, started)
        else:
            longest = max(sequence.longest for job in jobs for sequence in job.sequences)
            with self.prefix_cache.lease(self.run.model, rows, longest) as slots:
                yield from self._decode(jobs, slots, None, started)
        return [job.completion() for job in jobs]

    def _decode(
        self, jobs: abc.Sequence[RequestState], slots: CacheManager, turn: Turn | None, started: float
    ) -> Iterator[Piece]:
        """Decode the jobs to their ends in these slots. started: on the clock `time.perf_counter`."""
        steps = StepRouter(self.run, slots)
        for draft in dict.fromkeys(job.request.options.draft for job in jobs):
            steps.join([each for job in jobs if job.request.options.draft is draft for each in job.sequences], draft)
        sequences = [sequence for job in jobs for sequence in job.sequences]
        siblings = {sequence: first for job in jobs for sequence, first in job.siblings.items()}
        vocab_size, keep = self.run.model.vocab_size, turn is not None
        schedule = BatchSchedule(slots, sequences, self.chunk, vocab_size=vocab_size, siblings=siblings, keep=keep)
        preparation = time.perf_counter() - started
        for job in jobs:
            job.record_step(preparation)
        job_of = {sequence: job for job in jobs for sequence in job.sequences}
        try:
            for emission in decode_loop(steps, schedule, slots):
                if turn is not None:
                    turn.note(sequences[0].computed_ids())
                for job in jobs:
                    job.record_step(emission.seconds)
                for sequence, token, text, drafted in emission.pieces:
                    yield job_of[sequence].next_piece(sequence, token, text, drafted)
                if turn is not None:
                    turn.check()
        finally:
            schedule.close()

    def _turn(self, job: RequestState, text: PinnedPrefix) -> Turn:
        (sequence,) = job.sequences
        if sequence.prompt_top is not None:  # prompt logprobs need the whole prompt
            text.truncate(0)
        turn = text.begin(self.run.model, sequence.prompt, sequence.longest, sequence.adapter)
        sequence.slot, sequence.computed, sequence.cached = turn.slot, turn.reused, turn.reused
        return turn


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
