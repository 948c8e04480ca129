"""The speculative step: several tokens of a row in one pass of the model, where a drafter guessed them.

A round processes a row's pending id and its draft at once, T = 1 + K tokens; a verifier says how far the draft is
right. The next pending id is the one that the target picked itself. What the cache holds of ids that were not accepted
is past the row's offset then: nobody reads it.
"""

import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onward.cache import length_of
from onward.decoding import DecodeState, DecodeStep, Picker, Row, Token
from onward.decoding.step import Emitted, Run, forward, not_finite, token_logprobs
from onward.errors import DraftError, one_line
from onward.sampling import History
from onward.speculation.counts import Speculation
from onward.speculation.drafter import Draft, Drafter, Drafting, DraftRequest, DraftRow
from onward.speculation.pace import Acceptance, Pace, RowPace
from onward.speculation.verify import Verifier


class SpeculativeStep:
    """A `Step` that emits 1 to K+1 tokens a row. It knows the rows: their texts, and how many ids they may still take.

    A prompt is processed as in `DecodeStep`, and so is a step for which nothing is drafted. Histories are brought up
    to date from the rows before each step, so that what a row did not take is in none.

    run, picker, chunk: as of `DecodeStep`. drafter, verifier: who guesses and who judges.
    request: what the drafter is told. prompts, rows: of the request, by owner.
    pace: chooses how many ids to draft; None for drafts of `request.longest` always.
    acceptance: what it is of texts in general, from which each row starts.
    """

    def __init__(
        self,
        run: Run,
        picker: Picker,
        *,
        drafter: Drafter,
        verifier: Verifier,
        request: DraftRequest,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Row],
        pace: Pace | None = None,
        acceptance: Acceptance | None = None,
        chunk: int = 512,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run = run
        self.picker = picker
        self._plain = DecodeStep(run, picker, chunk)
        self._drafter, self._verifier, self._request = drafter, verifier, request
        self._prompts, self._rows = prompts, rows
        self._pace = pace
        self._clock = clock if pace is not None else _no_clock
        self._drafting: Drafting | None = None
        self._overall = Acceptance() if acceptance is None else acceptance
        self._acceptance = [Acceptance(self._overall.rate) for _ in rows]
        self._counts = [_Counts() for _ in rows]
        self._met: Counter[tuple[int, int]] = Counter()

    def speculation(self, owner: int) -> Speculation:
        """What drafting brought this row so far."""
        return self._counts[owner].of(self._rows[owner])

    def __call__(self, state: DecodeState) -> tuple[DecodeState, Emitted]:
        if self.picker.histories is not None:
            self._update(self.picker.histories, state)
        began, pace = self._clock(), self._pace
        if (pace is not None and pace.rest) or max(map(len, state.pending)) > 1:
            state, emitted = self._plain(state)
            if pace is not None:
                pace.note_time(self._clock() - began)
            return state, emitted
        wanted = self._wanted(state)
        drafts: list[Draft] = []
        drafting = 0.0
        if any(wanted):
            drafts = self._drafts(state, wanted)
            drafting = self._clock() - began
        else:
            # Choosing none is no loss by this drafter: booked to it, it could take more than a plain step earns, and a
            # drafter that is new, with nothing earned, would never be asked.
            began = self._clock()
        longest = max((len(draft.ids) for draft in drafts), default=0)
        state, emitted = self._round(state, drafts, longest) if longest else self._plain(state)
        if self._pace is not None:
            self._note(state, emitted, longest, self._clock() - began, drafting)
        return state, emitted

    def _note(self, state: DecodeState, emitted: Emitted, longest: int, seconds: float, drafting: float) -> None:
        assert self._pace is not None
        rows = sum(state.live)
        shape = (len(state.live), longest)
        self._met[shape] += 1
        # Shapes that are new want programs: a plain step for one model, a round for two.
        if longest:
            self._pace.note_round(rows, longest, sum(map(len, emitted)), seconds, new=self._met[shape] <= 2)
        else:
            self._pace.note_plain(rows, seconds, drafting=drafting, new=self._met[shape] == 1)

    def _update(self, histories: Sequence[History], state: DecodeState) -> None:
        for owner, live in zip(state.owners, state.live, strict=True):
            history, taken = histories[owner], self._rows[owner].token_ids
            if live:
                history.truncate(min(history.output_length, len(taken)))
                history.extend(taken[history.output_length :])

    # ── how much to draft ─────────────────────────────────────────────────────────────────────────────────

    def _wanted(self, state: DecodeState) -> list[int]:
        """Ids to draft for each row of the cache: one less than it may take, and than every row has room for."""
        most = [self._rows[owner].room - 1 if live else 0 for owner, live in zip(state.owners, state.live, strict=True)]
        # Rows with a shorter draft are padded to the longest one.
        free = self._length(state) - 1 - max(state.offsets)
        longest = min(self._request.longest, free, max(most))
        if longest < 1:
            return [0] * len(most)
        if self._pace is not None:
            longest = self._pace.choose(
                [
                    RowPace(self._acceptance[owner].rate, room)
                    for owner, room, live in zip(state.owners, most, state.live, strict=True)
                    if live
                ],
                longest,
            )
        return [min(room, longest) for room in most]

    def _length(self, state: DecodeState) -> int:
        length = length_of(state.cache)
        return self._request.max_len if length is None else length

    # ── the draft ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _drafts(self, state: DecodeState, wanted: Sequence[int]) -> list[Draft]:
        """A draft for each row of the cache; an empty one where none is wanted."""
        asked = [place for place, count in enumerate(wanted) if count]
        rows = [
            DraftRow(owner, self._prompts[owner], self._rows[owner].token_ids, wanted[place])
            for place, owner in ((place, state.owners[place]) for place in asked)
        ]
        name = type(self._drafter).__name__
        try:
            if self._drafting is None:
                self._drafting = self._drafter.start(self._request)
            proposed = list(self._drafting.propose(rows))
        except Exception as error:
            raise DraftError(f"the drafter {name} failed ({type(error).__name__}: {one_line(error)})") from error
        if len(proposed) != len(rows):
            raise DraftError(f"the drafter {name} was asked for {len(rows)} drafts and returned {len(proposed)}")
        drafts = [Draft(()) for _ in wanted]
        for place, proposal in zip(asked, proposed, strict=True):
            drafts[place] = self._checked(proposal, wanted[place])
        return drafts

    def _checked(self, proposal: Draft | Sequence[int], wanted: int) -> Draft:
        name, vocab = type(self._drafter).__name__, self._request.vocab_size
        draft = proposal if isinstance(proposal, Draft) else Draft(proposal)
        try:
            ids = [operator.index(token) for token in draft.ids[:wanted]]
        except TypeError as error:
            raise DraftError(f"the drafter {name} must propose ids, whole numbers; got {proposal!r}") from error
        if out := [token for token in ids if not 0 <= token < vocab]:
            raise DraftError(f"the drafter {name} proposed id {out[0]}, but the model's ids are from 0 to {vocab - 1}")
        probabilities = draft.probabilities
        if probabilities is not None and (probabilities.dim() != 2 or probabilities.shape[1] != vocab):
            raise DraftError(
                f"the drafter {name} must give probabilities [N, {vocab}]; got {list(probabilities.shape)}"
            )
        if probabilities is not None and len(probabilities) < len(ids):
            raise DraftError(f"the drafter {name} gave probabilities for {len(probabilities)} of {len(ids)} ids")
        return Draft(ids, probabilities)

    # ── the round ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _round(self, state: DecodeState, drafts: Sequence[Draft], longest: int) -> tuple[DecodeState, Emitted]:
        # Any valid id will do as padding, for what follows a row's own draft is never looked at.
        padded = [
            [*pending, *draft.ids, *pending * (longest - len(draft.ids))]
            for pending, draft in zip(state.pending, drafts, strict=True)
        ]
        tokens = torch.tensor(padded, dtype=torch.int32, device=state.device)
        offsets = torch.tensor(state.offsets, dtype=torch.int32, device=state.device)
        logits, cache = forward(self.run, tokens, offsets, state.cache, None)
        places = torch.arange(1, longest + 2, dtype=torch.int32, device=state.device)
        ids = self._verifier(self.picker, state, logits, offsets.unsqueeze(1) + places, drafts)
        ids = _finite(logits, ids)
        for owner, draft, new in zip(state.owners, drafts, ids, strict=True):
            if new and draft.ids:
                self._count(owner, draft.ids, new)
        emitted = [self._tokens(new, logits[place]) for place, new in enumerate(ids)]
        pending = tuple((new[-1],) if new else (0,) for new in ids)
        after = tuple(offset + len(new) for offset, new in zip(state.offsets, ids, strict=True))
        return state.advanced(pending, after, cache), emitted

    def _count(self, owner: int, draft: Sequence[int], new: Sequence[int]) -> None:
        drafted, accepted = len(draft), sum(map(operator.eq, draft, new))  # the first that differs is the last of `new`
        counts = self._counts[owner]
        counts.drafted += drafted
        counts.accepted += accepted
        counts.rounds += 1
        counts.length = len(self._rows[owner].token_ids) + len(new)
        self._acceptance[owner].note(drafted, accepted)
        self._overall.note(drafted, accepted)

    def _tokens(self, ids: Sequence[int], logits: torch.Tensor) -> list[Token]:
        top = self.picker.top_logprobs
        if top is None or not ids:
            return [Token(token) for token in ids]
        told = token_logprobs(ids, logits[: len(ids)], top)
        return [Token(token, of) for token, of in zip(ids, told, strict=True)]


def _no_clock() -> float:
    """For drafts of a fixed length, which ask for no times."""
    return 0.0


@dataclass
class _Counts:
    """Of one row. length: that of its output, had it taken all of the last round."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    length: int = 0

    def of(self, row: Row) -> Speculation:
        """What the row did not take of its last round is not counted."""
        not_taken = max(0, self.length - len(row.token_ids))
        return Speculation(self.drafted, max(0, self.accepted - not_taken), self.rounds)


def _finite(logits: torch.Tensor, ids: list[list[int]]) -> list[list[int]]:
    """The ids as far as the logits [B, K+1, V] that they were picked from are finite, one at least: what is wrong
    behind that may be behind the end of a text. One look at the picked ones finds NaN: NaN wins every argmax.
    """
    longest = max(map(len, ids))
    padded = [[*new, *[0] * (longest - len(new))] for new in ids]
    picked = torch.tensor(padded, device=logits.device).unsqueeze(2)
    finite = logits[:, :longest].gather(2, picked).squeeze(2).isfinite().tolist()
    sound = [
        next((k for k, ok in enumerate(row[: len(new)]) if not ok), len(new))
        for row, new in zip(finite, ids, strict=True)
    ]
    if any(new and not count for count, new in zip(sound, ids, strict=True)):
        raise not_finite()
    return [new[:count] for count, new in zip(sound, ids, strict=True)]
