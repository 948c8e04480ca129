"""Bias, penalties and bans with literal numbers, compared with transformers if it has them; DRY with its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from onward import Sampler, SamplingParams
from onward.sampling import History
from onward.sampling.transforms.bad_words import word_ends
from onward.sampling.transforms.dry import dry_penalties
from onward.sampling.transforms.no_repeat_ngram import ngram_ends

INF = math.inf
VOCAB = 8
token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def adjusted(logits, prompt=(), output=(), **options) -> list[float]:
    """Logits in, logits out: at temperature 1 scores are logits less the largest, which is put back."""
    sampler = Sampler([SamplingParams(seed=0, temperature=1.0, **options)])
    return sampler._adjust(torch.tensor([[logits]]), [History(prompt, output)], None)[0, 0].tolist()


FOUR = [2.0, -1.0, 0.0, 4.0]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, FOUR),
        ({"logit_bias": {0: 1.5, 3: -INF}}, [3.5, -1.0, 0.0, -INF]),
        # Prompt and output: 0, 1 and 2. Positive logits are divided, the others multiplied.
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.0, 4.0]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 0.0, 4.0]),
        # The output alone: 1 twice, 2 once.
        ({"presence_penalty": 0.5}, [2.0, -1.5, -0.5, 4.0]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, -0.5, 4.0]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [2.0, -0.5, 0.75, 4.0]),
        # Bias comes first, then repetition on its result, then presence.
        ({"logit_bias": {0: -4.0}, "repetition_penalty": 2.0}, [-4.0, -2.0, 0.0, 4.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [1.0, -3.0, -1.0, 4.0]),
        # The text is 0 1 2 1: before it, 1 was followed by 2.
        ({"no_repeat_ngram_size": 2}, [2.0, -1.0, -INF, 4.0]),
        ({"no_repeat_ngram_size": 1}, [-INF, -INF, -INF, 4.0]),
        ({"no_repeat_ngram_size": 3}, FOUR),
        ({"dry_multiplier": 0.5, "dry_allowed_length": 1}, [2.0, -1.0, -0.5, 4.0]),
        ({"dry_multiplier": 0.5}, FOUR),
        ({"bad_words": [[3], [1, 0], [0, 1]]}, [-INF, -1.0, 0.0, -INF]),
        ({"min_new_tokens": 4, "eos": [3, 0]}, [-INF, -1.0, 0.0, -INF]),
        ({"min_new_tokens": 3, "eos": [3, 0]}, FOUR),
        ({"min_new_tokens": 4, "eos": [3, 0], "ignore_eos": True}, FOUR),
        ({"min_new_tokens": 4}, FOUR),
    ],
    ids=str,
)
def test_logits_after_a_prompt_of_0_and_an_output_of_1_2_1(options, want):
    assert adjusted(FOUR, prompt=[0], output=[1, 2, 1], **options) == want


# ── transformers ──────────────────────────────────────────────────────────────────────────────────────────


def both(processor, ids: list[int], **options) -> tuple[list[float], list[float]]:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(ids))).tolist()
    cut = len(ids) // 2
    return adjusted(logits, ids[:cut], ids[cut:], **options), processor(
        torch.tensor([ids]), torch.tensor([logits])
    )[0].tolist()  # fmt: skip


@given(ids=token_lists, penalty=st.sampled_from([0.3, 1.05, 1.3, 7.0]))
def test_repetition_penalty_equals_transformers(ids, penalty):
    ours, theirs = both(RepetitionPenaltyLogitsProcessor(penalty), ids, repetition_penalty=penalty)
    assert ours == theirs


@given(ids=token_lists, size=st.integers(1, 5))
def test_no_repeat_ngram_size_equals_transformers(ids, size):
    logits = torch.zeros(1, VOCAB)
    theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), logits)[0]
    assert ngram_ends(np.array(ids), size).tolist() == torch.nonzero(theirs == -INF).flatten().tolist()


@given(ids=token_lists, words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), min_size=1))
def test_bad_words_equal_transformers(ids, words):
    theirs = NoBadWordsLogitsProcessor(words)(torch.tensor([ids]), torch.zeros(1, VOCAB))[0]
    ours = word_ends(np.array(ids), [tuple(word) for word in words])
    # transformers takes a word longer than the text for unfinished; so do we, though its start fits.
    assert ours.tolist() == torch.nonzero(theirs == -INF).flatten().tolist()


@given(ids=token_lists, bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), min_size=1))
def test_logit_bias_equals_transformers_sequence_bias(ids, bias):
    ours, theirs = both(SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()]), ids, logit_bias=bias)
    assert ours == theirs


@given(ids=token_lists, least=st.integers(1, 12))
def test_min_new_tokens_equals_transformers(ids, least):
    processor = MinNewTokensLengthLogitsProcessor(len(ids) // 2, least, [2, 5])
    ours, theirs = both(processor, ids, min_new_tokens=least, eos=(2, 5))
    assert ours == theirs


# ── DRY ───────────────────────────────────────────────────────────────────────────────────────────────────


def dry_by_definition(ids, multiplier, base, allowed_length, breakers) -> dict[int, float]:
    costs: dict[int, float] = {}
    for token in set(ids) - set(breakers):
        longest = 0
        for place in range(1, len(ids)):  # each earlier occurrence of the token, and what stood before it
            if ids[place] != token:
                continue
            length = 0
            while length < place and ids[place - 1 - length] == ids[-1 - length] and ids[-1 - length] not in breakers:
                length += 1
            longest = max(longest, length)
        if longest >= allowed_length:
            costs[token] = multiplier * base ** (longest - allowed_length)
    return costs


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    base=st.sampled_from([1.0, 1.75, 3.0]),
    allowed_length=st.integers(1, 6),
    breakers=st.sets(st.integers(0, 3), max_size=2),
)
def test_dry_equals_its_definition(ids, base, allowed_length, breakers):
    options = {"multiplier": 0.8, "base": base, "allowed_length": allowed_length, "breakers": tuple(breakers)}
    got = dry_penalties(np.array(ids), **options)
    want = dry_by_definition(ids, 0.8, base, allowed_length, tuple(breakers))
    if base == 1:
        assert got == dict.fromkeys(want, 0.8)
    else:
        assert got == want


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([1, 2, 3, 9, 1, 2, 3], {9: 1.0 * 2.0}),  # 1 2 3 came before 9: n = 3, one above what is allowed
        ([1, 2, 3, 9, 5, 2, 3], {9: 1.0}),
        ([1, 2, 3, 9, 5, 6, 3], {}),
        ([1, 2, 9, 2, 1, 2], {9: 1.0}),
        ([4, 1, 2, 7, 1, 2], {7: 1.0}),
        ([8, 1, 2, 8, 1, 2], {}),  # 8 is a breaker, and so never dearer
        ([1, 8, 2, 7, 1, 8, 2], {}),  # nor does 1 8 2 reach across it
        ([5], {}),
        ([5, 5, 5, 5], {5: 2.0}),  # n = 3
    ],
    ids=str,
)
def test_dry_on_examples(ids, want):
    assert dry_penalties(np.array(ids), multiplier=1.0, base=2.0, allowed_length=2, breakers=(8,)) == want


def test_dry_on_an_endless_repetition_stays_finite():
    costs = dry_penalties(np.full(5000, 3), multiplier=2.0, base=1.75, allowed_length=2)
    assert costs == {3: pytest.approx(float(np.finfo(np.float32).max))}
