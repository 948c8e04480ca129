"""The trained logprobs equal the sampled ones, bit for bit."""

import pytest
import torch
from families import DTYPES, PROMPTS, TRAINED, VARIED, assert_equal, reported, samples, step, trainable

import onward
from onward.cache import WholeTexts
from onward.language_model import logprobs as head
from onward.models import architecture_of


@pytest.mark.strength(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TRAINED)
def test_logprobs_equal_generate_alone_and_packed_in_any_order(family, dtype):
    lm = trainable(family, dtype)
    texts = samples(lm)
    assert_equal(texts, lm.logprobs(texts))
    assert_equal(texts[::-1], lm.logprobs(texts[::-1]))
    assert_equal(texts[1:2], [lm.logprobs(texts[1])])
    with torch.no_grad():
        assert_equal(texts, lm.logprobs(texts))
    step(lm, texts)
    changed = samples(lm)
    assert not torch.equal(reported(changed[0]), reported(texts[0]))
    assert_equal(changed, lm.logprobs(changed))


@pytest.mark.strength(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", VARIED)
def test_logprobs_equal_engines_drafts_and_prefix_hits_over_ten_steps(family, dtype):
    lm = trainable(family, dtype)
    with onward.Engine(lm, max_sequences=4) as engine:
        for _ in range(10):
            texts = samples(lm, draft="lookup")
            again = samples(lm)
            assert max(text.cached_tokens for text in again) > 0
            assert_equal(again, map(reported, texts))
            running = [
                engine.submit(prompt, max_new_tokens=20, n=2, temperature=1.0, seed=0, logprobs=0, ignore_eos=True)
                for prompt in PROMPTS
            ]
            served = [text for each in running for text in each.result().choices]
            assert_equal(served, map(reported, texts))
            assert_equal(texts, lm.logprobs(texts))
            step(lm, texts, 1e-3)
            engine.update_weights(lm.named_parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", VARIED)
def test_padded_rows_equal_packed_texts(family, dtype):
    lm = trainable(family, dtype)
    architecture, params = architecture_of(lm.model), lm.model.trainable.in_graph()
    texts = [list(range(3, 3 + length)) for length in (90, 1, 70)]
    rows = torch.tensor([ids + [0] * (90 - len(ids)) for ids in texts], dtype=torch.int32)
    padded = architecture.head_input(rows, torch.zeros(3, dtype=torch.int32), WholeTexts(), params)
    tokens = torch.tensor([token for ids in texts for token in ids], dtype=torch.int32).unsqueeze(1)
    positions = torch.cat([torch.arange(len(ids), dtype=torch.int32) for ids in texts])
    packed = architecture.head_input(tokens, positions, WholeTexts([len(ids) for ids in texts]), params).squeeze(1)
    for row, text, ids in zip(padded, packed.split([90, 1, 70]), texts, strict=True):
        assert torch.equal(row[: len(ids)], text)


def test_ids_pairs_and_texts_equal_score():
    lm = onward.load("demo", trainable=True)
    text = "Once upon a time there was an owl."
    ids = lm.encode(text)
    scored = torch.tensor([token.chosen for token in lm.score(ids).logprobs[1:]])
    for same in (ids, tuple(ids), torch.tensor(ids), text):
        assert torch.equal(lm.logprobs(same).detach(), scored)
    for prompt in (ids[:4], torch.tensor(ids[:4])):
        assert torch.equal(lm.logprobs((prompt, ids[4:])).detach(), scored[3:])
    whole, pair, nothing = lm.logprobs([ids, (ids[:4], ids[4:]), (ids, [])])
    assert torch.equal(whole.detach(), scored)
    assert torch.equal(pair.detach(), scored[3:])
    assert nothing.shape == (0,)


def test_an_untrained_model_has_the_same_logprobs_without_a_gradient():
    for options in ({}, {"quantize": "int8"}):
        lm = onward.load("demo", **options)
        texts = lm.generate(["Once", "The owl"], max_new_tokens=20, temperature=1.0, seed=0, logprobs=0)
        found = lm.logprobs(texts)
        assert not any(own.requires_grad for own in found)
        assert_equal(texts, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite"])
@pytest.mark.parametrize("chunks_saved", [0, 2, 100])
def test_chunked_logits_give_the_same(family, dtype, chunks_saved, monkeypatch):
    lm = trainable(family, dtype)
    texts = samples(lm)

    def run():
        found = torch.cat(lm.logprobs(texts))
        found.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in lm.named_parameters()}
        for parameter in lm.parameters():
            parameter.grad = None
        return found.detach(), gradients

    whole, gradients = run()
    monkeypatch.setattr(head, "_MAX_LOGITS", 7 * lm.model.vocab_size)
    monkeypatch.setattr(head, "_MAX_SAVED_LOGITS", chunks_saved * 7 * lm.model.vocab_size)
    few, others = run()
    assert torch.equal(few, whole)
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    for name, gradient in gradients.items():
        # The head's gradient is a sum over 17 parts, each of which is rounded; others differ less.
        assert float((others[name] - gradient).norm()) <= 17 * unit * float(gradient.norm()), name
