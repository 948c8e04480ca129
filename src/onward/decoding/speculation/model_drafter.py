"""A drafter that decodes with a smaller model than the target."""

from collections import abc

import torch

from onward.decoding.batch import ScheduledSequence
from onward.decoding.sequence import Sequence
from onward.decoding.shared_cache import slots_for
from onward.decoding.speculation.drafter import DraftRequest, DraftRow
from onward.decoding.step import DecodeStep, FunctionSampler, SamplerCache, TokenSampler
from onward.errors import ContextOverflowError, NothingToDrawError, OnwardError, RequestError
from onward.models import Model, Run
from onward.program import Executable, ForwardBatch, SamplingKernel, StepResult
from onward.sampling import Sampler


class ModelDrafter:
    """A `Drafter` that decodes with a model of the target's vocabulary and its own cache.

    It draws with the target's parameters, histories and noise at the same positions. So where the two models agree, it
    guesses the very ids that the target samples. All rows are drafted in one batch. A row that outgrows the model's
    context gets no more drafts.

    model: any `onward.Model`. Ids that the target lacks are never drafted, so a padded vocabulary is fine. The caller
        must ensure that the other ids are the same tokens (`onward.decoding.speculation.check_same_tokens`).
    compile: as in `LanguageModel`. chunk: the most tokens of a row processed at once.
    """

    def __init__(self, model: Model, compile: str = "auto", chunk: int = 512) -> None:
        if not isinstance(model, Model):
            raise RequestError(f"ModelDrafter takes an onward.Model; got {type(model).__name__}")
        self.model = model
        self.chunk = chunk
        self._run = Run(model, compile)

    def start(self, request: DraftRequest) -> "_ModelDrafts":
        return _ModelDrafts(self._run, self.model, request, self.chunk)


class _ModelDrafts:
    """The rows of a request as sequences of the draft model, in its own slots.

    A slot holds its row's ids as of the last draft, then all ids of that draft but the last. When the next one begins,
    the rest of the row is pending: two ids after a fully accepted draft, one after any other, more after a pause.
    """

    def __init__(self, run: Executable, model: Model, request: DraftRequest, chunk: int) -> None:
        self._request = request
        self._chunk = chunk
        # Padding is written after a row's ids, up to the length of a draft past the longest sequence.
        needed = request.max_len + request.longest
        self._length = needed if model.max_seq_len is None else min(needed, model.max_seq_len)
        self._slots = slots_for(model, request.rows, self._length)
        select = request.select
        chooser: TokenSampler = SamplerCache(model.device) if isinstance(select, Sampler) else FunctionSampler(select)
        if model.vocab_size != request.vocab_size:
            run = _FittedRun(run, model.vocab_size, request.vocab_size)
        self._step = DecodeStep(run, self._slots, chooser, model.device)
        self._sequences: dict[int, Sequence] = {}
        self._confirmed: dict[int, int] = {}  # by owner: the length of its output when its last draft began

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[list[int]]:
        fitting = [row for row in rows if len(row) <= self._length - self._request.longest]
        # Rows that are not asked for lose their slots. A row that returns later is processed again.
        for owner in self._sequences.keys() - {row.owner for row in fitting}:
            self._slots.release(self._sequences.pop(owner).slot)
        if not fitting:
            return [[] for _ in rows]
        sequences = [self._synced(row) for row in fitting]
        drafts = self._drafts(sequences, max(row.wanted for row in fitting))
        by_owner = {row.owner: draft for row, draft in zip(fitting, drafts, strict=True)}
        return [by_owner.get(row.owner, [])[: row.wanted] for row in rows]

    def _synced(self, row: DraftRow) -> Sequence:
        """The row's sequence with the row's current ids; those that its slot lacks are pending."""
        sequence = self._sequences.get(row.owner)
        if sequence is None:
            sequence = self._sequences[row.owner] = self._new_sequence(row)
        agreeing, before, now = self._confirmed[row.owner], sequence.token_ids, row.output
        while agreeing < min(len(before), len(now)) and before[agreeing] == now[agreeing]:
            agreeing += 1
        sequence.computed = min(sequence.computed, len(row.prompt) + agreeing, len(row) - 1)
        if not self._slots.holds(sequence.slot, sequence.computed):
            sequence.computed = 0
        sequence.token_ids = list(now)
        self._slots.advance(sequence.slot, sequence.computed, sequence.ids)  # the target's ids are final
        self._confirmed[row.owner] = len(now)
        return sequence

    def _new_sequence(self, row: DraftRow) -> Sequence:
        select, histories, constraints = self._request.select, self._request.histories, self._request.constraints
        sampling = select.row(row.owner) if isinstance(select, Sampler) else None
        sequence = Sequence(row.prompt, self._length, sampling=sampling)
        sequence.history = None if histories is None else histories[row.owner]
        sequence.constraint = None if constraints is None else constraints[row.owner]
        acquired = self._slots.acquire(row.ids(), self._length, reuse=False)
        assert acquired is not None, "there is a slot for every row"
        sequence.slot, _ = acquired
        self._confirmed[row.owner] = 0
        return sequence

    def _drafts(self, sequences: abc.Sequence[Sequence], count: int) -> list[list[int]]:
        before = [len(sequence.token_ids) for sequence in sequences]
        try:
            self._prefill(sequences)
            running = list(sequences)
            for _ in range(count):
                emitted = self._step([ScheduledSequence(sequence, sequence.pending) for sequence in running])
                for sequence, (token,) in zip(running, emitted, strict=True):
                    sequence.accept(token.id)
                running = [sequence for sequence in running if sequence.finish_reason is None]
                if not running:
                    break
        except OnwardError as error:
            # The draft ends here: bans leave no id, or the draft model's context is full. Any other error counts only
            # for the first id: a later one may be past the end of a sequence.
            has_begun = any(len(each.token_ids) > length for each, length in zip(sequences, before, strict=True))
            if not has_begun and not isinstance(error, NothingToDrawError | ContextOverflowError):
                raise
        finally:
            for sequence, length in zip(sequences, before, strict=True):
                sequence.reopen()
                if sequence.history is not None:
                    sequence.history.truncate(length)
                if sequence.constraint is not None:
                    sequence.constraint.truncate(length)
        return [sequence.token_ids[length:] for sequence, length in zip(sequences, before, strict=True)]

    def _prefill(self, sequences: abc.Sequence[Sequence]) -> None:
        """Process long pending sequences chunk by chunk, up to the ids that the draft begins with."""
        while behind := [sequence for sequence in sequences if sequence.pending > self._chunk]:
            chunks = [self._slots.max_chunk(sequence.slot, sequence.computed, self._chunk) for sequence in behind]
            self._step(list(map(ScheduledSequence, behind, chunks)))
            for sequence in behind:
                self._slots.advance(sequence.slot, sequence.computed, sequence.ids)


class _FittedRun:
    """A run with logits of the target's vocabulary: surplus ids are dropped, missing ids are impossible."""

    def __init__(self, run: Executable, own: int, target: int) -> None:
        self._run, self._own, self._target = run, own, target

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        # The draft model never drafts an id that it lacks, so any other id may replace it in its input.
        logits, _, cache = self._run.step(batch._replace(tokens=batch.tokens.clamp(max=self._own - 1)))
        missing = self._target - self._own
        fitted = logits[..., : self._target]
        if missing > 0:
            fitted = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return StepResult(fitted, None, cache)
