"""Prefill and decode as two calls over a cache with explicit lengths, and speculative decoding with them.

`FilledCache.truncate` removes draft tokens by lowering the cache's lengths: entries past a length are never read.
`speculate` wraps each inferencer as a `Model`, so it shares the step and the drafters of all other requests.

Shapes: B rows, T query tokens, N new tokens, V vocabulary.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onward.cache import length_of
from onward.decoding import BatchSchedule, DecodeStep, RowCacheManager, Sequence, decode_loop
from onward.decoding.api import chooser_of
from onward.decoding.loop import run_to_end
from onward.decoding.prompt import check_context_length
from onward.decoding.speculation.drafter import Speculation
from onward.decoding.speculation.model_drafter import ModelDrafter
from onward.decoding.speculation.speculator import Speculator
from onward.decoding.speculation.step import draft_state
from onward.errors import RequestError
from onward.models import Cache, Model, Run, reused_run
from onward.models.contract import take_positions
from onward.program import ForwardBatch, SamplingKernel, StepResult
from onward.sampling import Sampler, greedy
from onward.util.checks import check_whole

# float [B, V] -> int [B], such as `onward.greedy`; or a `Sampler`, which also gets the positions.
SampleStrategy = Callable[[Tensor], Tensor] | Sampler


class PrefillOutput(NamedTuple):
    """token_ids: int64 [B, 1], the next token. token_logits: float [B, T, V], the logits after each query token."""

    token_ids: Tensor
    token_logits: Tensor


class DecodeOutput(NamedTuple):
    """token_ids: int64 [B, N], the new tokens. token_logits: float [B, N, V], the logits each was picked from.

    N is the length of the longest row. A row that ended earlier repeats its last id and has logits of 0 there.
    """

    token_ids: Tensor
    token_logits: Tensor


@dataclass
class FilledCache:
    """A model's cache (from `Model.new_cache`) and the number of positions in each row, int32 [B]; an inferencer
    updates both."""

    cache: Cache
    lengths: Tensor

    def truncate(self, lengths: Tensor) -> None:
        """Remove each row's positions past `lengths`, int [B]. Nothing is moved or cleared.

        Raises:
            RequestError: a different shape, or a length below 0 or above the row's.
        """
        if lengths.shape != self.lengths.shape or bool(((lengths < 0) | (lengths > self.lengths)).any()):
            raise RequestError(
                f"truncate takes a length for each row, from 0 to what the row holds, {self.lengths.tolist()}; got "
                f"{lengths.tolist()}"
            )
        self.lengths = lengths.to(self.lengths)


class Inferencer(Protocol):
    """Processes tokens and generates more. The cache holds all tokens before the query.

    sample_strategy: a function of logits float [B, V] -> ids int [B], such as `onward.greedy`; or a `Sampler` of B
    rows, which also gets the positions.
    """

    def new_cache(self, batch: int, max_len: int) -> FilledCache:
        """An empty cache of `max_len` positions for each of `batch` rows."""

    def prefill(self, query_token_ids: Tensor, kv_cache: FilledCache, sample_strategy: SampleStrategy) -> PrefillOutput:
        """Process a query, int [B, T], and pick the next token. The cache then holds T more positions."""

    def decode(
        self, query_token_ids: Tensor, kv_cache: FilledCache, max_new_tokens: int, sample_strategy: SampleStrategy
    ) -> DecodeOutput:
        """Process a query, int [B, 1], and decode up to `max_new_tokens` (1 or more) or the end of each row.

        The cache then holds the query and the new tokens, except each row's last token, which is the next query. So
        after a fully accepted draft, a drafter also has to process the draft's last token.
        """


class ModelInferencer:
    """An `Inferencer` over any `Model`.

    eos: an id or ids that end a row in `decode`; the id is part of the output.
    prefill_chunk: the most query tokens processed at once. It limits memory and changes no token.
    compile: as in `onward.LanguageModel`.
    """

    def __init__(
        self, model: Model, eos: int | abc.Sequence[int] = (), prefill_chunk: int = 512, compile: str = "auto"
    ) -> None:
        self.model = model
        self.eos = frozenset((eos,) if isinstance(eos, int) else eos)
        self.prefill_chunk = prefill_chunk
        self.compile = compile
        self._model_run: Run | None = None

    def new_cache(self, batch: int, max_len: int) -> FilledCache:
        """See `Inferencer`."""
        lengths = torch.zeros(batch, dtype=torch.int32, device=self.model.device)
        return FilledCache(self.model.new_cache(batch, max_len), lengths)

    def prefill(self, query_token_ids: Tensor, kv_cache: FilledCache, sample_strategy: SampleStrategy) -> PrefillOutput:
        """See `Inferencer`.

        Raises:
            RequestError: a query that is not ids [B, T] with the cache's B, or a sampler of another number of rows.
            ContextOverflowError: the longest row and the query exceed the cache or the model's context.
        """
        query_length = self._check_query(query_token_ids, kv_cache)
        self._check_context_length(kv_cache, "query_token_ids", query_length)
        token_ids, logits = self._run(query_token_ids, kv_cache, 1, frozenset(), sample_strategy)
        kv_cache.lengths = kv_cache.lengths + query_length
        return PrefillOutput(_padded(token_ids, self.model.device), logits)

    def decode(
        self, query_token_ids: Tensor, kv_cache: FilledCache, max_new_tokens: int, sample_strategy: SampleStrategy
    ) -> DecodeOutput:
        """See `Inferencer`.

        Raises:
            RequestError: as for `prefill`, a query of another length than 1, or `max_new_tokens` below 1.
            ContextOverflowError: the longest row and `max_new_tokens` exceed the cache or the model's context.
        """
        check_whole("max_new_tokens", max_new_tokens, low=1)
        if self._check_query(query_token_ids, kv_cache) != 1:
            raise RequestError(
                f"decode takes one query token a row, [B, 1]; got {list(query_token_ids.shape)}: prefill takes more"
            )
        self._check_context_length(kv_cache, "max_new_tokens", max_new_tokens)
        token_ids, logits = self._run(query_token_ids, kv_cache, max_new_tokens, self.eos, sample_strategy)
        ids = _padded(token_ids, self.model.device)
        new = torch.tensor(list(map(len, token_ids)), dtype=torch.int32, device=ids.device)
        ended = torch.arange(ids.shape[1], device=ids.device) >= new.unsqueeze(1)
        kv_cache.lengths = kv_cache.lengths + new
        return DecodeOutput(ids, logits.masked_fill(ended.unsqueeze(2), 0.0))

    def _run(
        self, query: Tensor, kv_cache: FilledCache, max_new_tokens: int, eos: frozenset[int], strategy: SampleStrategy
    ) -> tuple[list[list[int]], Tensor]:
        """Run the decode loop. Returns the new ids of each row, and the logits at every token [B, T, V]."""
        run = self._model_run
        if run is None or run.model is not self.model:
            run = self._model_run = reused_run(self.model, self.compile)
        recorded = _RecordedRun(run)
        device, lengths = self.model.device, kv_cache.lengths.tolist()
        # Every forward gets all rows, so that it returns the logits of all.
        slots = RowCacheManager(kv_cache.cache, len(lengths), None, None, filled=lengths)
        chooser, sampling = chooser_of(strategy, len(lengths), device)
        sequences = [
            Sequence(ids, max_new_tokens, eos, start=start, sampling=params)
            for ids, start, params in zip(query.tolist(), lengths, sampling, strict=True)
        ]
        step = DecodeStep(recorded, slots, chooser, device)
        for _ in decode_loop(step, BatchSchedule(slots, sequences, self.prefill_chunk), slots):
            kv_cache.cache = slots.cache
        return [sequence.token_ids for sequence in sequences], torch.cat(recorded.logits, 1)

    def _check_query(self, query: Tensor, kv_cache: FilledCache) -> int:
        batch = len(kv_cache.lengths)
        if not _are_ids(query) or query.shape[0] != batch:
            raise RequestError(
                f"a query must be whole numbers [{batch}, T], as many rows as the cache has; got {query.dtype} "
                f"{list(query.shape)}"
            )
        if bool(((query < 0) | (query >= self.model.vocab_size)).any()):
            raise RequestError(f"a query must hold ids from 0 to {self.model.vocab_size - 1}; got {query.tolist()}")
        return query.shape[1]

    def _check_context_length(self, kv_cache: FilledCache, of_new: str, new: int) -> None:
        longest = int(kv_cache.lengths.max())
        check_context_length(
            longest,
            new,
            context=self.model.max_seq_len,
            cache=length_of(kv_cache.cache),
            what="cached text",
            of_new=of_new,
            advice="truncate the cache",
        )


class _RecordedRun:
    """A run that computes and keeps the logits of all tokens. logits: [B, T, V] of each step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.logits: list[Tensor] = []

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        result = self._run.step(batch._replace(logits_at=None), sampler)
        self.logits.append(result.logits)
        at = batch.logits_at
        return result if at is None else result._replace(logits=take_positions(result.logits, at))


def _are_ids(query: Tensor) -> bool:
    """Whether a tensor is of whole numbers [B, T], and not empty."""
    return query.dim() == 2 and not (query.is_floating_point() or query.dtype == torch.bool) and query.numel() > 0


def _padded(token_ids: abc.Sequence[list[int]], device: torch.device) -> Tensor:
    longest = max(map(len, token_ids))
    ids = [row + row[-1:] * (longest - len(row)) for row in token_ids]
    return torch.tensor(ids, dtype=torch.int64, device=device)


class SpeculateOutput(NamedTuple):
    """token_ids: int64 [B, N], where N is the length of the longest row; a row that ended earlier repeats its last id.
    speculation: the drafting counts of each row.
    """

    token_ids: Tensor
    speculation: list[Speculation]


def speculate(
    target: Inferencer,
    drafter: Inferencer,
    query_token_ids: Tensor,
    max_new_tokens: int,
    sample_strategy: SampleStrategy = greedy,
    *,
    eos: int | abc.Sequence[int] = (),
    length: int | None = None,
) -> SpeculateOutput:
    """Continue prompts int [B, T]: `drafter` guesses ids, and `target` verifies them.

    Only `prefill` of each is called, over a cache from its own `new_cache`.

    Args:
        max_new_tokens: the most ids to generate, 1 or more.
        sample_strategy: as in `Inferencer`. A `Sampler` draws with the same noise for both.
        eos: an id or ids that end a row.
        length: as in `Speculator`.

    Raises:
        RequestError: an argument outside its range; and the errors of the target, a `ContextOverflowError` if it is a
            `ModelInferencer` whose context the text exceeds.
        DraftError: the drafter failed.
    """
    check_whole("max_new_tokens", max_new_tokens, low=1)
    query = query_token_ids
    if not _are_ids(query):
        raise RequestError(
            f"speculate takes prompts as whole numbers [B, T], T of 1 or more; got {query.dtype} {list(query.shape)}"
        )
    prompts: list[list[int]] = query.tolist()
    stop_ids = frozenset((eos,) if isinstance(eos, int) else eos)
    max_len = query.shape[1] + max_new_tokens
    model = _as_model(target, query)
    device, rows = query.device, len(prompts)
    chooser, sampling = chooser_of(sample_strategy, rows, device, whole_text=True)
    sequences = [
        Sequence(prompt, max_new_tokens, stop_ids, sampling=params)
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    slots = RowCacheManager(model.new_cache(rows, max_len), rows, max_len, None)
    speculator = Speculator(ModelDrafter(_as_model(drafter, query)), length=length)
    plain = DecodeStep(Run(model), slots, chooser, device)
    step = speculator.step(plain, chooser, model, rows=rows, max_len=max_len)
    step.join(sequences)
    run_to_end(step, slots, sequences)
    token_ids = _padded([sequence.token_ids for sequence in sequences], device)
    return SpeculateOutput(token_ids, [draft_state(sequence).counts(sequence.token_ids) for sequence in sequences])


def _as_model(inferencer: Inferencer, query: Tensor) -> Model:

    def forward(tokens: Tensor, offsets: Tensor, cache: FilledCache, params: Any) -> tuple[Tensor, FilledCache]:
        cache.truncate(offsets)
        return inferencer.prefill(tokens, cache, greedy).token_logits, cache

    # The protocol has no vocabulary size, but the logits after one id show it.
    first = inferencer.prefill(query[:1, :1], inferencer.new_cache(1, 1), greedy).token_logits
    return Model(
        forward=forward,
        params=(),
        new_cache=inferencer.new_cache,
        vocab_size=first.shape[-1],
        device=query.device,
        compiles=False,
    )
