"""Beam search: a `Step` that keeps the likeliest texts of each prompt.

A beam holds a fork of one of the loop's rows, so a `Row` decides where each text ends, as in every other step. When a
prompt's search is over, the loop's rows take over its best texts.

Beams fork, finish and stop where those of transformers do (`GenerationMixin._beam_search`, 5.x), so texts and scores
are the same. The length penalty is that of Wu et al. (arXiv 1609.08144) in transformers' form: without its constant.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onward.cache import CompactableCache
from onward.cache.rows import copy_row, have_rows, row_dims
from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import Emitted, Run, TokenLogprobs, last_logits, not_finite, token_logprobs
from onward.errors import RequestError
from onward.models import Cache, ModelRun
from onward.sampling import History, SamplingParams
from onward.sampling.adjustments import Adjustments


@dataclass(frozen=True)
class BeamOptions:
    """width: beams of a prompt. length_penalty, early_stopping: see `onward.requests.GenerateOptions`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def score(self, total: float, length: int) -> float:
        """The rank of a text of `length` tokens; `total` is the sum of their logprobs."""
        return float(total / length**self.length_penalty)


class Candidate(NamedTuple):
    """A beam and a token that may follow it; `total` is the sum of logprobs with that token."""

    slot: int
    token: int
    total: float
    logprobs: TokenLogprobs | None = None


class Beam(NamedTuple):
    """A text that goes on. `total` is the sum of its logprobs."""

    row: Row
    total: float


class Search:
    """The search of one prompt. It begins with one beam: the prompt.

    running: the texts that go on, in `width` slots; None in an empty slot. ended: scores and rows of the texts that
    have ended, best first.
    """

    def __init__(self, row: Row, options: BeamOptions) -> None:
        self.options = options
        self.running: list[Beam | None] = [Beam(row.fork(), 0.0), *[None] * (options.width - 1)]
        self.ended: list[tuple[float, Row]] = []
        self.is_over = False

    def advance(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        """Go on with the best candidates. They are given best first.

        Returns:
            The slots whose past has to be copied, as (from, to). The first child of a beam stays in its parent's
            slot; the others move. No slot is both read and written.
        """
        width = self.options.width
        children: list[tuple[int, Beam]] = []
        for rank, candidate in enumerate(candidates):
            # A text may end only if it is among the `width` best. Worse candidates only fill slots, if they go on.
            if (rank >= width and len(children) == width) or candidate.total == -math.inf:
                break
            parent = self.running[candidate.slot]
            assert parent is not None, "an empty slot has no candidates"
            row = parent.row.fork()
            row.accept(candidate.token, candidate.logprobs)
            if row.finish_reason is None:
                if len(children) < width:
                    children.append((candidate.slot, Beam(row, candidate.total)))
            elif rank < width:
                self.ended.append((self.options.score(candidate.total, len(row.token_ids)), row))
        self.ended = sorted(self.ended, key=lambda scored: -scored[0])[:width]
        self.is_over = self._cannot_improve([beam for _, beam in children])
        return self._place(children)

    def _cannot_improve(self, running: Sequence[Beam]) -> bool:
        if not running:
            return True
        if len(self.ended) < self.options.width:
            return False
        if self.options.early_stopping is True:
            return True
        best = running[0]
        length = len(best.row.token_ids)
        if self.options.early_stopping == "never" and self.options.length_penalty > 0:
            length += best.row.room  # the length that scores highest
        return self.options.score(best.total, length) <= self.ended[-1][0]

    def _place(self, children: Sequence[tuple[int, Beam]]) -> list[tuple[int, int]]:
        self.running = [None] * self.options.width
        others = []
        for slot, beam in children:
            if self.running[slot] is None:
                self.running[slot] = beam
            else:
                others.append((slot, beam))
        free = [slot for slot, beam in enumerate(self.running) if beam is None]
        moves = []
        for (parent, beam), slot in zip(others, free, strict=False):
            self.running[slot] = beam
            moves.append((parent, slot))
        return moves


class BeamStep:
    """Advances every prompt's beams by one token. It emits nothing: when a prompt's search is over, its rows end.

    run: the model.
    rows: the loop's rows, `width` for each prompt. When they end they hold the prompt's texts, best first. Where the
        search ended with fewer texts, the last one repeats.
    params: the options of each row. Only the adjustments (penalties, bias, bans) act; they act on logprobs, as in
        transformers.
    histories: the history of each row, where an option reads it.
    chunk, top_logprobs: as in `DecodeStep` and `Picker`.
    """

    def __init__(
        self,
        run: Run,
        rows: Sequence[Row],
        options: BeamOptions,
        params: Sequence[SamplingParams],
        histories: Sequence[History] | None = None,
        chunk: int = 512,
        top_logprobs: int | None = None,
    ) -> None:
        self.run, self.rows, self.options, self.chunk, self.top_logprobs = run, rows, options, chunk, top_logprobs
        self.searches = [Search(row, options) for row in rows[:: options.width]]
        self.histories = None if histories is None else list(histories)
        self._params = params
        self._row_dims: list[int] | None = None
        # Enough candidates for `width` beams to go on, whichever candidates end their texts.
        self._candidate_counts = [options.width * max(2, 1 + len(each.eos or ())) for each in params[:: options.width]]

    @torch.no_grad()
    def __call__(self, state: DecodeState) -> tuple[DecodeState, Emitted]:
        self._check_rows(state)
        logits, cache = last_logits(self.run, state, self.chunk)
        logprobs = self._logprobs(logits, state)
        after = tuple(
            offset + len(ids) if live else offset
            for offset, ids, live in zip(state.offsets, state.pending, state.live, strict=True)
        )
        pending = [ids[-1:] for ids in state.pending]
        places = {owner: place for place, owner in enumerate(state.owners) if state.live[place]}
        for group, search in enumerate(self.searches):
            first = group * self.options.width
            if first not in places:
                continue
            slot_places = [places[first + slot] for slot in range(self.options.width)]
            candidates = self._best_candidates(group, logprobs[slot_places], logits, slot_places)
            for source, to in search.advance(candidates):
                self._copy_row(cache, slot_places[source], slot_places[to], after[slot_places[source]])
                if self.histories is not None:
                    self.histories[first + to] = copy.deepcopy(self.histories[first + source])
            for slot, beam in enumerate(search.running):
                if beam is not None:
                    pending[slot_places[slot]] = (beam.row.token_ids[-1],)
                    if self.histories is not None:
                        self.histories[first + slot].append(beam.row.token_ids[-1])
            if search.is_over:
                self._end(first, search)
        return state.advanced(tuple(pending), after, cache), [[] for _ in state.owners]

    def score(self, row: int) -> float | None:
        """The score of the text that the loop's row has taken over; None where it only repeats another row's text."""
        group, rank = divmod(row, self.options.width)
        ended = self.searches[group].ended
        return ended[rank][0] if rank < len(ended) else None

    def _check_rows(self, state: DecodeState) -> None:
        if isinstance(state.cache, CompactableCache):
            return
        if self._row_dims is None and isinstance(self.run, ModelRun):
            self._row_dims = row_dims(self.run.model.new_cache)
        if self._row_dims is None or not have_rows(state.cache, self._row_dims, len(state.owners)):
            raise RequestError(
                f"beams need a cache whose rows can be copied, with copy_row and first_rows as onward.KVCache has "
                f"them, or a pytree of tensors that each have a dimension for the batch; got "
                f"{type(state.cache).__name__}"
            )

    def _copy_row(self, cache: Cache, source: int, to: int, positions: int) -> None:
        if isinstance(cache, CompactableCache):
            cache.copy_row(source, to, positions)
        else:
            assert self._row_dims is not None, "checked before the step"
            copy_row(cache, self._row_dims, source, to)

    def _logprobs(self, logits: Tensor, state: DecodeState) -> Tensor:
        """The adjusted logprobs of every id in every row of the cache, float32 [B, V]."""
        logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1)
        adjust = Adjustments([self._params[owner] for owner in state.owners], state.device)
        if not adjust.any:
            return logprobs
        histories = None if self.histories is None else [self.histories[owner] for owner in state.owners]
        return adjust(logprobs.unsqueeze(1), histories, None).squeeze(1)

    def _best_candidates(self, group: int, logprobs: Tensor, logits: Tensor, places: Sequence[int]) -> list[Candidate]:
        """The best continuations of a prompt's beams, best first, from their logprobs [width, V]."""
        running = self.searches[group].running
        slots = [slot for slot, beam in enumerate(running) if beam is not None]
        totals = torch.tensor([beam.total for beam in running if beam is not None], device=logprobs.device)
        vocab = logprobs.shape[-1]
        flat = (logprobs[slots] + totals.unsqueeze(1)).flatten()
        best = flat.topk(min(self._candidate_counts[group], flat.numel()))
        best_totals = best.values.tolist()
        if not math.isfinite(best_totals[0]):
            raise not_finite()
        # Which of the running beams, and which token follows it.
        choices = [divmod(index, vocab) for index in best.indices.tolist()]
        reported: Sequence[TokenLogprobs | None] = [None] * len(choices)
        if self.top_logprobs is not None:
            rows = logits[[places[slots[beam]] for beam, _ in choices]]
            reported = token_logprobs([token for _, token in choices], rows, self.top_logprobs)
        return [
            Candidate(slots[beam], token, total, token_report)
            for (beam, token), total, token_report in zip(choices, best_totals, reported, strict=True)
        ]

    def _end(self, first: int, search: Search) -> None:
        for rank in range(self.options.width):
            self.rows[first + rank].take_over(search.ended[min(rank, len(search.ended) - 1)][1])
