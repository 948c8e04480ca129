"""A step processes pending ids of sequences and emits the next ids. Prefill and decode are the same step."""

import math
import weakref
from collections import abc
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.decoding.batch import LogitsNeeded, ScheduledSequence, batches, needs_of, processed
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.program import Executable, SamplingKernel
from onward.sampling import ConstraintState, History, Sampler, SamplingParams
from onward.sampling.logprobs import Token, TokenLogprobs, checked_ids, not_finite, token_logprobs, tokens_of

# (logits [B, V], positions int32 [B] of the tokens to choose) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]
# The draft ids of each sequence.
Drafts = abc.Sequence[abc.Sequence[int]]


class TokenSampler(Protocol):
    """Chooses the next id of sequences from their logits."""

    def __call__(
        self, logits: Tensor, positions: Tensor, sequences: abc.Sequence[Sequence], drafts: Drafts | None = None
    ) -> Tensor:
        """Logits float [B, V] of B sequences and the positions int [B] of the ids to choose -> ids int64 [B]. With
        drafts [B, K, V] and [B, K] -> [B, K], where id k is chosen as if the first k draft ids preceded it."""

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        """The kernel for these sequences; None if there is none."""


class SamplerCache:
    """Chooses with each sequence's `sampling` and history. device: the device of the logits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[list[weakref.ref[Sequence]], Sampler] | None = None

    def __call__(
        self, logits: Tensor, positions: Tensor, sequences: abc.Sequence[Sequence], drafts: Drafts | None = None
    ) -> Tensor:
        sampler = self.sampler(sequences)
        return sampler(logits, positions, histories_of(sampler, sequences), drafts, constraints_of(sequences))

    def sampler(self, sequences: abc.Sequence[Sequence]) -> Sampler:
        """The sampler of these sequences. The last one is cached, because most steps run the same sequences."""
        last = self._last
        if last is not None and [sequence() for sequence in last[0]] == list(sequences):
            return last[1]
        sampler = Sampler([sampling_of(sequence) for sequence in sequences], self._device)
        # Weak, because this object lives as long as its engine and must not keep ended sequences alive.
        self._last = [weakref.ref(sequence, self._forget) for sequence in sequences], sampler
        return sampler

    def _forget(self, sequence: "weakref.ref[Sequence]") -> None:
        last = self._last
        if last is not None and sequence in last[0]:
            self._last = None

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        free = all(sequence.constraint is None or sequence.constraint.mask() is None for sequence in sequences)
        return self.sampler(sequences).pick if free else None


class FunctionSampler:
    """Chooses with one function of logits and positions, whose attribute `pick` may be its kernel."""

    def __init__(self, select: Select) -> None:
        self._select = select
        self._kernel: SamplingKernel | None = getattr(select, "pick", None)

    def __call__(
        self, logits: Tensor, positions: Tensor, sequences: abc.Sequence[Sequence], drafts: Drafts | None = None
    ) -> Tensor:
        assert drafts is None, "a function takes no drafts"
        return self._select(logits, positions)

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        return self._kernel


def histories_of(sampler: Sampler, sequences: abc.Sequence[Sequence]) -> list[History] | None:
    """The histories of sequences; None if the sampler reads none."""
    return [sequence.read_history() for sequence in sequences] if sampler.needs_history else None


def constraints_of(sequences: abc.Sequence[Sequence]) -> list[ConstraintState | None] | None:
    """The constraints of sequences; None if there are none."""
    constraints = [sequence.constraint for sequence in sequences]
    return constraints if any(constraint is not None for constraint in constraints) else None


def sampling_of(sequence: Sequence) -> SamplingParams:
    assert sequence.sampling is not None, "a sequence without sampling parameters needs a FunctionSampler"
    return sequence.sampling


# What a step emitted for each item of its work, for `Sequence.take_step`: tokens, or the candidates of a beam search;
# nothing while prompt ids are still pending.
Emitted = list[list[Any]]


class Step(Protocol):
    """Processes pending ids and emits the next ids. After a failure, the work can be retried, whole or in parts."""

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted: ...


class DecodeStep:
    """Emits the token that the model predicts after each sequence's last pending id.

    run: the model. slots: the sequences' cache. chooser: logits to ids.
    """

    def __init__(self, run: Executable, slots: CacheManager, chooser: TokenSampler, device: torch.device) -> None:
        self.run, self.slots, self.chooser, self.device = run, slots, chooser, device

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        scored = []
        for indices, needs in batches(work, self.slots):
            items = [work[index] for index in indices]  # in the order of their rows
            sequences = [sequence for sequence, _ in items]
            sampler = self.chooser.kernel(sequences) if all(map(_decodes, items)) else None
            with self.slots.lock:
                logits, ids = processed(self.run, self.slots, items, needs, self.device, sampler)
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
        return emitted

    def _tokens(
        self, indices: abc.Sequence[int], items: abc.Sequence[ScheduledSequence], logits: Tensor, ids: Tensor | None
    ) -> list[tuple[int, Token]]:
        """The next tokens of the items that have no more pending ids, each with its index. ids: of all items, if they
        are sampled and checked."""
        if ids is not None and all(item.sequence.top_logprobs is None for item in items):
            return list(zip(indices, map(Token, ids.tolist()), strict=True))
        places = [
            place
            for place, item in enumerate(items)
            if item.sequence.finish_reason is None and item.tokens == item.sequence.pending
        ]
        if not places:
            return []
        sequences = [items[place].sequence for place in places]
        if logits.shape[1] == 1:
            last = logits.squeeze(1)
            last = last if len(places) == last.shape[0] else last[places]
        else:
            last = logits[places, [items[place].tokens - 1 for place in places]]
        if ids is None:
            positions = torch.tensor([each.length for each in sequences], dtype=torch.int32, device=self.device)
            with torch.no_grad():
                ids = self.chooser(last, positions, sequences)
        tokens = tokens_of(checked_ids(ids, last), last, [sequence.top_logprobs for sequence in sequences])
        return [(indices[place], token) for place, token in zip(places, tokens, strict=True)]


def _decodes(item: ScheduledSequence) -> bool:
    """Whether the id to process is a new one. (Prompt ids need calls that check for changed weights.)"""
    sequence = item.sequence
    return item.tokens == sequence.pending == 1 and sequence.has_begun and sequence.finish_reason is None


def missing_logprobs(item: ScheduledSequence, logits: Tensor) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """The missing logprobs of a sequence's prompt and of its replayed ids that follow from the logits [T, V] after the
    processed ids."""
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
    logprobs = token_logprobs(ids, logits[: len(ids)], top)
    if any(math.isnan(token.chosen) for token in logprobs):
        raise not_finite()
    return logprobs
