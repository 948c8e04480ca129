"""Drafts of any length, accepted as far as they are right, in a cache that is given out bit by bit."""

import pytest
from checked_engine import CheckedEngine

from onward import LanguageModel, Speculator
from onward.ops.heads import BLOCK
from onward.testing import ByteTokenizer, tiny_model

MODEL = tiny_model(seed=7)
LM = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
BLOCK_BYTES = MODEL.new_blocks(1).block_nbytes
SECONDS = 60  # a wait that takes longer never ends
PROMPT = "a prompt that ends near the end of a block of its cache"
SAMPLED = {"max_new_tokens": 170, "temperature": 1.0, "logprobs": 1}


class Prediction:
    """A drafter that knows the text but for every `wrong`-th id."""

    def __init__(self, ids, wrong):
        self.ids, self.wrong = ids, wrong

    def start(self, request):
        return self

    def propose(self, rows):
        return [[self.guess(len(row.output) + at) for at in range(row.wanted)] for row in rows]

    def guess(self, at):
        return 0 if at % self.wrong == self.wrong - 1 or at >= len(self.ids) else self.ids[at]


@pytest.mark.parametrize("length", [None, 15, 17, 40, 150])
def test_a_draft_finds_room_however_long_it_is(length):
    """A text that is given blocks as it grows (`overcommit`) has them before a draft is written, and preempted texts
    begin again."""
    assert len(PROMPT) % BLOCK > BLOCK // 2
    alone = [LM.generate(PROMPT, seed=seed, **SAMPLED) for seed in range(3)]
    with CheckedEngine(LM, max_sequences=3, cache_memory=7 * BLOCK_BYTES, overcommit=100.0) as engine:
        generations = []
        for seed, (right, wrong) in enumerate(zip(alone, (7, 45, 1000), strict=True)):
            draft = Speculator(Prediction(right.token_ids, wrong), length=length)
            generations.append(engine.submit(PROMPT, seed=seed, draft=draft, **SAMPLED))
        for generation, right in zip(generations, alone, strict=True):
            completion = generation.result(SECONDS)
            assert (completion.token_ids, completion.logprobs) == (right.token_ids, right.logprobs)
            assert length is None or completion.speculation.rounds
    engine.check()
