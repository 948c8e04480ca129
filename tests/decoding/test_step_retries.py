"""A failed step leaves the sequences unchanged: its work can be repeated, whole or in parts."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.decoding import (
    BatchSchedule,
    BeamOptions,
    BeamSearch,
    BeamStep,
    DecodeStep,
    RowCacheManager,
    SamplerCache,
    Sequence,
    decode_loop,
)
from onward.decoding.speculation import ModelDrafter, PromptLookup, Speculator
from onward.models import Run
from onward.sampling import SamplingParams
from onward.testing import scripted_model

CPU = torch.device("cpu")
VOCAB = 8


def logits(tokens: list[int]) -> torch.Tensor:
    """Of the last three ids, so that texts repeat themselves and lookups find something."""
    key = sum((token + 1) * 13**at for at, token in enumerate(tokens[-1:-4:-1])) % 997
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))


class Failing:
    """A run that fails every so often, before or after the model has run, while `often` is above 0."""

    def __init__(self, model, seed: int) -> None:
        self.run, self.rng, self.often, self.failures = Run(model), random.Random(seed), 0.0, 0

    def step(self, *arguments):
        fails, early = self.rng.random() < self.often, self.rng.random() < 0.5
        if fails and early:
            self._fail()
        result = self.run.step(*arguments)
        if fails:
            self._fail()
        return result

    def _fail(self) -> None:
        self.failures += 1
        raise RuntimeError("out of memory")


def tried(step, run: Failing, work) -> list:
    """The step, or its halves where it fails; a part of one item is tried until it does not."""
    run.often = 0.4
    try:
        return step(work)
    except RuntimeError:
        if len(work) == 1:
            return tried(step, run, work)
        half = len(work) // 2
        return [*tried(step, run, work[:half]), *tried(step, run, work[half:])]


def outcome(kind: str, prompts, seed: int | None) -> tuple[list, int]:
    """All that the texts say; and how many forwards failed. seed: of the failures; None for none."""
    model = scripted_model(logits, vocab_size=VOCAB)
    run = Failing(model, seed or 0)
    params = [
        SamplingParams(temperature=1.0, seed=at, repetition_penalty=1.2) if at % 2 else SamplingParams(eos=(0,))
        for at in range(len(prompts))
    ]
    options = {"top_logprobs": 1, "prompt_top": 0}
    if kind == "beams":
        sequences = [BeamSearch(BeamOptions(2), prompt, 6, {0}, sampling=params[0], **options) for prompt in prompts]
    else:
        sequences = [Sequence(p, 9, {0}, sampling=of_row, **options) for p, of_row in zip(prompts, params, strict=True)]
    slots = RowCacheManager.allocate(model, 2 * len(prompts), 24)
    chooser = SamplerCache(CPU)
    step = DecodeStep(run, slots, chooser, CPU)
    if kind == "beams":
        step = BeamStep(step)
    elif kind != "plain":
        drafter = PromptLookup(1) if kind == "lookup" else ModelDrafter(model, "eager")
        speculator = Speculator(drafter, length=3)
        step = speculator.step(step, chooser, model, rows=len(sequences), max_len=24)
        step.join(sequences)

    def may_fail(work):
        return step(work) if seed is None else tried(step, run, work)

    for _ in decode_loop(may_fail, BatchSchedule(slots, sequences, 2, vocab_size=VOCAB), slots):
        pass
    texts = [(each.token_ids, each.finish_reason, each.logprobs, each.prompt_logprobs) for each in sequences]
    return texts, run.failures


@pytest.mark.parametrize("kind", ["plain", "lookup", "draft model", "beams"])
@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 2**32)
)
def test_a_step_retried_in_parts_gives_the_same_tokens(kind, prompts, seed):
    assert outcome(kind, prompts, seed)[0] == outcome(kind, prompts, None)[0]


def test_the_forwards_of_this_test_do_fail():
    assert outcome("plain", [[1, 2, 3], [4], [5, 6]], 1)[1] > 3
