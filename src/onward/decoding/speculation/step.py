"""The speculative step: a drafter or a constraint guesses tokens, and one forward verifies them.

A round processes a sequence's pending id and its draft at once, T = 1 + K tokens. The target chooses every id as it
would without a draft, and equal drafted ids are accepted. So the ids are those of plain decoding, whatever the draft. A
drafter that draws with the same noise agrees nearly as often as the two distributions overlap. (Daliri et al.,
"Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978)

The keys and values of rejected ids are then past the computed positions, where nothing is read.
"""

import itertools
import operator
import weakref
from collections import Counter, abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from onward.decoding.batch import ScheduledSequence, forward, inputs
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import (
    Drafter,
    Drafting,
    DraftRow,
    DraftState,
    DraftTarget,
    Speculation,
    cached_features,
)
from onward.decoding.speculation.pace import (
    LENGTHS,
    AcceptanceRate,
    DraftLengthController,
    RowAcceptance,
    paying_length,
)
from onward.decoding.step import DecodeStep, Drafts, Emitted, TokenSampler, next_tokens
from onward.errors import DraftError, NothingToDrawError, OnwardError, one_line, warn_once
from onward.sampling.logprobs import checked_ids, not_finite


def draft_state(sequence: Sequence) -> DraftState:
    state = sequence.drafting
    assert isinstance(state, DraftState), "a sequence joins a speculative step before it is drafted for"
    return state


def speculation_of(sequence: Sequence) -> Speculation | None:
    """The drafting counts of this sequence so far; None without drafting."""
    return None if sequence.drafting is None else draft_state(sequence).counts(sequence.token_ids)


def _row(sequence: Sequence) -> DraftRow | None:
    return None if sequence.drafting is None else draft_state(sequence).row


def _rows(sequences: abc.Iterable[Sequence]) -> list[DraftRow]:
    return [row for sequence in sequences if (row := _row(sequence)) is not None]


class SpeculativeStep:
    """A `Step` that emits 1 to K+1 tokens per sequence.

    Ids that a sequence's constraint forces are drafted as they are; otherwise its drafter is asked, if it has joined.
    Prompts, and steps without a draft, are processed by a plain step.

    plain: that step, whose run and slots verify drafts. chooser: as in `DecodeStep`.
    target: the model and its limits. drafter: None drafts only forced ids.
    pace: chooses draft lengths; without it, every draft has `target.longest` ids.
    acceptance: the overall acceptance rate so far.
    """

    def __init__(
        self,
        plain: DecodeStep,
        chooser: TokenSampler,
        target: DraftTarget,
        drafter: Drafter | None = None,
        pace: DraftLengthController | None = None,
        acceptance: AcceptanceRate | None = None,
    ) -> None:
        self._plain, self._run, self._slots, self._chooser = plain, plain.run, plain.slots, chooser
        self._target, self._drafter, self._pace = target, drafter, pace
        self._clock: Callable[[], float] = (lambda: 0.0) if pace is None else pace.clock
        self._overall = AcceptanceRate() if acceptance is None else acceptance
        self._drafting: Drafting | None = None  # before the first draft
        self._starts = 0  # the number of draftings so far
        self._shape_counts: Counter[tuple[int, int]] = Counter()  # steps by (sequences, longest draft)

    def join(self, sequences: abc.Iterable[Sequence]) -> None:
        """Be the step of these sequences, and draft for them from now on. One that joins again keeps its counts."""
        for sequence in sequences:
            sequence.step = self
            if sequence.drafting is None:
                row = None
                if self._drafter is not None:
                    row = DraftRow(sequence.prompt, sequence.token_ids, constraint=sequence.constraint)
                    row.salt = sequence.salt
                    row.sampling = sequence.sampling if self._target.select is None else None
                    row.features = partial(cached_features, self._target.model, self._slots, weakref.ref(sequence))
                sequence.drafting = DraftState(row, self.leave, AcceptanceRate(self._overall.rate))

    def leave(self, sequence: Sequence) -> None:
        """Free what the drafter has for a sequence that has ended or is preempted. A drafting that fails here is
        replaced by a new one, with a warning."""
        state = draft_state(sequence)
        if self._drafting is None or state.joined != self._starts:
            return
        try:
            self._call("leave", _rows([sequence]))
        except DraftError as error:
            warn_once(f"{error}; it drafts for the other requests from the start")
            self._drafting = None
        else:
            state.joined = 0

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        began, pace = self._clock(), self._pace
        sequences = [sequence for sequence, _ in work]
        # An ended sequence only has pending prompt ids.
        prompts = any(sequence.pending > 1 or sequence.finish_reason is not None for sequence in sequences)
        forced = None if prompts else self._forced(sequences)
        if prompts or (pace is not None and pace.rest and forced is None):
            # Sequences that decode beside a prompt wait for it anyway, so they are not drafted for.
            emitted = self._plain(work)
            if pace is not None:
                pace.note_time(self._clock() - began)
            return emitted
        counts = [0] * len(work) if pace is not None and pace.rest else self._draft_lengths(sequences)
        drafts: list[abc.Sequence[int]] = []
        drafting = 0.0
        if forced is not None or any(counts):
            known = [()] * len(work) if forced is None else forced
            to_draft = [index for index, count in enumerate(counts) if count and not known[index]]
            began += self._enter([sequences[index] for index in to_draft])
            drafts = self._drafts(sequences, counts, known, to_draft)
            drafting = self._clock() - began
        else:
            # The time of choosing no draft is not booked as a loss. It could exceed what a plain step earns, and then a
            # new drafter, which has earned nothing yet, would never be asked.
            began = self._clock()
        longest = max(map(len, drafts), default=0)
        if longest:
            emitted = self._round(work, drafts, longest)
            self._count(sequences, drafts, forced, emitted)
        else:
            emitted = self._plain(work)
        if pace is not None and forced is not None:
            pace.note_time(self._clock() - began)  # forced ids say nothing about the drafter
        elif pace is not None:
            seconds, rows, shape = self._clock() - began, len(work), (len(work), longest)
            self._shape_counts[shape] += 1
            # Programs are compiled for new shapes: by a plain step for one model, by a round for two.
            if longest:
                pace.note_round(rows, longest, sum(map(len, emitted)), seconds, new=self._shape_counts[shape] <= 2)
            else:
                pace.note_plain(rows, seconds, drafting=drafting, new=self._shape_counts[shape] == 1)
        return emitted

    def _draft_lengths(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """The number of ids to draft for each sequence; 0 without a drafter."""
        if self._drafter is None:
            return [0] * len(sequences)
        limits = self._limits(sequences, self._target.longest)
        limits = [0 if _row(each) is None else limit for each, limit in zip(sequences, limits, strict=True)]
        longest = max(limits)
        if longest and self._pace is not None:
            rows = [
                RowAcceptance(draft_state(sequence).acceptance.rate, limit)
                for sequence, limit in zip(sequences, limits, strict=True)
            ]
            longest = self._pace.choose(rows, longest)
        return [min(limit, longest) for limit in limits]

    def _limits(self, sequences: abc.Sequence[Sequence], longest: int) -> list[int]:
        """The longest draft for each sequence, at most `longest`.

        A round adds an id of the target's own, so a draft is at least one id shorter than the remaining room of the
        sequence and of the cache.
        """
        # All are padded to the longest draft, so the fullest row of the cache limits it.
        computed = [sequence.computed for sequence in sequences]
        room = self._slots.room([sequence.slot for sequence in sequences], computed)
        if room is None:
            room = self._target.max_len - max(computed)
        longest = max(0, min(longest, room - 1))
        return [max(0, min(sequence.room - 1, longest)) for sequence in sequences]

    def _forced(self, sequences: abc.Sequence[Sequence]) -> list[abc.Sequence[int]] | None:
        """The ids that constraints force, as many as pay; None if there are none in any sequence."""
        forced = [() if each.constraint is None else each.constraint.forced() for each in sequences]
        if not any(forced):
            return None
        limits = self._limits(sequences, LENGTHS[-1])
        forced = [ids[:limit] for ids, limit in zip(forced, limits, strict=True)]
        length = paying_length([len(ids) for ids in forced])
        # A user's constraint may force ids outside the vocabulary.
        return [list(itertools.takewhile(self._is_id, ids[:length])) for ids in forced] if length else None

    def _is_id(self, token: int) -> bool:
        return 0 <= token < self._target.vocab_size

    @torch.no_grad()
    def _enter(self, sequences: abc.Sequence[Sequence]) -> float:
        """Have the new ones of these sequences join the drafting. Returns the seconds that it took, which are no cost
        of a draft."""
        began = self._clock()
        if sequences and self._drafting is None:
            with self._blamed():
                assert self._drafter is not None
                self._drafting = self._drafter.start(self._target)
                self._starts += 1
        new = [sequence for sequence in sequences if draft_state(sequence).joined != self._starts]
        if not new:
            return 0.0
        for sequence in new:
            draft_state(sequence).join(self._starts)
        try:
            self._call("join", _rows(new))
        except DraftError:
            for sequence in new:
                self.leave(sequence)
            raise
        seconds = self._clock() - began
        if self._pace is not None:
            self._pace.note_time(seconds)
        return seconds

    @torch.no_grad()
    def _drafts(
        self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], forced: Drafts, to_draft: abc.Sequence[int]
    ) -> list[abc.Sequence[int]]:
        """The forced ids of each sequence; the drafter's ids, at most its count, of those that are asked for."""
        drafts = list(forced)
        if not to_draft:
            return drafts
        rows = _rows(sequences[index] for index in to_draft)
        for index, row in zip(to_draft, rows, strict=True):
            row.limit, row.history = counts[index], sequences[index].history
        proposals = self._call("propose", rows)
        name = type(self._drafter).__name__
        if len(proposals) != len(rows):
            raise DraftError(f"the drafter {name} returned {len(proposals)} drafts for {len(rows)} rows")
        for index, row, proposal in zip(to_draft, rows, proposals, strict=True):
            try:
                draft = [operator.index(token) for token in proposal[: row.limit]]
            except TypeError as error:
                raise DraftError(f"the drafter {name} must propose ids, whole numbers; got {proposal!r}") from error
            if out := [token for token in draft if not self._is_id(token)]:
                last = self._target.vocab_size - 1
                raise DraftError(f"the drafter {name} proposed id {out[0]}, but the model's ids are from 0 to {last}")
            drafts[index] = draft if row.constraint is None else draft[: row.constraint.admitted(draft)]
        return drafts

    def _call(self, method: str, rows: list[DraftRow]) -> list[abc.Sequence[int]]:
        """Call a method of the drafting, which may lack all but `propose`. Raises `DraftError` if it fails."""
        with self._blamed():
            assert self._drafting is not None, "sequences join before they are drafted for"
            if method == "propose":
                return list(self._drafting.propose(rows))
            getattr(self._drafting, method, lambda rows: None)(rows)
        return []

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = type(self._drafter).__name__
            raise DraftError(f"the drafter {name} failed ({type(error).__name__}: {one_line(error)})") from error

    @torch.no_grad()
    def _round(self, work: abc.Sequence[ScheduledSequence], drafts: Drafts, longest: int) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        for group in self._slots.groups([sequence.slot for sequence, _ in work], 1 + longest):
            group_drafts = [drafts[index] for index in group]
            sequences = [work[index].sequence for index in group]
            items = [ScheduledSequence(sequences[at], 1 + len(draft)) for at, draft in enumerate(group_drafts)]
            # Any valid id works as padding, because nothing past a sequence's own draft is read.
            ids = []
            for sequence, draft in zip(sequences, group_drafts, strict=True):
                pending = sequence.ids(sequence.computed, sequence.length)
                ids.append([*pending, *draft, *pending * (longest - len(draft))])
            with self._slots.lock:
                batch, view = inputs(items, self._slots, self._target.device, ids)
                logits = view.select(forward(self._run, self._slots, batch, view, items).logits)
            steps = torch.arange(1, longest + 2, dtype=torch.int32, device=self._target.device)
            positions = view.select(batch.offsets).unsqueeze(1) + steps
            new_ids = verify(self._chooser, sequences, logits, positions, group_drafts)
            for place, (index, sequence, new) in enumerate(zip(group, sequences, new_ids, strict=True)):
                emitted[index] = next_tokens(sequence, new, logits[place, : len(new)])
        return emitted

    def _count(
        self, sequences: abc.Sequence[Sequence], drafts: Drafts, forced: Drafts | None, emitted: Emitted
    ) -> None:
        """Count the accepted ids of a round. Forced ids say nothing about a drafter."""
        for index, (sequence, draft, new) in enumerate(zip(sequences, drafts, emitted, strict=True)):
            if not draft:
                continue
            # `new` ends with the first id that differs from the draft, so all equal pairs are accepted ids.
            drafted, accepted = len(draft), sum(map(operator.eq, draft, (token.id for token in new)))
            state = draft_state(sequence)
            state.drafted += drafted
            state.accepted += accepted
            state.rounds += 1
            state.length = len(sequence.token_ids) + len(new)
            if forced is None or not forced[index]:
                state.acceptance.note(drafted, accepted)
                self._overall.note(drafted, accepted)


def verify(
    chooser: TokenSampler, sequences: abc.Sequence[Sequence], logits: Tensor, positions: Tensor, drafts: Drafts
) -> list[list[int]]:
    """The ids that each of B sequences emits: the accepted ids of its draft, and one more. Histories and constraints
    stay as they are.

    Args:
        chooser: chooses the target's ids.
        logits: float [B, K+1, V]; logits[:, k] are those after the pending id and k drafted ids.
        positions: int [B, K+1], of the ids to choose from them.
        drafts: at most K ids for each sequence.

    Raises:
        OnwardError: the first id of a sequence cannot be chosen. If a later one cannot, its draft ends there.
    """
    if chooser.select is None:
        try:
            chosen = chooser(logits, positions, sequences, drafts).tolist()
        except NothingToDrawError:
            # Bans may leave nothing to draw after an id that is not accepted. Plain decoding never reaches that
            # position, so the ids are chosen position by position below.
            pass
        else:
            accepted = [
                ids[: 1 + next((k for k, token in enumerate(draft) if ids[k] != token), len(draft))]
                for ids, draft in zip(chosen, drafts, strict=True)
            ]
            return _with_finite_logits(logits, accepted)
    return _one_by_one(chooser, sequences, logits, positions, drafts)


def _one_by_one(
    chooser: TokenSampler, sequences: abc.Sequence[Sequence], logits: Tensor, positions: Tensor, drafts: Drafts
) -> list[list[int]]:
    """Choose position by position, only for drafts that agree so far."""

    def choose(k: int, places: abc.Sequence[int]) -> list[int]:
        if chooser.select is None:
            accepted = [drafts[place][:k] for place in places]
            agreeing = [sequences[place] for place in places]
            ids = chooser(logits[places, : k + 1], positions[places, : k + 1], agreeing, accepted)[:, k]
            return checked_ids(ids, logits[places, k])
        # A user's own function gets all rows, as in a plain step.
        ids = chooser(logits[:, k], positions[:, k], sequences)
        return checked_ids(ids[places] if len(ids) == len(logits) else ids, logits[places, k])

    emitted: list[list[int]] = [[] for _ in drafts]
    places = list(range(len(drafts)))
    for k in range(logits.shape[1]):
        try:
            chosen = choose(k, places)
        except OnwardError:
            # Bans that leave nothing to draw, or logits that are not finite, perhaps past the end of a sequence. If the
            # sequence continues there, the next round raises the error.
            if k == 0:
                raise
            break
        for place, token in zip(places, chosen, strict=True):
            emitted[place].append(token)
        places = [place for place in places if k < len(drafts[place]) and drafts[place][k] == emitted[place][k]]
        if not places:
            break
    return emitted


def _with_finite_logits(logits: Tensor, ids: list[list[int]]) -> list[list[int]]:
    """The ids of each row before the first one whose logit in [B, K+1, V] is not finite.

    It is an error only for a row's first id: a later one may be past the end of the sequence. Checking the logits of
    the picked ids is enough, because NaN wins every argmax.
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
