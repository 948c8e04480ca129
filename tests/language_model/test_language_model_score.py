"""Scores are sums of logprobs, regardless of the other texts in the call."""

import dataclasses
import math

import pytest
import torch

import onward
from onward import LanguageModel, Score, native
from onward.decoding import loop
from onward.errors import ContextOverflowError, OnwardError, RequestError, TokenizerError
from onward.language_model import tapped
from onward.models import pack_params
from onward.sampling import noise
from onward.testing import ByteTokenizer, scripted_model, tiny_model

# Logits of order 1 of two right float32 sums differ by 1e-4 at most (tests/models/transformers_reference.py), and
# logprobs by twice that.
APART = 2e-4
TEXTS = ["Once upon a time", "AB", "The cat sat on the mat, and the mat lay on the floor.", "naïve 猫"]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    stock = tiny_model(seed=7)
    return LanguageModel(dataclasses.replace(stock, params=pack_params(stock.params)), ByteTokenizer())


def test_a_score_is_the_sum_of_log_softmax(lm):
    for text in TEXTS:
        ids = lm.encode(text)
        want = lm.logits(ids).to(torch.float64).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        score = lm.score(text)
        assert score.token_ids == ids
        assert score.logprobs[0] is None
        assert score.log_likelihood == pytest.approx(want.sum().item(), abs=APART * len(ids), rel=0)
        assert score.perplexity == pytest.approx(math.exp(-want.mean().item()), rel=2 * APART)


def test_scores_are_equal_alone_batched_and_chunked(lm, monkeypatch):
    alone = [lm.score(text, logprobs=2) for text in TEXTS]
    same(lm.score(TEXTS, logprobs=2), alone)
    same(lm.score([lm.encode(text) for text in TEXTS[::-1]], logprobs=2), alone[::-1])
    many = TEXTS * 5
    same(lm.score(many, logprobs=2), alone * 5)
    monkeypatch.setattr(tapped, "_MAX_TOKENS", 60)
    monkeypatch.setattr(loop, "_MAX_LOGITS", 258 * 3)
    monkeypatch.setattr(noise, "_MOST_AT_ONCE", 258 * 2)
    same(lm.score(many, logprobs=2), alone * 5)


def same(scores: list[Score], others: list[Score]) -> None:
    """The same bits from the kernels; the definitions, which run where there are none, only promise to be close."""
    if native.available_isas():
        assert scores == others
    for one, other in zip(scores, others, strict=True):
        assert one.token_ids == other.token_ids
        assert [token.chosen for token in one.logprobs[1:]] == pytest.approx(
            [token.chosen for token in other.logprobs[1:]], abs=APART, rel=0
        )


def test_logits_are_computed_in_chunks_that_fit_memory(monkeypatch):
    """The head runs in chunks: [T, V] of a long text is never in memory."""
    monkeypatch.setattr(loop, "_MAX_LOGITS", 32 * 8)
    model = scripted_model([1, 2, 3])
    LanguageModel(model).score([[1] * 40, [2] * 21])
    assert sum(len(call.tokens[0]) for call in model.calls) == 39
    # Without logits_at they are of all tokens.
    logits = [call.tokens if call.logits_at is None else call.logits_at for call in model.calls]
    assert max(len(rows) * len(rows[0]) for rows in logits) == 8


def test_certain_texts_have_perplexity_one_and_impossible_ones_infinity(lm):
    script = [5, 6, 7, 8]
    certain = LanguageModel(scripted_model(script))
    likely, unlikely = certain.score([[9, 5, 6, 7], [9, 5, 6, 8]])
    assert likely.perplexity == pytest.approx(1, abs=1e-6)
    assert unlikely.log_likelihood == pytest.approx(-30, abs=1e-5)  # the certain id's logit is 30, the others' 0

    def never_one(tokens):
        return torch.zeros(32).index_fill(0, torch.tensor(1), float("-inf"))

    impossible = LanguageModel(scripted_model(never_one)).score([0, 1, 2])
    assert (impossible.log_likelihood, impossible.perplexity) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("A", {}, RequestError, "must have at least 2 ids"),
        (["AB", [1]], {}, RequestError, r"must have at least 2 ids, since the first one is not predicted; got \[1\]"),
        ([], {}, RequestError, "empty list of ids"),
        ([1, 258], {}, RequestError, "from 0 to 257; got 258"),
        ("x" * 257, {}, ContextOverflowError, "the text is 257 tokens long, but the context holds 256: give a stride"),
        ("AB", {"logprobs": -1}, RequestError, "logprobs must be a whole number of 0 or more; got -1"),
        ("AB", {"logprobs": 259}, RequestError, "logprobs is 259, but the vocabulary has 258 ids"),
        (3, {}, RequestError, "got int"),
    ],
    ids=str,
)
def test_unscorable_input_is_refused(lm, text, options, error, message):
    with pytest.raises(error, match=message):
        lm.score(text, **options)


def test_texts_need_a_tokenizer_and_ids_do_not():
    lm = LanguageModel(tiny_model())
    assert math.isfinite(lm.score([1, 2, 3]).log_likelihood)
    with pytest.raises(TokenizerError, match="give ids"):
        lm.score("text")


def test_nonfinite_logits_give_no_score():
    def broken(tokens):
        return torch.full((32,), float("nan"))

    with pytest.raises(OnwardError, match="NaN or infinite"):
        LanguageModel(scripted_model(broken)).score([1, 2])


def test_the_demo_prefers_a_sentence_to_its_reverse():
    lm = onward.load("demo")
    sentence = "Once upon a time, there was a little girl who lived in a house."
    forwards, backwards = lm.score([sentence, " ".join(reversed(sentence.split()))])
    assert forwards.perplexity < backwards.perplexity / 3


@pytest.mark.parametrize("stride", [1, 3, 7, 15])
def test_windows_score_each_id_once_with_the_documented_context(lm, stride):
    """The definition: an id past the first window is scored in the first window that holds it."""
    short = LanguageModel(dataclasses.replace(lm.model, max_seq_len=16), lm.tokenizer)
    for length in (16, 17, 18, 31, 40):
        ids = lm.encode("The cat sat on the mat, and the mat lay on the floor.")[:length]
        score = short.score(ids, stride=stride, logprobs=1)
        assert score.token_ids == ids
        assert score.logprobs[:16] == lm.score(ids[:16], logprobs=1).logprobs
        for at in range(16, length):
            begin = -(-(at - 15) // stride) * stride
            assert at - begin >= 16 - stride
            assert score.logprobs[at] == lm.score(ids[begin : at + 1], logprobs=1).logprobs[-1]


def test_a_stride_changes_nothing_if_the_text_fits(lm):
    assert lm.score(TEXTS, stride=4) == lm.score(TEXTS)
    long = "The cat sat on the mat"
    short = LanguageModel(dataclasses.replace(lm.model, max_seq_len=16), lm.tokenizer)
    assert short.score([long, "AB"], stride=4) == [short.score(long, stride=4), lm.score("AB")]


@pytest.mark.parametrize("stride", [0, -1, 16, 2.5, True])
def test_a_stride_is_shorter_than_the_context(lm, stride):
    short = LanguageModel(dataclasses.replace(lm.model, max_seq_len=16), lm.tokenizer)
    with pytest.raises(RequestError, match="stride"):
        short.score("AB", stride=stride)
