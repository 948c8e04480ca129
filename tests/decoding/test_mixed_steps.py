"""Prompts processed together with decoding sequences: one forward, with the tokens and cache of separate runs."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_accounts import check_accounts
from onward import native
from onward.cache.manager import PagedCacheManager
from onward.decoding import SamplerCache, ScheduledSequence, Sequence
from onward.decoding.step import DecodeStep
from onward.models import Model, Run
from onward.models.linear import pack_params
from onward.sampling import SamplingParams
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
CPU = torch.device("cpu")


def packed(dtype: torch.dtype) -> Model:
    """With weights whose products have the same bits in every batch, as `onward.load` makes them."""
    model = tiny_model("qwen3", dtype=dtype)
    return dataclasses.replace(model, params=pack_params(model.params))


MODELS = {dtype: packed(dtype) for dtype in (torch.float32, torch.bfloat16)}
RUNS = {(dtype, kind): Run(model, kind) for dtype, model in MODELS.items() for kind in ("auto", "eager")}


class Watched:
    """A run that notes the shape of every forward, and that of the logits it returned."""

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.model
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def step(self, batch, sampler=None):
        result = self.run.step(batch, sampler)
        self.shapes.append((tuple(batch.tokens.shape), tuple(result.logits.shape[:2])))
        return result


def begun(slots: PagedCacheManager, prompts: list[list[int]], seed: int) -> list[Sequence]:
    sequences = [Sequence(prompt, 20, sampling=SamplingParams(seed=seed + at)) for at, prompt in enumerate(prompts)]
    for sequence in sequences:
        sequence.slot, _ = slots.acquire(sequence.prompt, sequence.longest)
    return sequences


def paged(model: Model) -> PagedCacheManager:
    return PagedCacheManager(model.new_blocks(40), max_len=256, cached_blocks=0)


def advance(step: DecodeStep, work: list[ScheduledSequence]) -> None:
    for item, tokens in zip(work, step(work), strict=True):
        item.sequence.take_step(item.tokens, tokens, step.slots)


def cached_rows(slots: PagedCacheManager, sequence: Sequence) -> list[torch.Tensor]:
    cache = slots.read(sequence.slot, sequence.computed)
    return [*cache.keys, *cache.values]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 150), min_size=2, max_size=5),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(list(MODELS)),
    kind=st.sampled_from(["auto", "eager"]),
)
def test_chunks_in_decoding_steps_have_the_bits_of_each_alone(lengths, seed, dtype, kind):
    model, run, chance = MODELS[dtype], RUNS[dtype, kind], random.Random(seed)
    prompts = [[chance.randrange(model.vocab_size) for _ in range(length)] for length in lengths]
    together, alone = paged(model), paged(model)
    step = DecodeStep(run, together, SamplerCache(CPU), CPU)
    sequences = begun(together, prompts, seed)
    for _ in range(12):
        going = [sequence for sequence in sequences if chance.random() < 0.9]
        work = [
            ScheduledSequence(each, each.pending if each.has_begun else chance.randint(1, each.pending))
            for each in going
        ]
        if work:
            advance(step, work)
    for at, sequence in enumerate(sequences):
        solo = DecodeStep(run, alone, SamplerCache(CPU), CPU)
        (other,) = begun(alone, prompts[at : at + 1], seed + at)
        while len(other.token_ids) < len(sequence.token_ids):
            advance(solo, [ScheduledSequence(other, other.pending)])
        assert other.token_ids == sequence.token_ids
        both = min(sequence.computed, other.computed)
        for mixed, plain in zip(cached_rows(together, sequence), cached_rows(alone, other), strict=True):
            assert torch.equal(mixed[:, :, :both], plain[:, :, :both])
    check_accounts(together)


def test_one_forward_reads_the_weights_for_all_rows():
    model = MODELS[torch.float32]
    run, slots = Watched(RUNS[torch.float32, "auto"]), paged(model)
    step = DecodeStep(run, slots, SamplerCache(CPU), CPU)
    decoding, ending, going_on = begun(slots, [[1, 2], [3] * 30, [4] * 200], 0)
    advance(step, [ScheduledSequence(decoding, 2)])
    run.shapes.clear()
    advance(step, [ScheduledSequence(going_on, 100), ScheduledSequence(decoding, 1), ScheduledSequence(ending, 30)])
    assert run.shapes == [((131, 1), (8, 1))], "logits of two rows, and of as many more as make a power of two"
    assert [len(each.token_ids) for each in (decoding, ending, going_on)] == [2, 1, 0]


@pytest.mark.parametrize("prompts", [[[1] * 9, [2] * 9], [[1] * 9]])
def test_prompts_without_decoding_rows_stay_rows_of_many_tokens(prompts):
    model = MODELS[torch.float32]
    run, slots = Watched(RUNS[torch.float32, "auto"]), paged(model)
    step = DecodeStep(run, slots, SamplerCache(CPU), CPU)
    advance(step, [ScheduledSequence(sequence, 9) for sequence in begun(slots, prompts, 0)])
    assert [shape for shape, _ in run.shapes] == [(len(prompts), 9)]
