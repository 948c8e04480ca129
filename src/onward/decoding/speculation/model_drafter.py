"""A drafter that decodes with a smaller model than the target."""

import sys
from collections import abc

import torch

from onward.decoding.batch import ScheduledSequence
from onward.decoding.sequence import Sequence
from onward.decoding.shared_cache import bounded_slots
from onward.decoding.speculation.drafter import DraftRow, DraftTarget
from onward.decoding.step import DecodeStep, FunctionSampler, SamplerCache, TokenSampler
from onward.errors import ContextOverflowError, NothingToDrawError, OnwardError, RequestError
from onward.models import Model, Run
from onward.models.model import computation
from onward.program import Executable, ForwardBatch, SamplingKernel, StepResult


class ModelDrafter:
    """A `Drafter` that decodes with a model of the target's vocabulary and its own cache.

    It draws with the target's parameters, histories and noise at the same positions. So where the two models agree, it
    guesses the very ids that the target samples. All rows are drafted in one batch, whichever requests they belong to.

    Its cache has room for as many positions as the target's, and for the drafts of all rows. Like the target's it takes
    memory as it is written, on the CPU, and keeps the prefixes of ended rows for the next ones with the same salt. A
    row that finds no room there, or outgrows the model's context, gets no draft.

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

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.model.nbytes

    def start(self, target: DraftTarget) -> "ModelDrafts":
        return ModelDrafts(self._run, self.model, target, self.chunk)


class DraftSequence(Sequence):
    """A row in the draft model.

    Its slot holds the row's ids as of the last draft, then all ids of that draft but the last. When the next one
    begins, the rest of the row is pending: two ids after a fully accepted draft, one after any other, more after a
    pause.

    skipped: how many ids of the row's output are in the sequence's prompt. confirmed: how many others the row had when
    the last draft began. final: the positions whose entries are final, whatever the target accepts.
    """

    confirmed = 0
    final = sys.maxsize
    skipped = 0


class ModelDrafts:
    """The rows of a target as sequences of the draft model; each is its row's `state`."""

    def __init__(self, run: Executable, model: Model, target: DraftTarget, chunk: int) -> None:
        self._target, self._model, self._chunk = target, model, chunk
        # A cache whose rows are unknown is padded past a row's ids, up to the length of a draft past the longest row.
        needed = target.max_len + target.longest
        self._length = needed if model.max_seq_len is None else min(needed, model.max_seq_len)
        positions = target.positions + target.rows * target.longest
        self._slots = bounded_slots(model, target.rows, self._length, positions)
        select = target.select
        chooser: TokenSampler = SamplerCache(model.device) if select is None else FunctionSampler(select)
        if model.vocab_size != target.vocab_size:
            run = _FittedRun(run, model.vocab_size, target.vocab_size)
        self._step = self._new_step(run, chooser)

    def _new_step(self, run: Executable, chooser: TokenSampler) -> DecodeStep:
        return DecodeStep(run, self._slots, chooser, self._model.device)

    def _new_sequence(self, row: DraftRow) -> DraftSequence | None:
        """A sequence with the row's ids; None if it cannot be drafted for yet."""
        sequence = DraftSequence(row.prompt, self._length, sampling=row.sampling, salt=row.salt)
        sequence.token_ids = list(row.output)
        return sequence

    def join(self, rows: abc.Sequence[DraftRow]) -> None:
        """Process all ids of these rows but the last."""
        self._slots.set_weights_version(computation(self._model))
        self._prefill([sequence for row in rows if (sequence := self._synced(row)) is not None], 1)

    def leave(self, rows: abc.Sequence[DraftRow]) -> None:
        for row in rows:
            sequence, row.state = row.state, None
            if sequence is not None:
                sequence.computed = min(sequence.computed, sequence.final)
                sequence.release(self._slots)

    def propose(self, rows: abc.Sequence[DraftRow]) -> list[list[int]]:
        sequences = [self._synced(row) for row in rows]
        if drafted := [sequence for sequence in sequences if sequence is not None]:
            # Recurrent states go back over as many positions as one forward may have, so no draft is longer.
            room = self._slots.room([each.slot for each in drafted], [each.computed for each in drafted])
            limit = max(row.limit for row in rows)
            self._draft(drafted, limit if room is None else min(limit, room))
        return [
            [] if sequence is None else sequence.token_ids[sequence.confirmed :][: row.limit]
            for row, sequence in zip(rows, sequences, strict=True)
        ]

    def _synced(self, row: DraftRow) -> DraftSequence | None:
        """The row's sequence with the row's current ids; those that its slot lacks are pending. None without room."""
        sequence: DraftSequence | None = row.state
        length = len(row) + self._target.longest
        if length > self._length:
            self.leave([row])
            return None
        try:
            if sequence is not None:
                if not self._slots.reserve(sequence.slot, length):
                    return None
            else:
                if (sequence := self._new_sequence(row)) is None:
                    return None
                sequence.confirmed, sequence.constraint = len(sequence.token_ids), row.constraint
                if not sequence.acquire(self._slots, length):
                    return None
                row.state = sequence
        except ContextOverflowError:  # more than the whole cache has
            return None
        agreeing, ids, output = sequence.confirmed, sequence.token_ids, row.output[sequence.skipped :]
        while agreeing < min(len(ids), len(output)) and ids[agreeing] == output[agreeing]:
            agreeing += 1
        ids[agreeing:] = output[agreeing:]
        sequence.computed = min(sequence.computed, sequence.final, sequence.output_at + agreeing, sequence.length - 1)
        sequence.confirmed, sequence.history = len(ids), row.history
        self._slots.commit(sequence.slot, sequence.computed, sequence.ids)  # the target's ids are final
        return sequence

    def _draft(self, sequences: abc.Sequence[DraftSequence], count: int) -> None:
        """Append up to `count` ids to each sequence."""
        try:
            self._prefill(sequences, self._chunk)
            running = [sequence for sequence in sequences if sequence.pending <= self._chunk]
            for _ in range(count):
                running = [sequence for sequence in self._advanced(running) if sequence.finish_reason is None]
                if not running:
                    break
        finally:
            for sequence in sequences:
                sequence.reopen()
                sequence.deliver()
                for shared in (sequence.history, sequence.constraint):
                    if shared is not None:
                        shared.truncate(sequence.skipped + sequence.confirmed)

    def _advanced(self, sequences: list[DraftSequence]) -> list[DraftSequence]:
        """Append an id to each sequence. Returns those whose draft may continue."""
        try:
            work = [ScheduledSequence(sequence, sequence.pending) for sequence in sequences]
            emitted = self._step(work)
        except OnwardError as error:
            if len(sequences) > 1:
                return [each for sequence in sequences for each in self._advanced([sequence])]
            # The draft ends here: bans leave no id, or the cache is full. Any other error counts only for the first id:
            # a later one may be past the end of a sequence.
            has_begun = len(sequences[0].token_ids) > sequences[0].confirmed
            if not has_begun and not isinstance(error, NothingToDrawError | ContextOverflowError):
                raise
            return []
        for (sequence, count), tokens in zip(work, emitted, strict=True):
            sequence.take_step(count, tokens, self._slots)
        return sequences

    def _prefill(self, sequences: abc.Sequence[DraftSequence], left: int) -> None:
        """Process pending ids, chunk by chunk, until at most `left` are left. A sequence without room stays behind."""
        slots = self._slots
        while behind := [sequence for sequence in sequences if sequence.pending > left]:
            counts = [min(sequence.pending - left, self._chunk) for sequence in behind]
            work = [
                ScheduledSequence(sequence, slots.max_chunk(sequence.slot, sequence.computed, count))
                for sequence, count in zip(behind, counts, strict=True)
            ]
            try:
                self._step(work)
            except ContextOverflowError:
                if len(behind) > 1:
                    for sequence in behind:
                        self._prefill([sequence], left)
                return
            for item in work:
                item.sequence.take_step(item.tokens, (), slots)
                slots.commit(item.sequence.slot, item.sequence.computed, item.sequence.ids)


class _FittedRun:
    """A run with logits of the target's vocabulary: surplus ids are dropped, missing ids are impossible."""

    def __init__(self, run: Executable, own: int, target: int) -> None:
        self._run, self._own, self._target = run, own, target

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        # The draft model never drafts an id that it lacks, so any other id may replace it in its input.
        logits, _, cache, _ = self._run.step(batch._replace(tokens=batch.tokens.clamp(max=self._own - 1)))
        missing = self._target - self._own
        fitted = logits[..., : self._target]
        if missing > 0:
            fitted = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return StepResult(fitted, None, cache)
