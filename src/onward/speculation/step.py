"""The speculative step: a drafter guesses tokens, and one pass of the model verifies them.

A round processes a sequence's pending id and its draft at once, T = 1 + K tokens. A verifier says how many ids of the
draft are right. The next pending id is the one that the target chose itself. The keys and values of ids that were not
accepted are then past what is computed, where nothing is read.
"""

import operator
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.decoding import Chooser, Sequence, Slots, Step, Work
from onward.decoding.forward import Run, forward, inputs
from onward.decoding.step import Emitted
from onward.decoding.token import not_finite, tokens_of
from onward.errors import DraftError, one_line
from onward.speculation.counts import Speculation
from onward.speculation.drafter import Draft, Drafter, Drafting, DraftRequest, DraftRow
from onward.speculation.pace import Acceptance, Pace, RowPace
from onward.speculation.verify import Verifier


class DraftedTogether:
    """Sequences that a drafter drafts for together, as it was told when it started.

    drafting: the drafter at work; None before it is asked first.
    """

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self.drafting: Drafting | None = None

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[Draft | abc.Sequence[int]]:
        name = type(self.drafter).__name__
        try:
            if self.drafting is None:
                self.drafting = self.drafter.start(self.request)
            proposed = list(self.drafting.propose(rows))
        except Exception as error:
            raise DraftError(f"the drafter {name} failed ({type(error).__name__}: {one_line(error)})") from error
        if len(proposed) != len(rows):
            raise DraftError(f"the drafter {name} was asked for {len(rows)} drafts and returned {len(proposed)}")
        return proposed


@dataclass
class DraftedText:
    """What drafting knows of one sequence, its `drafting`.

    group, owner: who drafts for it, and its index there. acceptance: how likely its next drafted id is accepted.
    length: how many ids its output has if it takes all of the last round.
    """

    group: DraftedTogether
    owner: int
    acceptance: Acceptance
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    length: int = 0

    def counts(self, sequence: Sequence) -> Speculation:
        """The counts without the ids of the last round that the sequence did not take."""
        not_taken = max(0, self.length - len(sequence.token_ids))
        return Speculation(self.drafted, max(0, self.accepted - not_taken), self.rounds)


def drafted_text(sequence: Sequence) -> DraftedText:
    text = sequence.drafting
    assert isinstance(text, DraftedText), "a sequence joins a speculator before it is drafted for"
    return text


def speculation_of(sequence: Sequence) -> Speculation | None:
    """What drafting brought this sequence so far; None where nothing is drafted for it."""
    return drafted_text(sequence).counts(sequence) if sequence.drafting is not None else None


class SpeculativeStep:
    """A `Step` that emits 1 to K+1 tokens for a sequence.

    Prompts, and steps without a draft, are processed by a plain step.

    plain: that step. run, slots, chooser, device: as in `DecodeStep`. verifier: judges drafts.
    longest: the most ids of a draft. pace: chooses how many ids to draft; None always drafts `longest`.
    acceptance: the acceptance of texts so far.
    """

    def __init__(
        self,
        plain: Step,
        run: Run,
        slots: Slots,
        chooser: Chooser,
        device: torch.device,
        *,
        verifier: Verifier,
        longest: int,
        pace: Pace | None = None,
        acceptance: Acceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plain, self._run, self._slots, self._chooser, self._device = plain, run, slots, chooser, device
        self._verifier = verifier
        self._longest = longest
        self._pace = pace
        self._clock = clock if pace is not None else _no_clock
        self._overall = Acceptance() if acceptance is None else acceptance
        self._shape_counts: Counter[tuple[int, int]] = Counter()  # steps by (sequences, longest draft)

    def __call__(self, work: abc.Sequence[Work]) -> Emitted:
        prompts = [index for index, item in enumerate(work) if item.sequence.pending > 1]
        began, pace = self._clock(), self._pace
        if prompts or (pace is not None and pace.rest):
            # Sequences that decode beside a prompt wait for it anyway, so they are not drafted for.
            emitted = self._plain(work)
            if pace is not None:
                pace.note_time(self._clock() - began)
            return emitted
        sequences = [sequence for sequence, _ in work]
        counts = self._draft_lengths(sequences)
        drafts: list[Draft] = []
        drafting = 0.0
        if any(counts):
            drafts = self._drafts(sequences, counts)
            drafting = self._clock() - began
        else:
            # The time of choosing no draft is not booked as a loss. It could be more than a plain step earns, and then
            # a new drafter, which has earned nothing yet, would never be asked.
            began = self._clock()
        longest = max((len(draft.ids) for draft in drafts), default=0)
        emitted = self._round(work, drafts, longest) if longest else self._plain(work)
        if self._pace is not None:
            self._note(len(work), emitted, longest, self._clock() - began, drafting)
        return emitted

    def _note(self, rows: int, emitted: Emitted, longest: int, seconds: float, drafting: float) -> None:
        assert self._pace is not None
        shape = (rows, longest)
        self._shape_counts[shape] += 1
        # Programs are made for new shapes: by a plain step for one model, by a round for two.
        if longest:
            self._pace.note_round(rows, longest, sum(map(len, emitted)), seconds, new=self._shape_counts[shape] <= 2)
        else:
            self._pace.note_plain(rows, seconds, drafting=drafting, new=self._shape_counts[shape] == 1)

    # ── how much to draft ─────────────────────────────────────────────────────────────────────────────────

    def _draft_lengths(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """How many ids to draft for each sequence.

        A round adds an id of the target's own. So a draft is at least one id shorter than what the text may still take,
        and than the room in the cache.
        """
        most = [sequence.room - 1 for sequence in sequences]
        # All are padded to the longest draft, so the fullest row of the cache limits it.
        computed = [sequence.computed for sequence in sequences]
        room = self._slots.room([sequence.slot for sequence in sequences], computed)
        if room is None:
            room = min(drafted_text(each).group.request.max_len for each in sequences) - max(computed)
        longest = min(self._longest, room - 1, max(most))
        if longest < 1:
            return [0] * len(most)
        if self._pace is not None:
            paces = [
                RowPace(drafted_text(sequence).acceptance.rate, of_row)
                for sequence, of_row in zip(sequences, most, strict=True)
            ]
            longest = self._pace.choose(paces, longest)
        return [min(of_row, longest) for of_row in most]

    # ── the draft ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _drafts(self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int]) -> list[Draft]:
        """A draft of at most `counts` ids for each sequence; the drafter is not asked where that is 0."""
        drafts = [Draft(()) for _ in counts]
        groups: dict[DraftedTogether, list[int]] = {}
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            if count:
                groups.setdefault(drafted_text(sequence).group, []).append(index)
        for group, indices in groups.items():
            rows = [_draft_row(sequences[index], counts[index]) for index in indices]
            for index, proposal in zip(indices, group.propose(rows), strict=True):
                drafts[index] = _checked(group, proposal, counts[index])
        return drafts

    # ── the round ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _round(self, work: abc.Sequence[Work], drafts: abc.Sequence[Draft], longest: int) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        rounds: list[tuple[Sequence, Draft, list[int]]] = []
        for group in self._slots.groups([sequence.slot for sequence, _ in work], 1 + longest):
            items, group_drafts = [work[index] for index in group], [drafts[index] for index in group]
            sequences = [sequence for sequence, _ in items]
            # Any valid id will do as padding, for nothing past a sequence's own draft is read.
            ids = []
            for sequence, draft in zip(sequences, group_drafts, strict=True):
                pending = sequence.ids(sequence.computed, sequence.length)
                ids.append([*pending, *draft.ids, *pending * (longest - len(draft.ids))])
            with self._slots.lock:
                given = inputs(items, self._slots, self._device, ids)
                logits = given.of_items(forward(self._run, self._slots, given, None))
            steps = torch.arange(1, longest + 2, dtype=torch.int32, device=self._device)
            positions = given.of_items(given.offsets).unsqueeze(1) + steps
            new_ids = self._verifier(self._chooser, sequences, logits, positions, group_drafts)
            new_ids = _with_finite_logits(logits, new_ids)
            for place, (index, sequence, draft, new) in enumerate(
                zip(group, sequences, group_drafts, new_ids, strict=True)
            ):
                emitted[index] = tokens_of(new, logits[place, : len(new)], [sequence.top_logprobs] * len(new))
                rounds.append((sequence, draft, new))
        for sequence, draft, new in rounds:
            if draft.ids:
                self._count(sequence, draft.ids, new)
            sequence.computed += len(new)
        return emitted

    def _count(self, sequence: Sequence, draft: abc.Sequence[int], new: abc.Sequence[int]) -> None:
        # `new` ends with the first id that differs from the draft, so all equal pairs are accepted ids.
        drafted, accepted = len(draft), sum(map(operator.eq, draft, new))
        text = drafted_text(sequence)
        text.drafted += drafted
        text.accepted += accepted
        text.rounds += 1
        text.length = len(sequence.token_ids) + len(new)
        text.acceptance.note(drafted, accepted)
        self._overall.note(drafted, accepted)


def _draft_row(sequence: Sequence, count: int) -> DraftRow:
    return DraftRow(drafted_text(sequence).owner, sequence.prompt, sequence.token_ids, count)


def _checked(group: DraftedTogether, proposal: Draft | abc.Sequence[int], count: int) -> Draft:
    """The first `count` ids of a proposal as a draft. Raises `DraftError` for what no draft can be."""
    name, vocab = type(group.drafter).__name__, group.request.vocab_size
    draft = proposal if isinstance(proposal, Draft) else Draft(proposal)
    try:
        ids = [operator.index(token) for token in draft.ids[:count]]
    except TypeError as error:
        raise DraftError(f"the drafter {name} must propose ids, whole numbers; got {proposal!r}") from error
    if out := [token for token in ids if not 0 <= token < vocab]:
        raise DraftError(f"the drafter {name} proposed id {out[0]}, but the model's ids are from 0 to {vocab - 1}")
    probabilities = draft.probabilities
    if probabilities is not None and (probabilities.dim() != 2 or probabilities.shape[1] != vocab):
        raise DraftError(f"the drafter {name} must give probabilities [N, {vocab}]; got {list(probabilities.shape)}")
    if probabilities is not None and len(probabilities) < len(ids):
        raise DraftError(f"the drafter {name} gave probabilities for {len(probabilities)} of {len(ids)} ids")
    return Draft(ids, probabilities)


def _no_clock() -> float:
    """The clock for drafts of a fixed length, which need no times."""
    return 0.0


def _with_finite_logits(logits: torch.Tensor, ids: list[list[int]]) -> list[list[int]]:
    """The ids of each row before the first one whose logit in [B, K+1, V] is not finite.

    It is an error only for a row's first id: a later one may be past the end of the text. It is enough to check the
    logits of picked ids, for NaN wins every argmax.
    """
    longest = max(map(len, ids))
    padded = [[*new, *[0] * (longest - len(new))] for new in ids]
    picked = torch.tensor(padded, device=logits.device).unsqueeze(2)
    finite = logits[:, :longest].gather(2, picked).squeeze(2).isfinite().tolist()
    finite_counts = [
        next((k for k, ok in enumerate(row[: len(new)]) if not ok), len(new))
        for row, new in zip(finite, ids, strict=True)
    ]
    if any(new and not count for count, new in zip(finite_counts, ids, strict=True)):
        raise not_finite()
    return [new[:count] for count, new in zip(finite_counts, ids, strict=True)]
