"""The speculative step: a drafter or a constraint guesses tokens, and one pass of the model verifies them.

A round processes a sequence's pending id and its draft at once, T = 1 + K tokens. Drafted ids that the target chooses
too are accepted. The next pending id is the one that the target chose itself. The keys and values of ids that were not
accepted are then past what is computed, where nothing is read.
"""

import operator
from collections import Counter, abc
from dataclasses import dataclass

import torch

from onward.decoding.batch import Run, ScheduledSequence, forward, inputs
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import Drafter, Drafting, DraftRequest, DraftRow, Speculation
from onward.decoding.speculation.pace import LENGTHS, AcceptanceRate, DraftLengthController, RowAcceptance
from onward.decoding.speculation.verify import verify
from onward.decoding.step import Emitted, Step, TokenSampler
from onward.errors import DraftError, one_line
from onward.sampling.logprobs import tokens_of


class DraftGroup:
    """Sequences that a drafter drafts for together, as it was told when it started.

    drafting: the drafter at work; None before it is asked first.
    """

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self.drafting: Drafting | None = None

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[abc.Sequence[int]]:
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
class DraftState:
    """What drafting knows of one sequence, its `drafting`.

    group, owner: who drafts for it, and its index there; None where only forced ids are drafted.
    acceptance: how likely its next drafted id is accepted.
    length: how many ids its output has if it takes all of the last round.
    """

    group: DraftGroup | None
    owner: int
    acceptance: AcceptanceRate
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    length: int = 0

    def counts(self, sequence: Sequence) -> Speculation:
        """The counts without the ids of the last round that the sequence did not take."""
        not_taken = max(0, self.length - len(sequence.token_ids))
        return Speculation(self.drafted, max(0, self.accepted - not_taken), self.rounds)


def draft_forced(sequences: abc.Iterable[Sequence]) -> None:
    """Let the ids that their constraints force be drafted for these sequences, and no others."""
    for sequence in sequences:
        sequence.drafting = DraftState(None, 0, AcceptanceRate())


def drafted_text(sequence: Sequence) -> DraftState:
    text = sequence.drafting
    assert isinstance(text, DraftState), "a sequence joins a speculator before it is drafted for"
    return text


def speculation_of(sequence: Sequence) -> Speculation | None:
    """What drafting brought this sequence so far; None where nothing is drafted for it."""
    return drafted_text(sequence).counts(sequence) if sequence.drafting is not None else None


class SpeculativeStep:
    """A `Step` that emits 1 to K+1 tokens for a sequence.

    Ids that a sequence's constraint forces are drafted as they are. Where none are forced its drafter is asked.
    Prompts, and steps without a draft, are processed by a plain step.

    plain: that step. run, slots, chooser, device: as in `DecodeStep`.
    longest: the most ids of a draft. pace: chooses how many ids to ask a drafter for; None always asks for `longest`.
    vocab_size: V of the logits; None does not check forced ids.
    acceptance: the acceptance of texts so far.
    """

    def __init__(
        self,
        plain: Step,
        run: Run,
        slots: CacheManager,
        chooser: TokenSampler,
        device: torch.device,
        *,
        longest: int,
        pace: DraftLengthController | None = None,
        acceptance: AcceptanceRate | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._plain, self._run, self._slots, self._chooser, self._device = plain, run, slots, chooser, device
        self._longest = longest
        self._pace = pace
        self._clock = _no_clock if pace is None else pace.clock
        self._vocab_size = vocab_size
        self._overall = AcceptanceRate() if acceptance is None else acceptance
        self._shape_counts: Counter[tuple[int, int]] = Counter()  # steps by (sequences, longest draft)

    def __call__(self, work: abc.Sequence[ScheduledSequence]) -> Emitted:
        began, pace = self._clock(), self._pace
        sequences = [sequence for sequence, _ in work]
        # What is pending is a prompt's in a text that has ended, too.
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
            drafts = self._drafts(sequences, counts, [()] * len(work) if forced is None else forced)
            drafting = self._clock() - began
        else:
            # The time of choosing no draft is not booked as a loss. It could be more than a plain step earns, and then
            # a new drafter, which has earned nothing yet, would never be asked.
            began = self._clock()
        longest = max(map(len, drafts), default=0)
        if longest:
            emitted = self._round(work, drafts, longest)
            self._count(sequences, drafts, forced, emitted)
        else:
            emitted = self._plain(work)
        if pace is not None and forced is not None:
            pace.note_time(self._clock() - began)  # what was forced says nothing of the drafter
        elif pace is not None:
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

        Only those that have a drafter are drafted for.
        """
        if all(_group(sequence) is None for sequence in sequences):
            return [0] * len(sequences)
        most = [0 if _group(each) is None else of_row for each, of_row in self._most(sequences, self._longest)]
        longest = max(most)
        if longest < 1:
            return [0] * len(most)
        if self._pace is not None:
            paces = [
                RowAcceptance(drafted_text(sequence).acceptance.rate, of_row)
                for sequence, of_row in zip(sequences, most, strict=True)
            ]
            longest = self._pace.choose(paces, longest)
        return [min(of_row, longest) for of_row in most]

    def _most(self, sequences: abc.Sequence[Sequence], longest: int) -> list[tuple[Sequence, int]]:
        """Each sequence with the most ids of a draft for it, `longest` at most.

        A round adds an id of the target's own. So a draft is at least one id shorter than what the text may still take,
        and than the room in the cache.
        """
        # All are padded to the longest draft, so the fullest row of the cache limits it.
        computed = [sequence.computed for sequence in sequences]
        room = self._slots.max_step_tokens([sequence.slot for sequence in sequences], computed)
        if room is None:
            room = min(map(_max_len, sequences)) - max(computed)
        longest = max(0, min(longest, room - 1))
        return [(sequence, max(0, min(sequence.room - 1, longest))) for sequence in sequences]

    def _forced(self, sequences: abc.Sequence[Sequence]) -> list[abc.Sequence[int]] | None:
        """The ids that constraints force, as many as pay; None where that is none in any sequence."""
        forced = [() if each.constraint is None else each.constraint.forced() for each in sequences]
        if not any(forced):
            return None
        forced = [ids[:most] for ids, (_, most) in zip(forced, self._most(sequences, LENGTHS[-1]), strict=True)]
        length = paying_length([len(ids) for ids in forced])
        return [self._known(ids[:length]) for ids in forced] if length else None

    def _known(self, ids: abc.Sequence[int]) -> abc.Sequence[int]:
        """The ids before the first that the model lacks: a constraint of the user's may name any."""
        out = (at for at, token in enumerate(ids) if not 0 <= token < (self._vocab_size or token + 1))
        return ids[: next(out, len(ids))]

    # ── the draft ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _drafts(
        self,
        sequences: abc.Sequence[Sequence],
        counts: abc.Sequence[int],
        forced: abc.Sequence[abc.Sequence[int]],
    ) -> list[abc.Sequence[int]]:
        """What is forced in each sequence; where nothing is, a draft of at most `counts` ids. The drafter is not asked
        where that is 0."""
        drafts = list(forced)
        groups: dict[DraftGroup, list[int]] = {}
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            group = _group(sequence)
            if count and not forced[index] and group is not None:
                groups.setdefault(group, []).append(index)
        for group, indices in groups.items():
            rows = [_draft_row(sequences[index], counts[index]) for index in indices]
            for index, proposal in zip(indices, group.propose(rows), strict=True):
                drafts[index] = _admitted(sequences[index], _checked(group, proposal, counts[index]))
        return drafts

    # ── the round ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _round(
        self, work: abc.Sequence[ScheduledSequence], drafts: abc.Sequence[abc.Sequence[int]], longest: int
    ) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        for group in self._slots.groups([sequence.slot for sequence, _ in work], 1 + longest):
            items, group_drafts = [work[index] for index in group], [drafts[index] for index in group]
            sequences = [sequence for sequence, _ in items]
            # Any valid id will do as padding, for nothing past a sequence's own draft is read.
            ids = []
            for sequence, draft in zip(sequences, group_drafts, strict=True):
                pending = sequence.ids(sequence.computed, sequence.length)
                ids.append([*pending, *draft, *pending * (longest - len(draft))])
            with self._slots.lock:
                given = inputs(items, self._slots, self._device, ids)
                logits = given.of_items(forward(self._run, self._slots, given, None))
            steps = torch.arange(1, longest + 2, dtype=torch.int32, device=self._device)
            positions = given.of_items(given.offsets).unsqueeze(1) + steps
            new_ids = verify(self._chooser, sequences, logits, positions, group_drafts)
            for place, (index, sequence, new) in enumerate(zip(group, sequences, new_ids, strict=True)):
                emitted[index] = tokens_of(new, logits[place, : len(new)], [sequence.top_logprobs] * len(new))
        for (sequence, _), tokens in zip(work, emitted, strict=True):
            sequence.computed += len(tokens)
        return emitted

    def _count(
        self,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]],
        forced: abc.Sequence[abc.Sequence[int]] | None,
        emitted: Emitted,
    ) -> None:
        """Note what a round brought each sequence with a draft. Ids that were forced say nothing of a drafter."""
        for index, (sequence, draft, new) in enumerate(zip(sequences, drafts, emitted, strict=True)):
            if not draft:
                continue
            # `new` ends with the first id that differs from the draft, so all equal pairs are accepted ids.
            drafted, accepted = len(draft), sum(map(operator.eq, draft, (token.id for token in new)))
            text = drafted_text(sequence)
            text.drafted += drafted
            text.accepted += accepted
            text.rounds += 1
            text.length = len(sequence.token_ids) + len(new)
            if forced is None or not forced[index]:
                text.acceptance.note(drafted, accepted)
                self._overall.note(drafted, accepted)


def _group(sequence: Sequence) -> DraftGroup | None:
    """Who drafts for it."""
    return None if sequence.drafting is None else drafted_text(sequence).group


def _max_len(sequence: Sequence) -> int:
    """The most positions that its cache was made for, as far as is known."""
    group = _group(sequence)
    return sequence.longest if group is None else group.request.max_len


def _draft_row(sequence: Sequence, count: int) -> DraftRow:
    return DraftRow(drafted_text(sequence).owner, sequence.prompt, sequence.token_ids, count)


def _checked(group: DraftGroup, proposal: abc.Sequence[int], count: int) -> list[int]:
    """The first `count` ids of a proposal. Raises `DraftError` for what no draft can be."""
    name, vocab = type(group.drafter).__name__, group.request.vocab_size
    try:
        ids = [operator.index(token) for token in proposal[:count]]
    except TypeError as error:
        raise DraftError(f"the drafter {name} must propose ids, whole numbers; got {proposal!r}") from error
    if out := [token for token in ids if not 0 <= token < vocab]:
        raise DraftError(f"the drafter {name} proposed id {out[0]}, but the model's ids are from 0 to {vocab - 1}")
    return ids


def _admitted(sequence: Sequence, draft: list[int]) -> list[int]:
    """A draft before the first id that the sequence's constraint refuses: it would not be accepted."""
    return draft if sequence.constraint is None else draft[: sequence.constraint.admitted(draft)]


def _no_clock() -> float:
    """The clock for drafts of a fixed length, which need no times."""
    return 0.0


# A pass over so many ids takes about twice as long as one over a single id: on CPUs between 7 and 22.
_DOUBLES = 16


def paying_length(forced: abc.Sequence[int]) -> int:
    """How many of its forced ids each row drafts at most, from how many each row has; 0 for none.

    Every row is padded to the longest draft, so ids that are forced in one row cost time in all. The length is the one
    that emits the most ids for the time of its pass.
    """
    rows = len(forced)

    def ids_for_time(length: int) -> float:
        emitted = sum(1 + min(length, of_row) for of_row in forced)
        return emitted / (_DOUBLES + rows * (1 + length))

    return max(range(max(forced, default=0) + 1), key=ids_for_time)
