"""Objects that outlive a request and wait for the next one don't keep its sequences alive."""

import gc
import time
import weakref

import pytest

from onward import LanguageModel, Speculator
from onward.decoding import SamplerCache, Sequence, StepRouter, slots_for
from onward.decoding.speculation import ModelDrafter, SuffixLookup
from onward.engine import Engine
from onward.sampling import SamplingParams
from onward.testing import ByteTokenizer, tiny_model

MODEL = tiny_model(seed=3)
SECONDS = 60  # a wait that takes longer never ends
KINDS = {
    "plain": {"temperature": 1.0, "seed": 1},
    "penalties": {"temperature": 1.0, "seed": 1, "presence_penalty": 1.0, "logprobs": 2},
    "several": {"temperature": 1.0, "seed": 1, "n": 3},
    "beams": {"beams": 3},
    "constraint": {"choice": ["one", "two", "three"]},
    "lookup": {"draft": "lookup"},
    "suffix": {"draft": Speculator(SuffixLookup(), length=3)},
    "model": {"draft": Speculator(ModelDrafter(MODEL), length=3), "temperature": 1.0, "seed": 1},
}


@pytest.fixture
def sequences(monkeypatch):
    """Weak references to all sequences that are made."""
    made, before = [], Sequence.__init__

    def noted(self, *arguments, **options):
        before(self, *arguments, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Sequence, "__init__", noted)
    return made


def alive(sequences):
    gc.collect()
    return [sequence() for sequence in sequences if sequence() is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_engine_references_no_request(kind, sequences):
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    with Engine(lm, max_sequences=8) as engine:
        engine.submit("Once upon a time", max_new_tokens=12, **KINDS[kind]).result(SECONDS)
        engine.submit("another", max_new_tokens=1).cancel()
        while (stats := engine.stats()).running or stats.waiting:
            time.sleep(0.001)
        # The thread waits for work: what it holds now it holds for as long as nothing comes.
        while engine.seconds_since_step:
            time.sleep(0.001)
        assert sequences
        assert not alive(sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_references_no_call(kind, sequences):
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    lm.generate("Once upon a time", max_new_tokens=12, **KINDS[kind])
    assert sequences
    assert not alive(sequences)


def test_the_sampler_cache_references_no_ended_sequence(sequences):
    chooser = SamplerCache(MODEL.device)
    texts = [Sequence([1], 4, sampling=SamplingParams(temperature=1.0)) for _ in range(3)]
    sampler = chooser.sampler(texts)
    assert chooser.sampler(list(texts)) is sampler, "its seeds are drawn once"
    assert chooser.sampler(texts[:2]) is not sampler
    assert chooser.sampler(texts[::-1]) is not chooser.sampler(texts)
    del texts
    assert not alive(sequences)


def test_steps_reference_no_ended_sequence(sequences):
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    steps = StepRouter(lm._model_run, slots_for(MODEL, 4, 64), rows=4, max_len=64)
    texts = [Sequence([1], 4, sampling=SamplingParams()) for _ in range(3)]
    steps.join(texts, Speculator("lookup"))
    del texts
    assert not alive(sequences)
