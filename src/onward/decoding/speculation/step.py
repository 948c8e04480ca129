"""The speculative step: a drafter or a constraint guesses tokens, and one forward verifies them.

A round processes a sequence's pending id and its draft at once, T = 1 + K tokens. Drafted ids that the target chooses
too are accepted; the next pending id is the target's own. The keys and values of rejected ids are then past the
computed positions, where nothing is read.
"""

import operator
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onward.decoding.batch import ScheduledSequence, forward, inputs
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import Drafter, Drafting, DraftRequest, DraftRow, Speculation
from onward.decoding.speculation.pace import LENGTHS, AcceptanceRate, DraftLengthController, RowAcceptance
from onward.decoding.speculation.verify import verify
from onward.decoding.step import Drafts, Emitted, Step, TokenSampler
from onward.errors import DraftError, one_line
from onward.program import Executable
from onward.sampling.logprobs import tokens_of


class DraftGroup:
    """Sequences that a drafter drafts for together. drafting: None before the first proposal."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        self.drafting: Drafting | None = None

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[list[int]]:
        """The drafter's ids for each row, at most `wanted`.

        Raises:
            DraftError: the drafter failed, or returned something other than ids of the model.
        """
        name, vocab = type(self.drafter).__name__, self.request.vocab_size
        try:
            if self.drafting is None:
                self.drafting = self.drafter.start(self.request)
            proposals = list(self.drafting.propose(rows))
        except Exception as error:
            raise DraftError(f"the drafter {name} failed ({type(error).__name__}: {one_line(error)})") from error
        if len(proposals) != len(rows):
            raise DraftError(f"the drafter {name} was asked for {len(rows)} drafts and returned {len(proposals)}")
        drafts = []
        for row, proposal in zip(rows, proposals, strict=True):
            try:
                drafts.append([operator.index(token) for token in proposal[: row.wanted]])
            except TypeError as error:
                raise DraftError(f"the drafter {name} must propose ids, whole numbers; got {proposal!r}") from error
            if out := [token for token in drafts[-1] if not 0 <= token < vocab]:
                raise DraftError(
                    f"the drafter {name} proposed id {out[0]}, but the model's ids are from 0 to {vocab - 1}"
                )
        return drafts


@dataclass
class DraftState:
    """The `drafting` of one sequence.

    group, owner: the sequence's draft group and its index there; None if only forced ids are drafted.
    length: the number of output ids if the sequence takes all of the last round.
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
    """Draft only the ids that these sequences' constraints force."""
    for sequence in sequences:
        sequence.drafting = DraftState(None, 0, AcceptanceRate())


def draft_state(sequence: Sequence) -> DraftState:
    state = sequence.drafting
    assert isinstance(state, DraftState), "a sequence joins a speculator before it is drafted for"
    return state


def speculation_of(sequence: Sequence) -> Speculation | None:
    """The drafting counts of this sequence so far; None without drafting."""
    return draft_state(sequence).counts(sequence) if sequence.drafting is not None else None


class SpeculativeStep:
    """A `Step` that emits 1 to K+1 tokens per sequence.

    Ids that a sequence's constraint forces are drafted as they are; otherwise its drafter is asked.
    Prompts, and steps without a draft, are processed by a plain step.

    plain: that step. run, slots, chooser, device: as in `DecodeStep`.
    longest: the most ids of a draft. pace: chooses draft lengths; without it, every draft has `longest` ids.
    vocab_size: V of the logits; None does not check forced ids.
    acceptance: the overall acceptance rate so far.
    """

    def __init__(
        self,
        plain: Step,
        run: Executable,
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
        self._clock: Callable[[], float] = (lambda: 0.0) if pace is None else pace.clock
        self._vocab_size = vocab_size
        self._overall = AcceptanceRate() if acceptance is None else acceptance
        self._shape_counts: Counter[tuple[int, int]] = Counter()  # steps by (sequences, longest draft)

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
            drafts = self._drafts(sequences, counts, [()] * len(work) if forced is None else forced)
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
        groups = [_group(sequence) for sequence in sequences]
        if all(group is None for group in groups):
            return [0] * len(sequences)
        limits = self._limits(sequences, self._longest)
        limits = [0 if group is None else limit for group, limit in zip(groups, limits, strict=True)]
        longest = max(limits)
        if longest < 1:
            return [0] * len(limits)
        if self._pace is not None:
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
        room = self._slots.max_step_tokens([sequence.slot for sequence in sequences], computed)
        if room is None:
            room = min(map(_max_len, sequences)) - max(computed)
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
        return [self._in_vocabulary(ids[:length]) for ids in forced] if length else None

    def _in_vocabulary(self, ids: abc.Sequence[int]) -> abc.Sequence[int]:
        """The ids before the first one outside the vocabulary: a user's constraint may force any."""
        out = (at for at, token in enumerate(ids) if not 0 <= token < (self._vocab_size or token + 1))
        return ids[: next(out, len(ids))]

    @torch.no_grad()
    def _drafts(
        self, sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], forced: Drafts
    ) -> list[abc.Sequence[int]]:
        """The forced ids of each sequence, or else its drafter's ids, at most its count."""
        drafts = list(forced)
        groups: dict[DraftGroup, list[int]] = {}
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            group = _group(sequence)
            if count and not forced[index] and group is not None:
                groups.setdefault(group, []).append(index)
        for group, indices in groups.items():
            rows = [
                DraftRow(draft_state(each).owner, each.prompt, each.token_ids, counts[index])
                for index, each in ((index, sequences[index]) for index in indices)
            ]
            for index, draft in zip(indices, group.propose(rows), strict=True):
                constraint = sequences[index].constraint
                drafts[index] = draft if constraint is None else draft[: constraint.admitted(draft)]
        return drafts

    @torch.no_grad()
    def _round(self, work: abc.Sequence[ScheduledSequence], drafts: Drafts, longest: int) -> Emitted:
        emitted: Emitted = [[] for _ in work]
        for group in self._slots.groups([sequence.slot for sequence, _ in work], 1 + longest):
            items, group_drafts = [work[index] for index in group], [drafts[index] for index in group]
            sequences = [sequence for sequence, _ in items]
            # Any valid id works as padding, because nothing past a sequence's own draft is read.
            ids = []
            for sequence, draft in zip(sequences, group_drafts, strict=True):
                pending = sequence.ids(sequence.computed, sequence.length)
                ids.append([*pending, *draft, *pending * (longest - len(draft))])
            with self._slots.lock:
                batch, view = inputs(items, self._slots, self._device, ids)
                logits = view.select(forward(self._run, self._slots, batch, view).logits)
            steps = torch.arange(1, longest + 2, dtype=torch.int32, device=self._device)
            positions = view.select(batch.offsets).unsqueeze(1) + steps
            new_ids = verify(self._chooser, sequences, logits, positions, group_drafts)
            for place, (index, sequence, new) in enumerate(zip(group, sequences, new_ids, strict=True)):
                emitted[index] = tokens_of(new, logits[place, : len(new)], [sequence.top_logprobs] * len(new))
        for (sequence, _), tokens in zip(work, emitted, strict=True):
            sequence.computed += len(tokens)
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


def _group(sequence: Sequence) -> DraftGroup | None:
    return None if sequence.drafting is None else draft_state(sequence).group


def _max_len(sequence: Sequence) -> int:
    group = _group(sequence)
    return sequence.longest if group is None else group.request.max_len


# A forward over this many ids takes about twice as long as over one: between 7 and 22 on CPUs.
_DOUBLING_LENGTH = 16


def paying_length(forced: abc.Sequence[int]) -> int:
    """The number of forced ids to draft per row that emits the most ids for the time of its forward; 0 for none.

    forced: the number of forced ids in each row. Every row is padded to the longest draft, so ids forced in one row
    cost time in all.
    """

    def throughput(length: int) -> float:
        emitted = sum(1 + min(length, count) for count in forced)
        return emitted / (_DOUBLING_LENGTH + len(forced) * (1 + length))

    return max(range(max(forced, default=0) + 1), key=throughput)
