"""The speculative step: a drafter guesses tokens, and one pass of the model verifies them.

A round processes a row's pending id and its draft at once, T = 1 + K tokens. A verifier says how many ids of the draft
are right. The next pending id is the one that the target picked itself. The keys and values of ids that were not
accepted are then past the row's offset, where nothing is read.
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
    """A `Step` that emits 1 to K+1 tokens a row. It reads the rows' texts, and how many ids they may still take.

    Prompts, and steps without a draft, are processed by a `DecodeStep`. Before each step the histories are brought up
    to date from the rows, so that they hold no id that a row did not take.

    run, picker, chunk: as in `DecodeStep`. drafter, verifier: guess ids and judge them.
    request: what the drafter is told. prompts, rows: one of each for every row of the loop.
    pace: chooses how many ids to draft; None always drafts `request.longest`.
    acceptance: the acceptance of texts so far, from which each row starts.
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
        self._shape_counts: Counter[tuple[int, int]] = Counter()  # steps by (rows, longest draft)

    def speculation(self, owner: int) -> Speculation:
        """What drafting brought this row so far."""
        return self._counts[owner].of(self._rows[owner])

    def __call__(self, state: DecodeState) -> tuple[DecodeState, Emitted]:
        if self.picker.histories is not None:
            self._update_histories(self.picker.histories, state)
        began, pace = self._clock(), self._pace
        if (pace is not None and pace.rest) or max(map(len, state.pending)) > 1:
            state, emitted = self._plain(state)
            if pace is not None:
                pace.note_time(self._clock() - began)
            return state, emitted
        counts = self._draft_lengths(state)
        drafts: list[Draft] = []
        drafting = 0.0
        if any(counts):
            drafts = self._drafts(state, counts)
            drafting = self._clock() - began
        else:
            # The time of choosing no draft is not booked as a loss. It could be more than a plain step earns, and then
            # a new drafter, which has earned nothing yet, would never be asked.
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
        self._shape_counts[shape] += 1
        # Programs are made for new shapes: by a plain step for one model, by a round for two.
        if longest:
            self._pace.note_round(rows, longest, sum(map(len, emitted)), seconds, new=self._shape_counts[shape] <= 2)
        else:
            self._pace.note_plain(rows, seconds, drafting=drafting, new=self._shape_counts[shape] == 1)

    def _update_histories(self, histories: Sequence[History], state: DecodeState) -> None:
        for owner, live in zip(state.owners, state.live, strict=True):
            history, taken = histories[owner], self._rows[owner].token_ids
            if live:
                history.truncate(min(history.output_length, len(taken)))
                history.extend(taken[history.output_length :])

    # ── how much to draft ─────────────────────────────────────────────────────────────────────────────────

    def _draft_lengths(self, state: DecodeState) -> list[int]:
        """How many ids to draft for each row of the cache.

        A round adds an id of the target's own. So a draft is at least one id shorter than what the row may still take,
        and than the room in the cache.
        """
        most = [self._rows[owner].room - 1 if live else 0 for owner, live in zip(state.owners, state.live, strict=True)]
        # All rows are padded to the longest draft, so the fullest row of the cache limits it.
        free = self._cache_length(state) - 1 - max(state.offsets)
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

    def _cache_length(self, state: DecodeState) -> int:
        length = length_of(state.cache)
        return self._request.max_len if length is None else length

    # ── the draft ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _drafts(self, state: DecodeState, counts: Sequence[int]) -> list[Draft]:
        """A draft of at most `counts` ids for each row of the cache; the drafter is not asked where that is 0."""
        places = [place for place, count in enumerate(counts) if count]
        rows = [
            DraftRow(owner, self._prompts[owner], self._rows[owner].token_ids, counts[place])
            for place, owner in ((place, state.owners[place]) for place in places)
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
        drafts = [Draft(()) for _ in counts]
        for place, proposal in zip(places, proposed, strict=True):
            drafts[place] = self._checked(proposal, counts[place])
        return drafts

    def _checked(self, proposal: Draft | Sequence[int], count: int) -> Draft:
        """The first `count` ids of a proposal as a draft. Raises `DraftError` for what no draft can be."""
        name, vocab = type(self._drafter).__name__, self._request.vocab_size
        draft = proposal if isinstance(proposal, Draft) else Draft(proposal)
        try:
            ids = [operator.index(token) for token in draft.ids[:count]]
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
        # Any valid id will do as padding, for nothing past a row's own draft is read.
        padded = [
            [*pending, *draft.ids, *pending * (longest - len(draft.ids))]
            for pending, draft in zip(state.pending, drafts, strict=True)
        ]
        tokens = torch.tensor(padded, dtype=torch.int32, device=state.device)
        offsets = torch.tensor(state.offsets, dtype=torch.int32, device=state.device)
        logits, cache = forward(self.run, tokens, offsets, state.cache, None)
        steps = torch.arange(1, longest + 2, dtype=torch.int32, device=state.device)
        ids = self._verifier(self.picker, state, logits, offsets.unsqueeze(1) + steps, drafts)
        ids = _with_finite_logits(logits, ids)
        for owner, draft, new in zip(state.owners, drafts, ids, strict=True):
            if new and draft.ids:
                self._count(owner, draft.ids, new)
        emitted = [self._tokens(new, logits[place]) for place, new in enumerate(ids)]
        pending = tuple((new[-1],) if new else (0,) for new in ids)
        after = tuple(offset + len(new) for offset, new in zip(state.offsets, ids, strict=True))
        return state.advanced(pending, after, cache), emitted

    def _count(self, owner: int, draft: Sequence[int], new: Sequence[int]) -> None:
        # `new` ends with the first id that differs from the draft, so all equal pairs are accepted ids.
        drafted, accepted = len(draft), sum(map(operator.eq, draft, new))
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
        return [Token(*pair) for pair in zip(ids, token_logprobs(ids, logits[: len(ids)], top), strict=True)]


def _no_clock() -> float:
    """The clock for drafts of a fixed length, which need no times."""
    return 0.0


@dataclass
class _Counts:
    """The counts of one row. length: how many ids its output has if it takes all of the last round."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    length: int = 0

    def of(self, row: Row) -> Speculation:
        """The counts without the ids of the last round that the row did not take."""
        not_taken = max(0, self.length - len(row.token_ids))
        return Speculation(self.drafted, max(0, self.accepted - not_taken), self.rounds)


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
