"""A step processes pending ids of sequences and emits the ids that follow. Prefill and decoding are the same step."""

import math
import weakref
from collections import abc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from onward.decoding.batch import (
    LogitsNeeded,
    PickingRun,
    Run,
    ScheduledSequence,
    batches,
    forward,
    inputs,
    needs_of,
    processed,
)
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.models.contract import check_logits
from onward.program import SamplingKernel
from onward.sampling import ConstraintState, History, Sampler, SamplingParams
from onward.sampling.logprobs import Token, TokenLogprobs, checked_ids, not_finite, token_logprobs, tokens_of

# (logits [B, V], positions int32 [B] of the tokens to choose) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]


class TokenSampler(Protocol):
    """Chooses the next id of sequences from their logits."""

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        """float [B, V] and int [B], the positions of the ids to choose, of B sequences -> ids int64 [B].

        For K places a sequence: [B, K, V] and [B, K] -> [B, K]. The id at place k is chosen as if the first k ids of
        the sequence's draft had been.
        """
        ...

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        """The kernel that does it for these sequences; None where none does."""
        ...


class SamplerCache:
    """Chooses as each sequence's own `sampling` says, from its own history. device: where the logits are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[list[weakref.ref[Sequence]], Sampler] | None = None

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        sampler = self.sampler(sequences)
        return sampler(logits, positions, histories_of(sampler, sequences), drafts, constraints_of(sequences))

    def sampler(self, sequences: abc.Sequence[Sequence]) -> Sampler:
        """The sampler of these sequences. The last one is kept, because most steps are of the same sequences."""
        last = self._last
        if last is not None and [sequence() for sequence in last[0]] == list(sequences):
            return last[1]
        sampler = Sampler([sampling_of(sequence) for sequence in sequences], self._device)
        # A chooser lives as long as its engine, and must not keep anything of a sequence that has ended.
        self._last = [weakref.ref(sequence, self._forget) for sequence in sequences], sampler
        return sampler

    def _forget(self, sequence: "weakref.ref[Sequence]") -> None:
        last = self._last
        if last is not None and sequence in last[0]:
            self._last = None

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        return self.sampler(sequences).pick if constraints_of(sequences) is None else None


class FunctionSampler:
    """Chooses with a function of logits and positions that is the same for all sequences.

    select: may have an attribute `pick`, the kernel that does it.
    """

    def __init__(self, select: Select) -> None:
        self._select = select
        self._kernel: SamplingKernel | None = getattr(select, "pick", None)

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        assert drafts is None, "a function chooses at one place at a time"
        return self._select(logits, positions)

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        return self._kernel


def histories_of(sampler: Sampler, sequences: abc.Sequence[Sequence]) -> list[History] | None:
    """The histories of sequences; None where the sampler reads none."""
    return [sequence.read_history() for sequence in sequences] if sampler.needs_history else None


def constraints_of(sequences: abc.Sequence[Sequence]) -> list[ConstraintState | None] | None:
    """The constraints of sequences; None where none has any."""
    constraints = [sequence.constraint for sequence in sequences]
    return constraints if any(constraint is not None for constraint in constraints) else None


def sampling_of(sequence: Sequence) -> SamplingParams:
    """How a sequence's tokens are chosen."""
    assert sequence.sampling is not None, "a sequence without sampling wants a FunctionSampler"
    return sequence.sampling


# The tokens that a step emitted, for every item of its work; none where ids of a prompt are still pending.
Emitted = list[list[Token]]

# The most logits turned into logprobs at once. That takes some 30 bytes each.
_MOST_SCORED = 2**22


class Step(Protocol):
    """Processes pending ids and emits the ids that follow.

    A step that fails has changed nothing that counts: the same work may be tried again, whole or in parts.
    """

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted: ...


class DecodeStep:
    """Emits for each sequence the token that the model predicts from its last pending id.

    run: the model. slots: where the sequences' keys and values are. chooser: logits to ids.
    """

    def __init__(self, run: Run, slots: CacheManager, chooser: TokenSampler, device: torch.device) -> None:
        self.run, self.slots, self.chooser, self.device = run, slots, chooser, device
        self._picking = run if isinstance(run, PickingRun) else None

    @torch.no_grad()
    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        scored = []
        for indices, needs in batches(work, self.slots):
            items = [work[index] for index in indices]  # in the order of their rows
            logits, ids = self._processed(items, needs)
            if logits is None:
                continue
            if needs is LogitsNeeded.ALL:
                scored += [
                    (item.sequence, *missing_logprobs(item, logits[place]))
                    for place, item in enumerate(items)
                    if needs_of(item) is LogitsNeeded.ALL
                ]
            for index, token in self._tokens(indices, items, logits, ids):
                emitted[index].append(token)
        for sequence, of_prompt, of_output in scored:
            sequence.prompt_logprobs += of_prompt
            sequence.logprobs += of_output
        for sequence, count in work:
            sequence.computed += count
        return emitted

    def _processed(
        self, items: abc.Sequence[ScheduledSequence], needs: LogitsNeeded
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits of items, and their ids where the run picks them in the same call."""
        with self.slots.lock:
            if self._picking is None or not all(map(_decodes, items)):
                return processed(self.run, self.slots, items, needs, self.device), None
            sequences = [sequence for sequence, _ in items]
            given = inputs(items, self.slots, self.device)
            pick = self.chooser.kernel(sequences) if given.all_rows else None
            if pick is None:
                return given.of_items(forward(self.run, self.slots, given, None)), None
            logits, ids, cache = self._picking.picked(*given[:2], given.view.cache, pick, given.offsets + 1)
            check_logits(logits, given.tokens.shape)
            self.slots.check_written(given.view, cache)
            return logits, ids

    def _tokens(
        self, indices: abc.Sequence[int], items: abc.Sequence[ScheduledSequence], logits: Tensor, ids: Tensor | None
    ) -> list[tuple[int, Token]]:
        """The tokens of the items whose text goes on, each with its index."""
        going_on = [place for place, item in enumerate(items) if _goes_on(item)]
        if not going_on:
            return []
        sequences = [items[place].sequence for place in going_on]
        if logits.shape[1] == 1:
            last = logits[:, 0] if len(going_on) == len(logits) else logits[going_on, 0]
        else:
            last = logits[going_on, [items[place].tokens - 1 for place in going_on]]
        if ids is None:
            after = [items[place].sequence.length for place in going_on]
            ids = self.chooser(last, torch.tensor(after, dtype=torch.int32, device=self.device), sequences)
        tokens = tokens_of(checked_ids(ids, last), last, [sequence.top_logprobs for sequence in sequences])
        return [(indices[place], token) for place, token in zip(going_on, tokens, strict=True)]


def _decodes(item: ScheduledSequence) -> bool:
    """Whether the id to process is a new one. (A prompt's ids are for calls that look whether weights have moved.)"""
    sequence = item.sequence
    return item.tokens == sequence.pending == 1 and sequence.has_begun and sequence.finish_reason is None


def _goes_on(item: ScheduledSequence) -> bool:
    return item.sequence.finish_reason is None and item.tokens == item.sequence.pending


def missing_logprobs(item: ScheduledSequence, logits: Tensor) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """The logprobs that a sequence lacks, of its prompt's ids and of ids emitted elsewhere, as far as logits [T, V]
    after the processed ids tell them."""
    sequence, count = item
    missing = sequence.scoring_from
    assert missing is not None
    first, last = missing + 1, min(sequence.computed + count + 1, sequence.length)  # positions of scored ids
    output_at = min(max(first, sequence.output_at), last)
    after = logits[first - sequence.computed - 1 :]
    of_prompt = _scored(sequence, first, output_at, after, sequence.prompt_top)
    return of_prompt, _scored(sequence, output_at, last, after[output_at - first :], sequence.top_logprobs)


def _scored(sequence: Sequence, first: int, last: int, logits: Tensor, top: int | None) -> list[TokenLogprobs]:
    """The logprobs of the ids at the positions first … last - 1, each under its row of the logits."""
    if top is None:
        return []
    ids = sequence.ids(first, last)
    at_once = max(1, _MOST_SCORED // logits.shape[1])
    logprobs: list[TokenLogprobs] = []
    for begin in range(0, len(ids), at_once):
        some = ids[begin : begin + at_once]
        logprobs += token_logprobs(some, logits[begin : begin + len(some)], top)
    if any(math.isnan(token.chosen) for token in logprobs):
        raise not_finite()
    return logprobs
