"""A drafter that decodes with a smaller model than the target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.decoding import DecodeState, DecodeStep, Picker
from onward.decoding.step import Run
from onward.errors import ContextOverflowError, NothingToDrawError, RequestError
from onward.models import Cache, Model, ModelRun, padded_length
from onward.sampling import History, Sampler
from onward.speculation.drafter import Draft, DraftRequest, DraftRow
from onward.speculation.verify import DraftSampler


class ModelDrafter:
    """A `Drafter` that decodes with a model of the target's vocabulary, with a cache of its own.

    It draws with the target's own parameters, histories and noise at the same positions. So where the two models agree
    it guesses the very ids that the target samples. All rows are drafted in one batch. A row whose text outgrows the
    model's context gets no more drafts.

    model: any `onward.Model`. Ids that the target does not have are never drafted, so a padded vocabulary does no harm.
        The caller must know that the other ids mean the same (`onward.speculation.check_same_tokens`).
    compile: as in `LanguageModel`. chunk: the most tokens of a row processed at once.
    """

    def __init__(self, model: Model, compile: str = "auto", chunk: int = 512) -> None:
        if not isinstance(model, Model):
            raise RequestError(f"ModelDrafter takes an onward.Model; got {type(model).__name__}")
        self.model = model
        self.chunk = chunk
        self._run = ModelRun(model, compile)

    def start(self, request: DraftRequest) -> "_ModelDrafts":
        return _ModelDrafts(self._run, self.model, request, self.chunk)


class _ModelDrafts:
    """The rows of a request in the draft model's own cache.

    The cache holds of each row its text when the last draft began, and then all ids of that draft but the last. The
    rest of the row's text is pending when the next draft begins. That is two ids after a draft that was accepted whole,
    one id after any other draft, and more after a pause in drafting.
    """

    def __init__(self, run: Run, model: Model, request: DraftRequest, chunk: int) -> None:
        self._request = request
        self._model = model
        select, histories = request.select, request.histories
        self._sampler: DraftSampler | None = None
        if request.probabilities and isinstance(select, Sampler):
            self._sampler = DraftSampler(select, histories)
        picker = self._sampler or Picker(select, histories)
        self._step = DecodeStep(_with_target_vocabulary(run, model.vocab_size, request.vocab_size), picker, chunk)
        self._state: DecodeState | None = None
        self._processed: dict[int, int] = {}  # by owner: the length of its text when its last draft began
        self._drafted: dict[int, list[int]] = {}  # by owner: its last draft
        # In a ragged batch padding is written after a row's ids, up to the length of a draft past the longest text.
        needed = request.max_len + request.longest
        limit = needed if model.max_seq_len is None else min(needed, model.max_seq_len)
        self._fits = limit - request.longest
        self._positions = padded_length(limit, model)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        state = self._caught_up({row.owner: row for row in rows if len(row) <= self._fits})
        if state is None:
            return [Draft(()) for _ in rows]
        drafted, probabilities = self._drafts(state, max(row.wanted for row in rows))
        drafts = []
        for row in rows:
            ids = drafted.get(row.owner, [])[: row.wanted]
            drafts.append(Draft(ids, probabilities[row.owner][: len(ids)] if ids and probabilities else None))
        return drafts

    def _caught_up(self, rows: dict[int, DraftRow]) -> DecodeState | None:
        """The state in which all of each row's text is in the cache or pending; None where no row is left."""
        state = self._state or self._first(sorted(rows))
        if state is None:
            return None
        state = state.only([owner in rows for owner in range(self._request.rows)])
        if not any(state.live):
            self._state = state
            return None
        owners_live = list(zip(state.owners, state.live, strict=True))
        offsets = [self._cached_length(rows[owner]) if live else 0 for owner, live in owners_live]
        pending = [
            tuple(rows[owner].ids(offset)) if live else (0,)
            for (owner, live), offset in zip(owners_live, offsets, strict=True)
        ]
        # A row that gets no more drafts needs nothing in the cache, so it may be written over from its beginning.
        return state.advanced(tuple(pending), tuple(offsets), state.cache)

    def _first(self, owners: Sequence[int]) -> DecodeState | None:
        if not owners:
            return None
        cache = self._model.new_cache(len(owners), self._positions)
        count = len(owners)
        return DecodeState(
            ((0,),) * count, (0,) * count, tuple(owners), (True,) * count, cache, self._model.device, True
        )

    def _cached_length(self, row: DraftRow) -> int:
        """How many ids of the row's text the cache holds."""
        length = self._processed.get(row.owner, 0)
        for drafted, accepted in zip(self._drafted.get(row.owner, [])[:-1], row.ids(length)[:-1], strict=False):
            if drafted != accepted:
                break
            length += 1
        return length

    def _drafts(self, state: DecodeState, count: int) -> tuple[dict[int, list[int]], dict[int, Tensor] | None]:
        """Up to `count` ids for each live row; their distributions too, where the request asks for them."""
        owners = [owner for owner, live in zip(state.owners, state.live, strict=True) if live]
        lengths = [begin + len(pending) for begin, pending in zip(state.offsets, state.pending, strict=True)]
        drafted: dict[int, list[int]] = {owner: [] for owner in owners}
        self._drafted = {}  # the last draft is written over now; if a step fails, the cache holds no draft
        drawn_from: list[Tensor] = []
        histories = self._request.histories
        before = {} if histories is None else {owner: histories[owner].output_length for owner in owners}
        try:
            for _ in range(count):
                try:
                    state, emitted = self._step(state)
                except (NothingToDrawError, ContextOverflowError):
                    break  # the draft ends here: bans leave no id, or the draft model's context is full
                for owner, tokens in zip(state.owners, emitted, strict=True):
                    drafted.get(owner, []).extend(token.id for token in tokens)
                if self._sampler is not None:
                    drawn_from.append(self._sampler.probabilities)
        finally:
            _take_back(histories, before)
        self._state, self._drafted = state, drafted
        if any(drafted.values()):
            self._processed = dict(zip(state.owners, lengths, strict=True))
        if self._sampler is None or not drawn_from:
            return drafted, None
        return drafted, dict(zip(owners, torch.stack(drawn_from, 1), strict=True))


def _take_back(histories: Sequence[History] | None, before: dict[int, int]) -> None:
    for owner, length in before.items():
        assert histories is not None
        histories[owner].truncate(length)


def _with_target_vocabulary(run: Run, own: int, target: int) -> Run:
    """A run whose logits are of the target's vocabulary, from a run and the sizes of the two vocabularies.

    Ids that only the draft model has are left out. Ids that only the target has are impossible.
    """
    if own == target:
        return run

    def fitted(tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None) -> tuple[Tensor, Cache]:
        # The draft model never drafts an id that it lacks, so any other id may stand for it in the text.
        known = tokens.clamp(max=own - 1)
        logits, cache = run(known, offsets, cache, logits_at)
        if own > target:
            return logits[..., :target], cache
        return torch.nn.functional.pad(logits, (0, target - own), value=float("-inf")), cache

    return fitted
