"""Forwards over sequences: which of them one call of the model serves, and its tokens, offsets and logits.

A sequence processes pending ids: one when it decodes, many of a prompt. Sequences that process equally many run
together, so that no prompt is padded to another's length. Over blocks a prompt's ids may also run beside those that
decode, each as a row of its own that names the prompt's blocks: a layer stores all keys and values before it reads
them, so the bits are those of the prompt as one row, and the weights are read once for all. Where a cache does not
show its rows, all run together, padded to the longest; what padding writes lies past a row's own ids, where nothing is
read.
"""

from collections import abc
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward.cache.slot import CacheView
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.models import Cache
from onward.models.contract import check_logits
from onward.program import SamplingKernel

# The most tokens of prompts that one forward takes together. More would be no faster, and take more memory.
_MOST_TOGETHER = 512
# Logits of few rows are taken of so many at least, and of a power of two: each number of them is a program.
_LEAST_LOGITS = 8


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its pending ids to process: so many tokens."""

    sequence: Sequence
    tokens: int


class Run(Protocol):
    """A model with its weights: `onward.models.ModelRun`, a `Model`, or a user's forward bound to its params."""

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]: ...


@runtime_checkable
class PickingRun(Run, Protocol):
    """A `Run` that can process one token a row and pick the next from its logits [B, 1, V], both in one call.

    `picked` returns None for the ids where it could only process.
    """

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]: ...


class LogitsNeeded(IntEnum):
    """At which of the processed ids the logits are wanted."""

    NONE = 0
    LAST = 1
    ALL = 2


def needs_of(work: ScheduledSequence) -> LogitsNeeded:
    """The logits after a text's last id choose the next one; those before it are for logprobs that are missing."""
    sequence, count = work
    first = sequence.scoring_from
    if first is not None and sequence.computed + count > first:
        return LogitsNeeded.ALL
    return LogitsNeeded.LAST if sequence.finish_reason is None and count == sequence.pending else LogitsNeeded.NONE


def batches(work: abc.Sequence[ScheduledSequence], slots: CacheManager) -> Iterator[tuple[list[int], LogitsNeeded]]:
    """The items of work, by index, that run together, and which logits they need."""
    if len(work) == 1:
        yield [0], needs_of(work[0])
        return
    if slots.whole:
        yield list(range(len(work))), max(map(needs_of, work))
        return
    mixed = _mixed(work) if slots.shares_rows else []
    if mixed:
        yield mixed, LogitsNeeded.LAST
    together = set(mixed)
    by_shape: dict[tuple[int, LogitsNeeded], list[int]] = {}
    for index, item in enumerate(work):
        if index in together:
            continue
        # The logits after a single id cost little, so those that need none run with the others.
        needs = max(LogitsNeeded.LAST, needs_of(item)) if item.tokens == 1 else needs_of(item)
        by_shape.setdefault((item.tokens, needs), []).append(index)
    for (count, needs), indices in by_shape.items():
        for group in slots.groups([work[index].sequence.slot for index in indices], count):
            rows = len(group) if count == 1 else max(1, _MOST_TOGETHER // count)
            for first in range(0, len(group), rows):
                yield [indices[place] for place in group[first : first + rows]], needs


def _mixed(work: abc.Sequence[ScheduledSequence]) -> list[int]:
    """The items, by index, of which each token is a row of one forward: those that decode, and prompts beside them.

    Those that need logits come first.
    """
    decoding = [index for index, item in enumerate(work) if item.tokens == 1 and needs_of(item) is LogitsNeeded.LAST]
    if not decoding:
        return []
    tokens, prompts = len(decoding), []
    for index, item in enumerate(work):
        if item.tokens > 1 and needs_of(item) is not LogitsNeeded.ALL and tokens + item.tokens <= _MOST_TOGETHER:
            prompts.append(index)
            tokens += item.tokens
    return sorted([*decoding, *prompts], key=lambda index: -needs_of(work[index])) if prompts else []


class ForwardBatch(NamedTuple):
    """tokens: int32 [B, T]. offsets: int32 [B]. rows: the row of each item; view: the cache."""

    tokens: Tensor
    offsets: Tensor
    view: CacheView

    @property
    def all_rows(self) -> bool:
        """Whether every row of the cache is one of the items', in order."""
        return self.view.offsets is None

    def of_items(self, x: Tensor) -> Tensor:
        """The rows [N, …] of the items out of those [B, …] of the cache."""
        return x if self.all_rows else x[list(self.view.rows)]


def inputs(
    work: abc.Sequence[ScheduledSequence],
    slots: CacheManager,
    device: torch.device,
    ids: list[list[int]] | None = None,
) -> ForwardBatch:
    """What a forward gets for items of work. ids: those of each item, where they are not its pending ones."""
    if ids is None:
        ids = [sequence.ids(sequence.computed, sequence.computed + tokens) for sequence, tokens in work]
    offsets = [sequence.computed for sequence, _ in work]
    longest = max(map(len, ids))
    of_rows = [sequence.slot for sequence, _ in work]
    slots.ensure_writable(of_rows, offsets, longest)
    view = slots.view_of(of_rows, longest)
    # Any valid id does as padding; the last is one.
    rows = [
        of_item if len(of_item) == longest else [*of_item, *[of_item[-1]] * (longest - len(of_item))] for of_item in ids
    ]
    if view.offsets is not None:
        all_offsets = list(view.offsets)
        all_rows = [[0] * longest] * len(all_offsets)
        for row, of_item, offset in zip(view.rows, rows, offsets, strict=True):
            all_rows[row], all_offsets[row] = of_item, offset
        rows, offsets = all_rows, all_offsets
    return ForwardBatch(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(offsets, dtype=torch.int32, device=device),
        view,
    )


def forward(run: Run, slots: CacheManager, given: ForwardBatch, logits_at: Tensor | None) -> Tensor:
    """Call the model, check that its logits have the shape of the contract, and keep its cache."""
    logits, cache = run(given.tokens, given.offsets, given.view.cache, logits_at)
    check_logits(logits, given.tokens.shape if logits_at is None else logits_at.shape)
    slots.check_written(given.view, cache)
    return logits


def processed(
    run: Run, slots: CacheManager, work: abc.Sequence[ScheduledSequence], needs: LogitsNeeded, device: torch.device
) -> Tensor | None:
    """Process items together. Returns their logits: [N, T, V] if all are needed, else [N, 1, V] after each item's last
    id; None where none are needed. The caller holds the slots' lock.

    Items of `_mixed` come in its order, and the logits are those of the items that need them.
    """
    if len({count for _, count in work}) > 1 and slots.shares_rows:
        return _rows_processed(run, slots, work, device)
    given = inputs(work, slots, device)
    if needs is LogitsNeeded.ALL or given.tokens.shape[1] == 1:
        logits = forward(run, slots, given, None)
    else:
        last = [0] * len(given.tokens)
        for row, (_, count) in zip(given.view.rows, work, strict=True):
            last[row] = count - 1
        at = torch.tensor(last, dtype=torch.int64, device=device).unsqueeze(1)
        logits = forward(run, slots, given, at[:, : int(needs)])
    return given.of_items(logits) if needs else None


def _rows_processed(
    run: Run, slots: CacheManager, work: abc.Sequence[ScheduledSequence], device: torch.device
) -> Tensor:
    """Process every id of the items as a row of its own. The rows whose logits are needed come first."""
    needing = [item for item in work if needs_of(item) is LogitsNeeded.LAST]
    runs = [(sequence, sequence.computed + count - 1, 1) for sequence, count in needing]  # (sequence, first, count)
    runs += [(sequence, sequence.computed, count - 1) for sequence, count in needing if count > 1]
    runs += [(sequence, sequence.computed, count) for sequence, count in work[len(needing) :]]
    ids = [token for sequence, first, count in runs for token in sequence.ids(first, first + count)]
    of_rows = [sequence.slot for sequence, _, count in runs for _ in range(count)]
    offsets = [position for _, first, count in runs for position in range(first, first + count)]
    slots.ensure_writable(of_rows, offsets, 1)
    view = slots.view_of(of_rows, 1)
    given = ForwardBatch(
        torch.tensor(ids, dtype=torch.int32, device=device).unsqueeze(1),
        torch.tensor(offsets, dtype=torch.int32, device=device),
        view,
    )
    wanted = max(_LEAST_LOGITS, 1 << (len(needing) - 1).bit_length())
    at = torch.zeros(wanted, 1, dtype=torch.int64, device=device) if wanted < len(ids) else None
    return forward(run, slots, given, at)[: len(needing)]
