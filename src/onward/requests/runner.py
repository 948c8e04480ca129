"""Runs requests through the one loop and gives out pieces and completions."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from onward.cache import CompactableCache, KVCache
from onward.checkpoint import Tokenizer
from onward.completion import Completion, Piece, Stopwatch
from onward.decoding import (
    BeamOptions,
    BeamStep,
    DecodeState,
    DecodeStep,
    Picker,
    PrefixCache,
    PrefixTurn,
    PromptLogprobs,
    Step,
    TokenLogprobs,
    decode_loop,
    prefilled,
    spread,
)
from onward.errors import RequestError
from onward.models import Cache, ModelRun, padded_length
from onward.requests.batch import Batch
from onward.requests.request import Request
from onward.sampling import History, Sampler
from onward.sampling.adjustments import Adjustments

Pieces = Generator[Piece, None, list[Completion]]


@dataclass(frozen=True)
class Runner:
    """Runs requests together, as the rows of one batch.

    run: the model. tokenizer: None where texts are to stay empty. chunk: the most prompt tokens processed at once.
    """

    run: ModelRun
    tokenizer: Tokenizer | None
    chunk: int = 512

    def pieces(
        self,
        requests: Sequence[Request],
        cache: Cache | PrefixCache | None = None,
    ) -> Pieces:
        """Check that the requests can be served, and return a generator over the one loop.

        cache: a cache of `options.rows` rows for each request, which is overwritten; or a `PrefixCache`, whose text one
            request goes on from. None makes one.
        """
        batch = Batch.of(requests, self.tokenizer)
        self._check_cache(batch, cache)
        return self._pieces(batch, self._step(batch), cache)

    def _pieces(self, batch: Batch, step: Step, cache: Cache | PrefixCache | None) -> Pieces:
        began = time.perf_counter()
        turn = self._turn(batch, cache) if isinstance(cache, PrefixCache) else None
        state, prompt_logprobs = self._start(batch, cache if turn is None else turn.cache, turn)
        watch = Stopwatch(len(batch.rows), ahead=time.perf_counter() - began)
        emitted = [0] * len(batch.rows)
        emissions = decode_loop(step, state, batch.rows)
        for emission in emissions if turn is None else turn.follow(emissions):
            # A step of beams emits nothing, and its time is that of every row.
            watch.lap(emission.seconds, [owner for owner, _, _ in emission.pieces] or emission.state.owners)
            for owner, token, text in emission.pieces:
                logprobs = batch.rows[owner].logprobs[emitted[owner]] if batch.options.logprobs is not None else None
                emitted[owner] += 1
                yield Piece(text, token, logprobs)
        return batch.completions(step, watch, prompt_logprobs, 0 if turn is None else turn.kept)

    def _turn(self, batch: Batch, prefix: PrefixCache) -> PrefixTurn:
        (request,) = batch.requests
        if batch.options.prompt_logprobs is not None:  # the whole prompt has to be processed for them
            prefix.truncate(0)
        return prefix.begin(self.run.model, request.prompt, len(request.prompt) + request.max_new_tokens)

    def _start(
        self, batch: Batch, cache: Cache | None, turn: PrefixTurn | None
    ) -> tuple[DecodeState, Sequence[list[TokenLogprobs | None] | None]]:
        """The state to start from, and the logprobs of each prompt, None where the call does not ask for them.

        The texts of a prompt share its prefill, where rows of the cache can be copied.
        """
        model, requests, options = self.run.model, batch.requests, batch.options
        # A cache made here may be narrowed to the rows that go on; the caller's cache must stay whole.
        own = cache is None
        if cache is None:
            longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
            cache = model.new_cache(len(batch.rows), padded_length(longest, model))
        shares = options.rows > 1 and isinstance(cache, CompactableCache)
        copies = 1 if shares else options.rows
        cached = 0 if turn is None else turn.kept
        pending = [request.prompt[cached:] for request in requests for _ in range(copies)]
        shared = cache.first_rows(len(requests)) if shares else cache
        state = DecodeState.start(pending, shared, model.device, cached, compact=own)
        collector = None
        if options.prompt_logprobs is not None:
            collector = PromptLogprobs(pending, options.prompt_logprobs)
            state = prefilled(self.run, state, collector.chunk(self.chunk, model.vocab_size), collector)
        elif shares and any(request.max_new_tokens for request in requests):
            state = prefilled(self.run, state, self.chunk)
        if shares:
            state = spread(state, cache, options.rows)
        return state, [None] * len(requests) if collector is None else collector.logprobs[::copies]

    def _step(self, batch: Batch) -> Step:
        """The step of this batch: of beams, of speculation, or a plain one."""
        params, options, device = [sample.options for sample in batch.samples], batch.options, self.run.model.device
        if options.beams > 1:
            histories = _histories(batch, Adjustments(params, device).needs_history)
            beams = BeamOptions(options.beams, options.length_penalty, options.early_stopping)
            return BeamStep(self.run, batch.rows, beams, params, histories, self.chunk, options.logprobs)
        sampler = Sampler(params, device)
        picker = Picker(sampler, _histories(batch, sampler.needs_history), options.logprobs)
        if options.draft is None:
            return DecodeStep(self.run, picker, self.chunk)
        return options.draft.step(
            self.run,
            picker,
            [sample.prompt for sample in batch.samples],
            batch.rows,
            max_len=max(len(sample.prompt) + sample.max_new_tokens for sample in batch.samples),
            vocab_size=self.run.model.vocab_size,
            device=device,
            chunk=self.chunk,
        )

    def _check_cache(self, batch: Batch, cache: Cache | PrefixCache | None) -> None:
        rows = len(batch.rows)
        if isinstance(cache, PrefixCache) and rows != 1:
            raise RequestError(f"a session goes on with one text at a time; got {rows}")
        if isinstance(cache, KVCache) and cache.batch != rows:
            prompts, rows_each = len(batch.requests), batch.options.rows
            of_rows = "" if rows_each == 1 else f" of {rows_each} rows each"
            raise RequestError(f"the cache was made for {cache.batch} rows, but there are {prompts} prompts{of_rows}")


def drained(pieces: Pieces) -> list[Completion]:
    """Run to the end and return the completions."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            completions: list[Completion] = end.value
            return completions


def only(pieces: Pieces) -> Generator[Piece, None, Completion]:
    """The pieces of one request. The generator returns its completion."""
    (completion,) = yield from pieces
    return completion


def _histories(batch: Batch, needed: bool) -> list[History] | None:
    """The history of each row before it starts; None where no option reads it."""
    return [History(sample.prompt) for sample in batch.samples] if needed else None
