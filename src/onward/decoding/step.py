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
from onward.errors import NothingToDrawError
from onward.program import Executable, SamplingKernel
from onward.sampling import ConstraintState, History, Sampler, SamplingParams
from onward.sampling.logprobs import Token, TokenLogprobs, checked_ids, not_finite, token_logprobs, tokens_of

# (logits [B, V], positions int32 [B] of the tokens to choose) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]
# The draft ids of each sequence.
Drafts = abc.Sequence[abc.Sequence[int]]


class TokenSampler(Protocol):
    """Chooses the next id of sequences from their logits."""

    @property
    def select(self) -> Select | None:
        """The function that it applies; None if it draws with the parameters of each sequence."""

    def __call__(
        self, logits: Tensor, positions: Tensor, sequences: abc.Sequence[Sequence], drafts: Drafts | None = None
    ) -> Tensor:
        """Logits float [B, V] of B sequences and the positions int [B] of the ids to choose -> ids int64 [B]. With
        drafts [B, K, V] and [B, K] -> [B, K], where id k is chosen as if the first k draft ids preceded it."""

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        """The kernel for these sequences; None if there is none."""


class SamplerCache:
    """Chooses with each sequence's `sampling` and history. device: the device of the logits."""

    select = None

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

    @torch.no_grad()
    def drawn(self, tokens: list[Token], logits: Tensor, sequences: abc.Sequence[Sequence]) -> list[Token]:
        """The next tokens [B] of B sequences, from logits [B, V]. Those of sequences that report it have the logprobs
        under the distributions that they were drawn from."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling_logprobs]
        if not rows:
            return tokens
        sampler = self.sampler(sequences)
        if len(rows) < len(sequences):
            sequences, sampler, logits = [sequences[row] for row in rows], sampler.take(rows), logits[rows]
        ids = torch.tensor([tokens[row].id for row in rows], device=logits.device)
        histories, constraints = histories_of(sampler, sequences), constraints_of(sequences)
        positions = positions_of(sequences, logits.device)
        drawn = sampler.drawn(ids, logits, positions, histories, None, constraints)
        for row, logprob, support in zip(rows, drawn.logprobs.tolist(), drawn.support.tolist(), strict=True):
            if (entry := tokens[row].logprobs) is not None:
                tokens[row] = Token(tokens[row].id, entry._replace(sampling=logprob, support=support))
        return tokens

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
        self.select = select
        self._kernel: SamplingKernel | None = getattr(select, "pick", None)

    def __call__(
        self, logits: Tensor, positions: Tensor, sequences: abc.Sequence[Sequence], drafts: Drafts | None = None
    ) -> Tensor:
        assert drafts is None, "a function takes no drafts"
        return self.select(logits, positions)

    def kernel(self, sequences: abc.Sequence[Sequence]) -> SamplingKernel | None:
        return self._kernel


def sampling_of(sequence: Sequence) -> SamplingParams:
    assert sequence.sampling is not None, "a sequence without sampling parameters needs a FunctionSampler"
    return sequence.sampling


def positions_of(sequences: abc.Sequence[Sequence], device: torch.device) -> Tensor:
    """The positions of their next ids: int32 [B]."""
    return torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device=device)


def histories_of(sampler: Sampler, sequences: abc.Sequence[Sequence]) -> list[History] | None:
    """The histories of sequences; None if the sampler reads none."""
    return [sequence.read_history() for sequence in sequences] if sampler.needs_history else None


def constraints_of(sequences: abc.Sequence[Sequence]) -> list[ConstraintState | None] | None:
    """The constraints of sequences; None if there are none."""
    constraints = [sequence.constraint for sequence in sequences]
    return constraints if any(constraint is not None for constraint in constraints) else None


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
            logits, ids = self.processed(items, needs, sampler)
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

    def processed(
        self, items: abc.Sequence[ScheduledSequence], needs: LogitsNeeded, sampler: SamplingKernel | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """`onward.decoding.batch.processed` for these items."""
        return processed(self.run, self.slots, items, needs, self.device, sampler)

    def choose(self, logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
        """The next ids [B] of sequences, from logits [B, V]."""
        return self.chooser(logits, positions_of(sequences, self.device), sequences)

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
            with torch.no_grad():
                ids = self.choose(last, sequences)
        tokens = tokens_of(checked_ids(ids, last), last, [sequence.top_logprobs for sequence in sequences])
        if isinstance(self.chooser, SamplerCache):
            tokens = self.chooser.drawn(tokens, last, sequences)
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
    of_output = _scored(sequence, output_at, last, after[output_at - first :], sequence.top_logprobs)
    if of_output and sequence.sampling_logprobs:
        ids, rows = sequence.ids(output_at, last), after[output_at - first : last - first]
        of_output = with_drawn(of_output, sequence, output_at - sequence.output_at, ids, rows)
    return of_prompt, of_output


def _scored(sequence: Sequence, first: int, last: int, logits: Tensor, top: int | None) -> list[TokenLogprobs]:
    """The logprobs of the ids at the positions first … last - 1, each under its row of the logits."""
    if top is None:
        return []
    ids = sequence.ids(first, last)
    logprobs = token_logprobs(ids, logits[: len(ids)], top)
    if any(math.isnan(token.chosen) for token in logprobs):
        raise not_finite()
    return logprobs


def next_tokens(sequence: Sequence, ids: abc.Sequence[int], logits: Tensor) -> list[Token]:
    """The next tokens of a sequence, from logits [K, V]."""
    tokens = tokens_of(ids, logits, [sequence.top_logprobs] * len(ids))
    entries = [token.logprobs for token in tokens if token.logprobs is not None]
    if sequence.sampling_logprobs and entries:
        tokens = list(map(Token, ids, with_drawn(entries, sequence, len(sequence.token_ids), ids, logits)))
    return tokens


def output_scores(sequence: Sequence, sampler: Sampler, at: int, ids: abc.Sequence[int], logits: Tensor) -> Tensor:
    """`Sampler.scores` [K, V] of the output ids [K] from index `at` on, from their logits [K, V]. `token_ids` has those
    before."""
    return sampler.scores(logits.unsqueeze(0), *_state(sequence, sampler, at, ids, logits.device)).squeeze(0)


def with_drawn(
    entries: abc.Sequence[TokenLogprobs], sequence: Sequence, at: int, ids: abc.Sequence[int], logits: Tensor
) -> list[TokenLogprobs]:
    """The logprobs of the output ids [K] from index `at` on, with those of the distributions that they were drawn from.
    Where the options ban all ids, the logprob is -inf and the support 0."""
    if not len(ids):
        return []
    sampler = Sampler([sampling_of(sequence)], logits.device)
    state = _state(sequence, sampler, at, ids, logits.device)
    try:
        drawn = sampler.drawn(torch.tensor([ids], device=logits.device), logits.unsqueeze(0), *state)
    except NothingToDrawError:
        half = len(ids) // 2
        if not half:
            return [entries[0]._replace(sampling=-math.inf, support=0)]
        first = with_drawn(entries[:half], sequence, at, ids[:half], logits[:half])
        return first + with_drawn(entries[half:], sequence, at + half, ids[half:], logits[half:])
    pairs = zip(entries, drawn.logprobs[0].tolist(), drawn.support[0].tolist(), strict=True)
    return [entry._replace(sampling=logprob, support=support) for entry, logprob, support in pairs]


_State = tuple[
    Tensor, list[History] | None, list[abc.Sequence[int]], list[ConstraintState | None] | None
]  # the arguments of `Sampler.scores` after the logits


def _state(sequence: Sequence, sampler: Sampler, at: int, ids: abc.Sequence[int], device: torch.device) -> _State:
    output, constraint = sequence.token_ids, sequence.constraint
    history = None
    if sampler.needs_history:
        is_next = sequence.history is not None and at == len(output)
        history = sequence.read_history() if is_next else History(sequence.prompt, output[:at])
    if constraint is not None and len(constraint) != at:
        constraint = constraint.fork()
        constraint.truncate(min(at, len(constraint)))
        for token in output[len(constraint) : at]:
            constraint.append(token)
    first = sequence.output_at + at
    positions = torch.arange(first, first + len(ids), dtype=torch.int32, device=device).unsqueeze(0)
    constraints: list[ConstraintState | None] | None = None if constraint is None else [constraint]
    return positions, None if history is None else [history], [ids[:-1]], constraints
