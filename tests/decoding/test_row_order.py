"""Rows of a dense cache in a different order than the work, and rows that move."""

import dataclasses

import pytest
import torch

from onward.decoding import RowCacheManager, SamplerCache, ScheduledSequence, Sequence
from onward.decoding.step import DecodeStep
from onward.models import Run
from onward.sampling import SamplingParams
from onward.testing import scripted_model, tiny_model


@pytest.mark.parametrize("length", [1, 4])
def test_work_in_another_order_than_the_rows_of_a_dense_cache(length):
    model = scripted_model(lambda ids: ids[0] + 10)
    slots = RowCacheManager.allocate(model, 3, 16)
    sequences = [Sequence([first] * length, 4, sampling=SamplingParams(temperature=0)) for first in range(3)]
    for sequence in sequences:
        sequence.slot, _ = slots.acquire(sequence.prompt, sequence.longest)
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(torch.device("cpu")), torch.device("cpu"))
    order = [2, 0, 1]
    emitted = step([ScheduledSequence(sequences[index], length) for index in order])
    assert [token.id for (token,) in emitted] == [index + 10 for index in order]


def test_a_row_moved_within_a_step_keeps_the_entries_of_the_step():
    """A step runs texts of several kinds one after the other, and each may close gaps that others have left."""
    slots = RowCacheManager.allocate(dataclasses.replace(tiny_model(), new_blocks=None), 3, 16)
    first, second, third = (slots.acquire([1], 16)[0] for _ in range(3))
    slots.release(first)
    view = slots.view([third], [0], 2)
    for leaf in (*view.cache.keys, *view.cache.values):
        leaf[0, :, :2] = 7.0
    slots.accept(view, view.cache)
    assert slots.groups([second, third], 1) == [[1, 0]], "in the order of their rows"
    moved = slots.view([third], [2], 1).cache
    assert third.row == 0
    assert all((leaf[0, :, :2] == 7.0).all() for leaf in (*moved.keys, *moved.values))
