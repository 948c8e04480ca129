"""Beam search: a `Step` that keeps the most likely continuations of each prompt.

A beam is a fork of the request's sequence, so a `Sequence` decides where each beam ends, as in every other step. At the
end of a search, the request's sequence takes over the best beam.

Beams fork, finish and stop as in transformers (`GenerationMixin._beam_search`, 5.x), so ids and scores are the same.
The length penalty is that of Wu et al. (arXiv 1609.08144) in transformers' form: without its constant.
"""

import math
from collections import abc
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onward.decoding.batch import ScheduledSequence, batches
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import FinishReason, Sequence
from onward.decoding.step import DecodeStep, Emitted
from onward.errors import RequestError
from onward.sampling.constraint import mask_logits, nothing_left
from onward.sampling.logprobs import TokenLogprobs, log_softmax, not_finite, token_logprobs
from onward.sampling.sampler import AdjustmentPass

# How many of the most likely continuations may all end a sequence that has a constraint.
_MAX_ENDED = 15


@dataclass(frozen=True)
class BeamOptions:
    """width: beams per prompt. length_penalty, early_stopping: see `onward.language_model.GenerateOptions`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def score(self, total: float, length: int) -> float:
        """The score of `length` tokens whose logprobs add up to `total`."""
        return float(total / length**self.length_penalty)


class BeamCandidate(NamedTuple):
    """A running beam, by index, and a token that may follow it; `total` is the sum of logprobs including that token."""

    beam: int
    token: int
    total: float
    logprobs: TokenLogprobs | None = None


class Beam(NamedTuple):
    """A running beam. `total` is the sum of its logprobs."""

    sequence: Sequence
    total: float


class BeamSearch(Sequence):
    """The beam search of one prompt, which is processed like that of any sequence.

    Its own last id stays pending, since tokens go to the beams. At its end, the search takes over the best beam. A
    `BeamStep` emits candidates for it.

    sampling: only the adjustments (penalties, bias, bans) apply; they act on logprobs, as in transformers.
    ended: scores and sequences of the beams that have ended, best first.
    tokens: the number of tokens decoded so far.
    """

    streams = False

    def __init__(
        self, beams: BeamOptions, prompt: abc.Sequence[int], max_new_tokens: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(prompt, max_new_tokens, *args, **options)
        self.beams = beams
        self._first = Sequence(prompt, max_new_tokens, *args, **options)
        if self.capture is not None:
            self._first.capture = self.capture.after_prompt(self.start)
        self.running = [Beam(self._first.fork(), 0.0)]
        self.ended: list[tuple[float, Sequence]] = []
        self.tokens = 0

    @property
    def has_begun(self) -> bool:
        return self.tokens > 0

    @property
    def decoded(self) -> int:
        return self.tokens

    @property
    def capturing_from(self) -> int | None:
        return None if self.tokens else super().capturing_from  # the beams have the values after the prompt

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def holders(self) -> list[Sequence]:
        """This search while its prompt is processed, then the running beams."""
        return super().holders() or [holder for beam in self.running for holder in beam.sequence.holders()]

    def results(self, count: int) -> list[tuple[float | None, Sequence]]:
        return [*self.ended[:count]] or super().results(count)  # none has ended if no tokens were asked for

    def restart(self) -> None:
        super().restart()
        self.running, self.ended, self.tokens = [Beam(self._first.fork(), 0.0)], [], 0

    def take_step(self, processed: int, tokens: abc.Sequence[Any], slots: CacheManager) -> None:
        """tokens: candidates, best first; none while the prompt is processed. The first child of a beam takes its slot,
        the others get copies of it."""
        if not tokens:
            super().take_step(processed, (), slots)
            return
        super().take_step(processed - 1, (), slots)
        self.slot = None
        before = [beam.sequence for beam in self.running]
        for sequence in before:
            if sequence.capture is not None:
                sequence.capture.commit(before[0].computed + 1)
        parents = self.advance(tokens)
        if self.is_over:
            self.running = []
        children = list(zip(parents, (beam.sequence for beam in self.running), strict=False))
        computed = before[0].computed + 1
        first_children = dict(reversed(children))
        for index, sequence in enumerate(before):
            if index not in first_children:
                slots.release(sequence.slot)
        for parent, sequence in children:
            sequence.computed = computed
            if first_children[parent] is sequence:
                sequence.slot = before[parent].slot
        for parent, sequence in children:
            if first_children[parent] is not sequence:
                sequence.slot = slots.fork(before[parent].slot, computed, sequence.longest)
                if sequence.slot is None:
                    raise RequestError(
                        "beams need a cache whose rows can be copied, a pytree of tensors that each have a dimension "
                        "for the batch, and a row for each beam"
                    )

    def advance(self, candidates: abc.Sequence[BeamCandidate]) -> list[int]:
        """Continue with the best of the candidates, which are sorted best first.

        Returns:
            For each running beam, the index of the beam it continues.
        """
        width = self.beams.width
        self.tokens += 1
        children: list[tuple[int, Beam]] = []
        ended = list(self.ended)
        for rank, candidate in enumerate(candidates):
            # Only the `width` best candidates may end a beam. The others only fill up the running beams.
            if (rank >= width and len(children) == width) or candidate.total == -math.inf:
                break
            sequence = self.running[candidate.beam].sequence.fork()
            sequence.accept(candidate.token, candidate.logprobs)
            if sequence.finish_reason is None:
                if len(children) < width:
                    children.append((candidate.beam, Beam(sequence, candidate.total)))
            elif rank < width:
                ended.append(self._scored(sequence, candidate.total))
        self._keep_best(ended)
        self.running = [beam for _, beam in children]
        if self._cannot_improve():
            self.take_over(self.ended[0][1])
        return [parent for parent, _ in children]

    def end(self, reason: FinishReason) -> None:
        """End the search with its best beam; running beams end for this reason."""
        for beam in self.running:
            if beam.sequence.token_ids:
                sequence = beam.sequence.fork()
                sequence.end(reason)
                self.ended.append(self._scored(sequence, beam.total))
        self._keep_best(self.ended)
        if self.ended:
            self.take_over(self.ended[0][1])
        else:
            super().end(reason)

    def _scored(self, sequence: Sequence, total: float) -> tuple[float, Sequence]:
        return self.beams.score(total, len(sequence.token_ids)), sequence

    def _keep_best(self, ended: list[tuple[float, Sequence]]) -> None:
        self.ended = sorted(ended, key=lambda scored: -scored[0])[: self.beams.width]

    def _cannot_improve(self) -> bool:
        if not self.running:
            return True
        if len(self.ended) < self.beams.width:
            return False
        if self.beams.early_stopping is True:
            return True
        best = self.running[0]
        length = len(best.sequence.token_ids)
        if self.beams.early_stopping == "never" and self.beams.length_penalty > 0:
            length += best.sequence.room  # the length with the highest score
        return self.beams.score(best.total, length) <= self.ended[-1][0]


class BeamStep:
    """Emits the candidates for the next token of every search, best first.

    plain: processes the prompts, and the last ids of beams.
    """

    def __init__(self, plain: DecodeStep) -> None:
        self._plain = plain

    @torch.no_grad()
    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        prompts = []
        deciding: dict[int, BeamSearch] = {}
        for index, (search, count) in enumerate(work):
            assert isinstance(search, BeamSearch), "a beam step advances searches"
            if count == search.pending and not search.is_over:
                deciding[index] = search
                count -= 1
            if count:
                prompts.append(ScheduledSequence(search, count))
        before = [len(search.prompt_logprobs) for search, _ in prompts]
        emitted: Emitted = [[] for _ in work]
        try:
            if prompts:
                self._plain(prompts)
            items = [ScheduledSequence(sequence, 1) for search in deciding.values() for sequence in _last_ids(search)]
            counts = [len(search.running) for search in deciding.values()]
            logits = torch.split(self._logits(items), counts) if items else ()
            for (index, search), own in zip(deciding.items(), logits, strict=True):
                emitted[index] = _best_candidates(search, own)
        except BaseException:
            for (search, _), logprobs in zip(prompts, before, strict=True):
                del search.prompt_logprobs[logprobs:]
            raise
        return emitted

    def _logits(self, items: abc.Sequence[ScheduledSequence]) -> Tensor:
        rows: list[Tensor | None] = [None] * len(items)
        for indices, needs in batches(items, self._plain.slots):
            logits, _ = self._plain.processed([items[index] for index in indices], needs)
            assert logits is not None, "a running beam needs the logits after its last id"
            if indices == list(range(len(items))):
                return logits[:, 0]
            for place, index in enumerate(indices):
                rows[index] = logits[place, 0]
        return torch.stack([row for row in rows if row is not None])


def _last_ids(search: BeamSearch) -> list[Sequence]:
    """The beams whose last ids are processed next. The first one of a search takes the prompt's slot."""
    sequences = [beam.sequence for beam in search.running]
    if search.slot is not None:
        sequences[0].slot, sequences[0].computed = search.slot, search.length - 1
    return sequences


def _best_candidates(search: BeamSearch, logits: Tensor) -> list[BeamCandidate]:
    assert search.sampling is not None
    running = search.running
    logprobs = log_softmax(logits)
    adjust = AdjustmentPass([search.sampling] * len(running), logits.device)
    if adjust.any:
        histories = [beam.sequence.read_history() for beam in running] if adjust.needs_history else None
        logprobs = adjust(logprobs.unsqueeze(1), histories, None).squeeze(1)
    if search.constraint is not None:
        masked, left = mask_logits(logprobs.unsqueeze(1), [beam.sequence.constraint for beam in running])
        if not bool(left.any()):
            raise nothing_left()
        logprobs = masked.squeeze(1)
    totals = torch.tensor([beam.total for beam in running], device=logits.device)
    flat = (logprobs + totals.unsqueeze(1)).flatten()
    # Enough candidates for `width` running beams, whichever candidates end theirs. A constraint may end any.
    ending = max(1, len(search.sampling.eos or ()), 0 if search.constraint is None else _MAX_ENDED)
    best = flat.topk(min(search.beams.width * (1 + ending), flat.numel()))
    best_totals = best.values.tolist()
    if not math.isfinite(best_totals[0]):
        raise not_finite()
    choices = [divmod(index, logits.shape[-1]) for index in best.indices.tolist()]  # (beam, token)
    reports: list[TokenLogprobs | None] = [None] * len(choices)
    if search.top_logprobs is not None:
        rows = logits[[beam for beam, _ in choices]]
        reports = list(token_logprobs([token for _, token in choices], rows, search.top_logprobs))
    return [
        BeamCandidate(beam, token, total, report)
        for (beam, token), total, report in zip(choices, best_totals, reports, strict=True)
    ]
