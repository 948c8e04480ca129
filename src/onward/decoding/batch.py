"""Model forwards over batches of sequences: which sequences one call serves, and its tokens, offsets and logits.

A sequence processes pending ids: one when it decodes, many during prefill. Sequences that process the same number of
ids run together, so no prompt is padded to another's length. With a paged cache, prompt ids can also run beside
decoding sequences, each as a row of its own that shares the prompt's block table: a layer stores all keys and values
before it reads any, so the result is bit-identical to one row, and the weights are read once for all. If a cache's row
dimension is unknown, all rows run together, padded to the longest; padding is written past a row's ids and never read.
"""

from array import array
from collections import abc
from collections.abc import Iterator, Mapping
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache.slot import CacheView
from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence
from onward.models.contract import check_logits
from onward.program import Executable, ForwardBatch, SamplingKernel, StepResult

# The prompt tokens of one forward. More would be no faster and take more memory.
_MAX_BATCH_TOKENS = 512
# Logits of few rows are padded to at least this number, and to a power of two: each number is a program of its own.
_MIN_LOGITS = 8


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its pending ids to process."""

    sequence: Sequence
    tokens: int


class LogitsNeeded(IntEnum):
    """The processed ids after which logits are needed."""

    NONE = 0
    LAST = 1
    ALL = 2


def needs_of(work: ScheduledSequence) -> LogitsNeeded:
    """The logits after the last id choose the next one; those before it are for missing logprobs."""
    sequence, count = work
    first = sequence.scoring_from
    if first is not None and sequence.computed + count > first:
        return LogitsNeeded.ALL
    return LogitsNeeded.LAST if sequence.finish_reason is None and count == sequence.pending else LogitsNeeded.NONE


def batches(work: abc.Sequence[ScheduledSequence], slots: CacheManager) -> Iterator[tuple[list[int], LogitsNeeded]]:
    """Yield the items that run together, by index, with the logits they need."""
    if len(work) == 1:
        yield [0], needs_of(work[0])
        return
    if slots.whole:
        yield list(range(len(work))), max(map(needs_of, work))
        return
    mixed = _mixed(work) if slots.shares_rows else []
    if mixed:
        yield mixed, LogitsNeeded.LAST
    by_shape: dict[tuple[int, LogitsNeeded], list[int]] = {}
    for index in sorted(set(range(len(work))).difference(mixed)):
        item = work[index]
        # Logits after a single id cost little, so sequences that need none run with the others.
        needs = max(LogitsNeeded.LAST, needs_of(item)) if item.tokens == 1 else needs_of(item)
        by_shape.setdefault((item.tokens, needs), []).append(index)
    for (count, needs), indices in by_shape.items():
        for group in slots.groups([work[index].sequence.slot for index in indices], count):
            rows = len(group) if count == 1 else max(1, _MAX_BATCH_TOKENS // count)
            for first in range(0, len(group), rows):
                yield [indices[place] for place in group[first : first + rows]], needs


def _mixed(work: abc.Sequence[ScheduledSequence]) -> list[int]:
    """The items, by index, whose tokens are each a row of one forward: decoding sequences and prompts beside them.

    Items that need logits come first.
    """
    decoding = [index for index, item in enumerate(work) if item.tokens == 1 and needs_of(item) is LogitsNeeded.LAST]
    if not decoding:
        return []
    tokens, prompts = len(decoding), []
    for index, item in enumerate(work):
        if item.tokens > 1 and needs_of(item) is not LogitsNeeded.ALL and tokens + item.tokens <= _MAX_BATCH_TOKENS:
            prompts.append(index)
            tokens += item.tokens
    return sorted([*decoding, *prompts], key=lambda index: -needs_of(work[index])) if prompts else []


def inputs(
    work: abc.Sequence[ScheduledSequence], slots: CacheManager, device: torch.device, ids: list[list[int]] | None = None
) -> tuple[ForwardBatch, CacheView]:
    """The batch of these items, and each item's row. ids: the ids of each item, by default its pending ones."""
    if ids is None:
        ids = [sequence.ids(sequence.computed, sequence.computed + tokens) for sequence, tokens in work]
    offsets = [sequence.computed for sequence, _ in work]
    longest = max(map(len, ids))
    item_slots = [sequence.slot for sequence, _ in work]
    view = slots.view(item_slots, offsets, longest)
    # Any valid id works as padding.
    rows = [row if len(row) == longest else [*row, *[row[-1]] * (longest - len(row))] for row in ids]
    if view.offsets is not None:
        all_offsets = list(view.offsets)
        all_rows = [[0] * longest] * len(all_offsets)
        for place, row, offset in zip(view.rows, rows, offsets, strict=True):
            all_rows[place], all_offsets[place] = row, offset
        rows, offsets = all_rows, all_offsets
    tokens = _int32(chain.from_iterable(rows), device).view(len(rows), longest)
    return ForwardBatch(tokens, _int32(offsets, device), view.cache), view


def _int32(values: abc.Iterable[int], device: torch.device) -> Tensor:
    """A new tensor [N]; `torch.tensor` takes three times as long for one value."""
    host = torch.frombuffer(array("i", values), dtype=torch.int32)
    return host if device.type == "cpu" else host.to(device)


def forward(
    run: Executable,
    slots: CacheManager,
    batch: ForwardBatch,
    view: CacheView,
    work: abc.Sequence[ScheduledSequence],
    sampler: SamplingKernel | None = None,
) -> StepResult:
    """Run the batch of these items, check the shape of its logits, keep its cache, and give the items the values at the
    taps that they read."""
    batch = batch._replace(taps=_taps_of(work))
    result = run.step(batch, sampler)
    shape = (batch.tokens if batch.logits_at is None else batch.logits_at).shape
    if result.logits.shape[:-1] != shape:
        check_logits(result.logits, shape)
    slots.accept(view, result.cache)
    has_row_of_each = len(view.rows) == len(work)  # otherwise each id has one
    for row, item in zip(view.rows, work, strict=True) if batch.taps and has_row_of_each else ():
        _stage(item, row, result.taps)
    return result


def processed(
    run: Executable,
    slots: CacheManager,
    work: abc.Sequence[ScheduledSequence],
    needs: LogitsNeeded,
    device: torch.device,
    sampler: SamplingKernel | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Process items together, with the slots' lock. sampler: for items that all decode one id.

    Returns:
        The items' logits: [N, T, V] if all are needed, [N, 1, V] after each item's last id, or None if none are needed.
        Mixed batches return only the logits of the items that need them. And the ids int64 [N] that were sampled, if
        the run could.
    """
    with slots.lock:
        if len({count for _, count in work}) > 1 and slots.shares_rows:
            return _processed_as_rows(run, slots, work, device), None
        batch, view = inputs(work, slots, device)
        if needs is not LogitsNeeded.ALL and batch.tokens.shape[1] > 1:
            last = [0] * len(batch.tokens)
            for row, (_, count) in zip(view.rows, work, strict=True):
                last[row] = count - 1
            at = torch.tensor(last, dtype=torch.int64, device=device).unsqueeze(1)
            batch = batch._replace(logits_at=at[:, : int(needs)])
        # The kernel takes all rows of the cache.
        logits, ids, *_ = forward(run, slots, batch, view, work, sampler if view.offsets is None else None)
    return (view.select(logits) if needs else None), ids


def _taps_of(work: abc.Sequence[ScheduledSequence]) -> tuple[str, ...]:
    """The taps that any of these items reads."""
    if all(item.sequence.capture is None for item in work):
        return ()
    return tuple(sorted({name for item in work for name in _names(item)}))


def _names(item: ScheduledSequence) -> list[str]:
    sequence, count = item
    return [] if sequence.capture is None else sequence.capture.names(sequence.computed, count)


def _stage(item: ScheduledSequence, rows: Any, taps: Mapping[str, Tensor]) -> None:
    """Give an item its values [count, ...] at the taps that it reads. rows: its index, or indices, in their values."""
    sequence, count = item
    if sequence.capture is not None and (names := _names(item)):
        sequence.capture.stage(sequence.computed, {name: taps[name][rows][:count] for name in names})


def _processed_as_rows(
    run: Executable, slots: CacheManager, work: abc.Sequence[ScheduledSequence], device: torch.device
) -> Tensor:
    """Process every id as a row of its own. The rows whose logits are needed come first."""
    needing = [item for item in work if needs_of(item) is LogitsNeeded.LAST]
    spans = [(sequence, sequence.computed + count - 1, 1) for sequence, count in needing]  # (sequence, first, count)
    spans += [(sequence, sequence.computed, count - 1) for sequence, count in needing if count > 1]
    spans += [(sequence, sequence.computed, count) for sequence, count in work[len(needing) :]]
    ids = [token for sequence, first, count in spans for token in sequence.ids(first, first + count)]
    row_sequences = [sequence for sequence, _, count in spans for _ in range(count)]
    row_slots = [sequence.slot for sequence in row_sequences]
    offsets = [position for _, first, count in spans for position in range(first, first + count)]
    view = slots.view(row_slots, offsets, 1)
    rows = max(_MIN_LOGITS, 1 << (len(needing) - 1).bit_length())
    batch = ForwardBatch(
        _int32(ids, device).unsqueeze(1),
        _int32(offsets, device),
        view.cache,
        torch.zeros(rows, 1, dtype=torch.int64, device=device) if rows < len(ids) else None,
    )
    result = forward(run, slots, batch, view, work)
    for item in work if result.taps else ():
        rows_of = [row for row, sequence in enumerate(row_sequences) if sequence is item.sequence]
        by_position = {name: values[:, 0] for name, values in result.taps.items()}
        _stage(item, sorted(rows_of, key=offsets.__getitem__), by_position)
    return result.logits[: len(needing)]
