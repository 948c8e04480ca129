"""A drafter that decodes with a smaller model than the target."""

from collections import abc

import torch
from torch import Tensor

from onward.decoding.batch import Run, ScheduledSequence
from onward.decoding.sequence import Sequence
from onward.decoding.shared_cache import slots_for
from onward.decoding.speculation.drafter import DraftRequest, DraftRow
from onward.decoding.step import DecodeStep, FunctionSampler, SamplerCache, TokenSampler
from onward.errors import ContextOverflowError, NothingToDrawError, OnwardError, RequestError
from onward.models import Cache, Model, ModelRun
from onward.sampling import Sampler


class ModelDrafter:
    """A `Drafter` that decodes with a model of the target's vocabulary, with a cache of its own.

    It draws with the target's own parameters, histories and noise at the same positions. So where the two models agree
    it guesses the very ids that the target samples. All rows are drafted in one batch. A row whose text outgrows the
    model's context gets no more drafts.

    model: any `onward.Model`. Ids that the target does not have are never drafted, so a padded vocabulary does no harm.
        The caller must know that the other ids mean the same (`onward.decoding.speculation.check_same_tokens`).
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
    """The rows of a request as sequences of the draft model, in slots of its own.

    A sequence holds of its row the text when the last draft began, and then all ids of that draft but the last. The
    rest of the row's text is pending when the next draft begins. That is two ids after a draft that was accepted whole,
    one id after any other draft, and more after a pause in drafting.
    """

    def __init__(self, run: Run, model: Model, request: DraftRequest, chunk: int) -> None:
        self._request = request
        self._chunk = chunk
        # Padding is written after a row's ids, up to the length of a draft past the longest text.
        needed = request.max_len + request.longest
        limit = needed if model.max_seq_len is None else min(needed, model.max_seq_len)
        self._fits = limit - request.longest
        self._positions = limit
        self._slots = slots_for(model, request.rows, limit)
        device = model.device
        select = request.select
        chooser: TokenSampler = SamplerCache(device) if isinstance(select, Sampler) else FunctionSampler(select)
        run = _with_target_vocabulary(run, model.vocab_size, request.vocab_size)
        self._step = DecodeStep(run, self._slots, chooser, device)
        self._texts: dict[int, Sequence] = {}
        self._confirmed: dict[int, int] = {}  # by owner: how long its output was when its last draft began

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[list[int]]:
        fitting = [row for row in rows if len(row) <= self._fits]
        self._let_go({row.owner for row in fitting})
        if not fitting:
            return [[] for _ in rows]
        texts = [self._caught_up(row) for row in fitting]
        drafts = self._drafts(texts, max(row.wanted for row in fitting))
        by_owner = {row.owner: draft for row, draft in zip(fitting, drafts, strict=True)}
        return [by_owner.get(row.owner, [])[: row.wanted] for row in rows]

    def _let_go(self, owners: set[int]) -> None:
        """Let go of rows that are not asked for. A row that is asked for again later is processed anew."""
        for owner in self._texts.keys() - owners:
            self._slots.release(self._texts.pop(owner).slot)

    def _caught_up(self, row: DraftRow) -> Sequence:
        """The row's text, whose ids after those that its slot holds are pending."""
        text = self._texts.get(row.owner)
        if text is None:
            text = self._texts[row.owner] = self._begun(row)
        agreeing, before, now = self._confirmed[row.owner], text.token_ids, row.output
        while agreeing < min(len(before), len(now)) and before[agreeing] == now[agreeing]:
            agreeing += 1
        text.computed = min(text.computed, len(row.prompt) + agreeing, len(row) - 1)
        if not self._slots.holds(text.slot, text.computed):
            text.computed = 0
        text.token_ids = list(now)
        self._slots.advance(text.slot, text.computed, text.ids)  # what the target has said is final
        self._confirmed[row.owner] = len(now)
        return text

    def _begun(self, row: DraftRow) -> Sequence:
        select, histories = self._request.select, self._request.histories
        sampling = select.row(row.owner) if isinstance(select, Sampler) else None
        text = Sequence(row.prompt, self._positions, sampling=sampling)
        text.history = None if histories is None else histories[row.owner]
        constraints = self._request.constraints
        text.constraint = None if constraints is None else constraints[row.owner]
        acquired = self._slots.acquire(row.ids(), self._positions, reuse=False)
        assert acquired is not None, "there is a slot for every row"
        text.slot, _ = acquired
        self._confirmed[row.owner] = 0
        return text

    def _drafts(self, texts: abc.Sequence[Sequence], count: int) -> list[list[int]]:
        """Up to `count` ids for each text."""
        before = [len(text.token_ids) for text in texts]
        try:
            self._catch_up(texts)
            going_on = list(texts)
            for _ in range(count):
                emitted = self._step([ScheduledSequence(text, text.pending) for text in going_on])
                for text, (token,) in zip(going_on, emitted, strict=True):
                    text.accept(token.id)
                going_on = [text for text in going_on if text.finish_reason is None]
                if not going_on:
                    break
        except OnwardError as error:
            # The draft ends here: bans leave no id, or the draft model's context is full. Any other error counts for
            # the first id alone: a later one may be past the end of a text.
            has_begun = any(len(text.token_ids) > length for text, length in zip(texts, before, strict=True))
            if not has_begun and not isinstance(error, NothingToDrawError | ContextOverflowError):
                raise
        finally:
            for text, length in zip(texts, before, strict=True):
                text.reopen()
                if text.history is not None:
                    text.history.truncate(length)
                if text.constraint is not None:
                    text.constraint.truncate(length)
        return [text.token_ids[length:] for text, length in zip(texts, before, strict=True)]

    def _catch_up(self, texts: abc.Sequence[Sequence]) -> None:
        """Process long pending texts chunk by chunk, up to the ids that the draft begins with."""
        while behind := [text for text in texts if text.pending > self._chunk]:
            self._step(
                [
                    ScheduledSequence(text, self._slots.max_chunk(text.slot, text.computed, self._chunk))
                    for text in behind
                ]
            )
            for text in behind:
                self._slots.advance(text.slot, text.computed, text.ids)


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
