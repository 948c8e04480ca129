"""A drafter that decodes with a head over the target's features (`onward.models.heads`)."""

import weakref
from collections import abc

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.decoding.batch import LogitsNeeded, ScheduledSequence
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.speculation.drafter import DraftRow, DraftTarget
from onward.decoding.speculation.model_drafter import DraftSequence, ModelDrafts
from onward.decoding.step import DecodeStep, TokenSampler, positions_of
from onward.errors import RequestError
from onward.models import Model, Run, architecture_of
from onward.models.blocks import Decoder
from onward.models.heads import DraftHead, HeadCache, HeadParams, head_model
from onward.models.heads.head import MAX_TOKENS
from onward.program import Executable, ForwardBatch, SamplingKernel, StepResult

# The most tensors of features that a drafting holds.
_MAX_BUFFERS = 8


class HeadDrafter:
    """A `Drafter` that decodes with an EAGLE-3 or MTP head. `onward.load(…, draft=)` makes it with its target, whose
    cache stores the features that the head reads, so prefixes and sessions bring them along.

    Like a `ModelDrafter` it draws with the target's parameters and noise, and has its own cache: that of one layer.

    head, params: the head and its weights. compile: as in `LanguageModel`.
    """

    def __init__(self, head: DraftHead, params: HeadParams, compile: str = "auto") -> None:
        self.head, self.params, self._compile = head, params, compile
        self._last: tuple[weakref.ref[Model], Run] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without the target's own."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self.params) if isinstance(leaf, Tensor))

    def start(self, target: DraftTarget) -> "_HeadDrafts":
        model = target.model
        decoder = None if model is None else architecture_of(model)
        if model is None or not isinstance(decoder, Decoder) or decoder.cached_taps != self.head.taps:
            raise RequestError(
                f"a head reads the features {', '.join(self.head.taps)} of its model from the cache, and this model "
                "does not store them: load the model with draft="
            )
        last = self._last  # another thread may change it
        if last is None or last[0]() is not model:
            last = self._last = weakref.ref(model), Run(head_model(self.head, self.params, model), self._compile)
        return _HeadDrafts(last[1], target, self.params.ids)


class _HeadSequence(DraftSequence):
    """A row from its second id on: position p has the id at p + 1 of the row, and the features of p.

    row: the row. passed_on: float [D], the features that the head gave itself for the position after the last one
    processed.
    """

    row: DraftRow
    passed_on: Tensor | None = None


class _HeadDrafts(ModelDrafts):
    """The rows of a target as sequences of a head."""

    def __init__(self, run: Run, target: DraftTarget, ids: Tensor | None) -> None:
        self._head_run = _HeadRun(run, ids, target.vocab_size)
        super().__init__(self._head_run, run.model, target, MAX_TOKENS)
        self._slots.shares_rows = False  # each row has features of its own, at one place

    def _new_step(self, run: Executable, chooser: TokenSampler) -> DecodeStep:
        return _HeadStep(self._head_run, self._slots, chooser, self._model.device)

    def _new_sequence(self, row: DraftRow) -> _HeadSequence | None:
        if len(row) < 2:
            return None
        skipped = max(0, 2 - len(row.prompt))
        ids = [*row.prompt[1:], *row.output[:skipped]]
        sequence = _HeadSequence(ids, self._length, sampling=row.sampling, salt=row.salt)
        sequence.row, sequence.skipped, sequence.token_ids = row, skipped, list(row.output[skipped:])
        return sequence


class _HeadRun:
    """Runs a head over the features of the next batch, and keeps what it passes on.

    features: float [B, T, W], of the next step's tokens. passed_on: float [B, T, D], of the last step's.
    """

    def __init__(self, run: Run, ids: Tensor | None, vocab_size: int) -> None:
        self._run, self._ids, self._vocab_size = run, ids, vocab_size
        self._buffers: dict[tuple[int, int, int], Tensor] = {}
        self.features: Tensor | None = None
        self.passed_on: Tensor | None = None

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        assert self.features is not None, "set before each step"
        cache = HeadCache(batch.cache, self._buffer(self.features))
        result = self._run.step(batch._replace(cache=cache, taps=("features",)))
        self.features, self.passed_on = None, result.taps["features"]
        logits = result.logits
        if self._ids is not None:
            of_target = logits.new_full((*logits.shape[:-1], self._vocab_size), float("-inf"))
            of_target[..., self._ids] = logits
            logits = of_target
        return StepResult(logits, None, batch.cache)

    def _buffer(self, features: Tensor) -> Tensor:
        """The features in a tensor of few shapes that stays from step to step, since programs are made for the shapes
        of a cache and bound to its tensors."""
        rows, tokens, width = features.shape
        shape = rows, 1 << (tokens - 1).bit_length(), width
        if shape not in self._buffers:
            if len(self._buffers) >= _MAX_BUFFERS:
                self._buffers.clear()
            dtype = self._run.model.params.norm.dtype  # a cache in another format loads as float32
            self._buffers[shape] = features.new_zeros(shape, dtype=dtype)
        buffer = self._buffers[shape]
        buffer[:, :tokens] = features
        return buffer


class _HeadStep(DecodeStep):
    """Gives the head the features of the tokens that it processes."""

    def __init__(self, run: _HeadRun, slots: CacheManager, chooser: TokenSampler, device: torch.device) -> None:
        super().__init__(run, slots, chooser, device)
        self._head_run = run

    def processed(
        self, items: abc.Sequence[ScheduledSequence], needs: LogitsNeeded, sampler: SamplingKernel | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        run = self._head_run
        run.features = torch.stack([_features(item) for item in items])
        result = super().processed(items, needs, sampler)
        assert run.passed_on is not None
        for row, (sequence, tokens) in enumerate(items):
            assert isinstance(sequence, _HeadSequence)
            if sequence.computed + tokens < len(sequence.row):
                sequence.final = sequence.computed + tokens
            sequence.passed_on = run.passed_on[row, tokens - 1].clone()
        return result

    def choose(self, logits: Tensor, sequences: abc.Sequence[Sequence]) -> Tensor:
        """Chooses with the noise of the target's positions, which are one further."""
        return self.chooser(logits, positions_of(sequences, self.device) + 1, sequences)


def _features(item: ScheduledSequence) -> Tensor:
    """The features of an item's tokens: the target's, or else the head's own for the one token after those."""
    sequence, tokens = item
    assert isinstance(sequence, _HeadSequence)
    first, row = sequence.computed, sequence.row
    if first + tokens < len(row):
        assert row.features is not None, "checked at the start"
        return row.features(first, first + tokens)
    assert tokens == 1, "ids that are drafted follow one by one"
    assert sequence.passed_on is not None, "a position with the target's features precedes"
    return sequence.passed_on.unsqueeze(0)
