"""Speculation between any two inferencers, which need only `prefill` and truncation of their caches."""

import pytest
import torch

from onward.errors import RequestError
from onward.inferencer import FilledCache, ModelInferencer, PrefillOutput, speculate
from onward.sampling import Sampler, SamplingParams, greedy
from onward.testing import scripted_model, tiny_model

PROMPTS = torch.tensor([[1, 2, 3], [7, 8, 9]])


def plain(inferencer, strategy, new, prompts=PROMPTS):
    """The output of prefill and decode."""
    kv = inferencer.new_cache(len(prompts), prompts.shape[1] + new)
    first = inferencer.prefill(prompts, kv, strategy).token_ids
    return torch.cat((first, inferencer.decode(first, kv, new - 1, strategy).token_ids), 1)


def sampler():
    return Sampler([SamplingParams(temperature=0.9, top_p=0.9, seed=seed) for seed in (1, 2)])


@pytest.mark.parametrize("strategy", [lambda: greedy, sampler], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [None, 1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_speculated_equals_the_target_alone(strategy, length, seed):
    target, drafter = ModelInferencer(tiny_model()), ModelInferencer(tiny_model(seed=seed))
    expected = plain(target, strategy(), 20)
    found = speculate(target, drafter, PROMPTS, 20, strategy(), length=length)
    assert torch.equal(found.token_ids, expected)
    if length is not None:
        assert (found.speculation[0].acceptance == 1) == (seed == 0)


class Counter:
    """A custom inferencer: it generates the next number, and records its inputs."""

    def __init__(self, vocab, step=1):
        self.vocab, self.step, self.calls = vocab, step, []

    def new_cache(self, batch, max_len):
        return FilledCache(torch.zeros(batch, max_len, dtype=torch.long), torch.zeros(batch, dtype=torch.int32))

    def prefill(self, query_token_ids, kv_cache, sample_strategy):
        self.calls.append((kv_cache.lengths.tolist(), query_token_ids.tolist()))
        kv_cache.lengths = kv_cache.lengths + query_token_ids.shape[1]
        following = (query_token_ids.long() + self.step) % 32
        logits = torch.nn.functional.one_hot(following, self.vocab).float()
        return PrefillOutput(sample_strategy(logits[:, -1]).unsqueeze(1), logits)

    def decode(self, query_token_ids, kv_cache, max_new_tokens, sample_strategy):
        raise AssertionError("not asked for")


def test_inferencers_of_any_kind_and_of_other_vocabularies():
    target, drafter = Counter(32), Counter(40)
    found = speculate(target, drafter, torch.tensor([[1, 2], [4, 5]]), 11, length=4)
    assert found.token_ids.tolist() == [list(range(3, 14)), list(range(6, 17))]
    assert [each.accepted for each in found.speculation] == [8, 8]
    # One id to learn the vocabulary's size, the prompt, two rounds; lengths are those of the cache.
    assert [(lengths, len(ids[0])) for lengths, ids in target.calls] == [
        ([0], 1),
        ([0, 0], 2),
        ([2, 2], 5),
        ([7, 7], 5),
    ]
    assert speculate(target, Counter(32, step=5), PROMPTS, 9, length=3).token_ids[0].tolist() == list(range(4, 13))


def test_rows_end_independently():
    found = speculate(Counter(32), Counter(32), torch.tensor([[1], [5]]), 10, eos=(4, 12), length=3)
    assert found.token_ids.tolist() == [[2, 3, 4, 4, 4, 4, 4], [6, 7, 8, 9, 10, 11, 12]]


def test_a_sampler_that_looks_back_gets_its_histories():
    target = ModelInferencer(scripted_model(lambda tokens: (tokens[-1] + 1) % 4, vocab_size=8))
    once = Sampler([SamplingParams(no_repeat_ngram_size=1)])
    ids = speculate(target, target, torch.tensor([[0]]), 7, once, length=4).token_ids
    assert sorted(ids[0].tolist()) == [1, 2, 3, 4, 5, 6, 7]


def test_invalid_arguments_of_speculate():
    target = ModelInferencer(scripted_model([1]))
    with pytest.raises(RequestError, match="max_new_tokens must be a whole number of 1 or more; got 0"):
        speculate(target, target, PROMPTS, 0)
    for options in ({"temperature": 1.0}, {"repetition_penalty": 1.1}):
        with pytest.raises(RequestError, match="the sampler has 1 rows, but 2 are needed: create one with 2 rows"):
            speculate(target, target, PROMPTS, 3, Sampler([SamplingParams(**options)]))
    with pytest.raises(RequestError, match=r"prompts as whole numbers \[B, T\].*float32"):
        speculate(target, target, PROMPTS.float(), 3)


def test_a_drafter_with_a_shorter_context_drafts_up_to_its_end():
    target = ModelInferencer(scripted_model(lambda tokens: (tokens[-1] + 1) % 32))
    short = ModelInferencer(scripted_model(lambda tokens: (tokens[-1] + 1) % 32, max_seq_len=12))
    found = speculate(target, short, PROMPTS, 20, length=4)
    assert torch.equal(found.token_ids, plain(target, greedy, 20))
    assert 0 < found.speculation[0].accepted < 12
