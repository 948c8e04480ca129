"""Logprobs under the sampling distribution: `generate` and `lm.logprobs` are equal, bit for bit."""

import math

import pytest
import torch
from families import DTYPES, PROMPTS, TRAINED, VARIED, samples, step, trainable

import onward
from onward import Sampler, SamplingParams
from onward.errors import OptionError, RequestError
from onward.language_model import logprobs as head
from onward.sampling import History

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3, "top_p": 0.95},
    "bans": {"no_repeat_ngram_size": 2, "bad_words": [[5], [6, 7]], "logit_bias": {9: 2.0}, "min_new_tokens": 5},
    "others": {"typical_p": 0.8, "xtc_probability": 0.5, "dry_multiplier": 0.8},
}
COMBINED = {**OPTIONS["penalties"], **OPTIONS["filters"]}
ASKED = {"sampling_logprobs": True, "eos": [3]}


def reported(text):
    return torch.tensor([token.sampling for token in text.logprobs])


def assert_equal(texts, found):
    for text, own in zip(texts, found, strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own.detach(), reported(text))


@pytest.mark.strength(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TRAINED)
def test_sampling_logprobs_equal_those_of_generate(family, dtype):
    lm = trainable(family, dtype)
    texts = samples(lm, **COMBINED, **ASKED)
    assert_equal(texts[::-1], lm.logprobs(texts[::-1], sampling=True))
    step(lm, texts)
    changed = samples(lm, **COMBINED, **ASKED)
    assert not torch.equal(reported(changed[0]), reported(texts[0]))
    assert_equal(changed, lm.logprobs(changed, sampling=True))


@pytest.mark.strength(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", VARIED)
def test_all_ways_of_decoding_report_the_same(family, options):
    lm = trainable(family)
    texts = samples(lm, **options, **ASKED)
    for draft in ("lookup", onward.Speculator("suffix", length=3)):
        drafted = samples(lm, draft=draft, **options, **ASKED)
        assert [text.logprobs for text in drafted] == [text.logprobs for text in texts]
    more = {"max_new_tokens": 20, "temperature": 1.0, "seed": 0, "logprobs": 0, "ignore_eos": True, **options, **ASKED}
    with onward.Engine(lm, max_sequences=4) as engine:
        running = [engine.submit(prompt, n=2, **more) for prompt in PROMPTS]
        assert [t.logprobs for each in running for t in each.result().choices] == [t.logprobs for t in texts]
        resumed = engine.resume(PROMPTS[0], emitted=texts[0].token_ids[:7], **more).result()
        assert resumed.logprobs == texts[0].logprobs
    streamed = [piece.logprobs for piece in lm.stream(PROMPTS[0], **more)]
    assert streamed == texts[0].logprobs
    assert lm.replay(texts[0]).logprobs == texts[0].logprobs
    for text in texts:
        assert_equal([text], [lm.logprobs(text, sampling=True)])
        own = text.request.options.with_values(seed=text.seed)
        assert_equal([text], [lm.logprobs((text.prompt_ids, text.token_ids), sampling=own)])
        plain = SamplingParams(**{"temperature": 1.0, "eos": [3], "seed": text.seed, "ignore_eos": True, **options})
        assert_equal([text], [lm.logprobs((text.prompt_ids, text.token_ids), sampling=plain)])


def test_rows_that_do_not_request_them_have_none():
    lm = trainable("qwen3")
    chosen = {"max_new_tokens": 12, "logprobs": 0, "temperature": 1.0, "seed": 0, "eos": [3]}
    asks = [{"sampling_logprobs": True, "top_p": 0.9}, {}, {"sampling_logprobs": True, "presence_penalty": 0.5}]
    batch = lm.generate(PROMPTS, per_prompt=asks, **chosen)
    for prompt, own, text in zip(PROMPTS, asks, batch, strict=True):
        assert text.logprobs == lm.generate(prompt, **chosen, **own).logprobs
        assert all((token.sampling is None) == (token.support is None) == (own == {}) for token in text.logprobs)


def test_sampling_logprobs_equal_the_softmax_of_scores():
    lm = trainable("qwen3")
    text = samples(lm, n=1, **COMBINED, **ASKED)[0]
    sampler = Sampler([text.request.options.with_values(seed=text.seed)])
    for at, token in enumerate(text.logprobs):
        ids = text.prompt_ids + text.token_ids[:at]
        logits = lm.logits(ids)[-1:]
        history = History(text.prompt_ids, text.token_ids[:at])
        exact = sampler.probabilities(logits, torch.tensor([len(ids)]), [history])[0]
        assert token.support == int((exact > 0).sum())
        # `logprobs` is within 5e-7 and a rounding of the exact value.
        exact_logprob = math.log(float(exact[text.token_ids[at]]))
        assert abs(token.sampling - exact_logprob) <= 5e-7 + 2.0**-23 * abs(exact_logprob)


def test_a_constraint_masks_the_distribution():
    lm = onward.load("demo", trainable=True)
    texts = lm.generate(
        ["Once", "The fox"], regex="[a-z ]{4,12}(owl|camel)", temperature=1.0, seed=2, n=2, logprobs=0,
        sampling_logprobs=True, max_new_tokens=20, draft="lookup",
    )  # fmt: skip
    texts = [text for each in texts for text in each.choices]
    assert any(token.support < 100 for text in texts for token in text.logprobs)
    assert_equal(texts, lm.logprobs(texts, sampling=True))
    (text, *_) = texts
    options = text.request.options.with_values(seed=text.seed)
    assert_equal([text], [lm.logprobs((text.prompt_ids, text.token_ids), sampling=options)])
    assert lm.replay(text).logprobs == text.logprobs


def test_a_reasoning_budget_forces_tokens():
    lm = onward.load("demo")
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    lm = onward.LanguageModel(lm.model, lm.tokenizer, onward.chat.ChatTemplate(template, {}))
    text = lm.chat(
        [{"role": "user", "content": "Once"}], template={"enable_thinking": True}, reasoning_budget=5, temperature=1.0,
        seed=1, logprobs=0, sampling_logprobs=True, max_new_tokens=40,
    )  # fmt: skip
    forced = [token for token in text.logprobs if token.support == 1 and token.chosen < -5]
    assert len(forced) > 3
    assert all(token.sampling == 0 for token in forced)
    assert_equal([text], [lm.logprobs(text, sampling=True)])


def test_greedy_texts_are_certain():
    lm = trainable("qwen3")
    text = lm.generate(PROMPTS[0], temperature=0, max_new_tokens=5, logprobs=0, sampling_logprobs=True)
    assert [(token.sampling, token.support) for token in text.logprobs] == [(0.0, 1)] * 5


def test_ids_that_could_not_be_drawn():
    lm = trainable("qwen3")
    likeliest = int(lm.logits([5, 6])[-1].argmax())
    other = (likeliest + 1) % 256
    found = lm.logprobs([([5, 6], [likeliest]), ([5, 6], [other])], sampling=SamplingParams(temperature=1.0, top_k=1))
    assert [own.tolist() for own in found] == [[0.0], [-math.inf]]
    with pytest.raises(onward.errors.NothingToDrawError):
        lm.logprobs(([5], [6]), sampling=SamplingParams(temperature=1.0, bad_words=[[token] for token in range(258)]))
    replay = lm.replay([5, 6], [other], temperature=1.0, top_k=1, seed=0, logprobs=0, sampling_logprobs=True)
    assert replay.logprobs[0].sampling == -math.inf


# ── entropies and the most likely ids ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_most_likely_ids_equal_those_of_generate(dtype, sampling):
    lm = trainable("gemma2", dtype)
    texts = samples(lm, logprobs=4, **OPTIONS["filters"], **ASKED)
    found = lm.logprobs(texts, sampling=sampling, top=4)
    alone = lm.logprobs(texts[0], sampling=sampling, top=4)
    assert all(map(torch.equal, alone, found[0]))
    for text, own, plain in zip(texts, found, lm.logprobs(texts, sampling=sampling), strict=True):
        assert torch.equal(own.chosen, plain)
        assert own.top.shape == own.top_ids.shape == (len(text.token_ids), 4)
        if sampling:
            assert own.support.tolist() == [token.support for token in text.logprobs]
            assert bool((own.entropy <= own.support.log() + 1e-5).all())
        else:
            assert own.top_ids.tolist() == [[token for token, _ in entry.top] for entry in text.logprobs]
            assert own.top.tolist() == [[value for _, value in entry.top] for entry in text.logprobs]
            assert own.support.tolist() == [lm.model.vocab_size] * len(text.token_ids)


def _in_float64(logits, options, prompt, output):
    """Differentiable scores of a text by the definitions of the transforms in their simplest form, in float64."""
    rows = []
    for at, row in enumerate(logits.to(torch.float64)):
        seen, drawn = set(prompt) | set(output[:at]), output[:at]
        penalised = torch.stack([
            (z / options.repetition_penalty if z > 0 else z * options.repetition_penalty) if token in seen else z
            for token, z in enumerate(row)
        ])  # fmt: skip
        counts = torch.tensor([drawn.count(token) for token in range(len(row))])
        penalised = penalised - options.frequency_penalty * counts - options.presence_penalty * (counts > 0)
        scores = penalised / options.temperature
        allowed = (
            Sampler([options]).scores(row.detach().float()[None], None, [History(prompt, output[:at])])[0] > -math.inf
        )
        rows.append(scores.masked_fill(~allowed, -math.inf))
    return torch.stack(rows)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("options", [None, COMBINED])
def test_gradients_against_float64(options, few, monkeypatch):
    """Of chosen and most likely logprobs and entropies, through the head: its logits are inputs of the exact ones."""
    lm = trainable("qwen3", tie_word_embeddings=False)
    vocab = lm.model.vocab_size
    prompt, output = [5, 6, 7], [9, 8, 9, 5, 11, 9, 30]
    params = None if options is None else SamplingParams(**options)
    if few:
        monkeypatch.setattr(head, "_MAX_LOGITS", 3 * vocab)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the second id and the last one can be drawn
        for at in (1, 6):
            output[at] = int(lm.logits(prompt + output[:at])[-1].argmax())
    found = lm.logprobs((prompt, output), sampling=False if params is None else params, top=3)
    logits = lm.logits(prompt + output)[len(prompt) - 1 : -1].detach().to(torch.float64).requires_grad_()
    scores = logits if params is None else _in_float64(logits, params, prompt, output)
    logs = scores.log_softmax(-1)
    is_finite = found.chosen.isfinite()
    assert int(is_finite.sum()) >= 2
    weights = [torch.randn(each.shape, generator=draws) for each in (found.chosen, found.entropy, found.top)]
    exact_fields = (
        logs.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1),
        -(logs.exp() * logs.masked_fill(logs == -math.inf, 0.0)).sum(-1),
        logs.gather(1, found.top_ids),
    )
    ours, exact = 0.0, 0.0
    for own, other, weight in zip((found.chosen, found.entropy, found.top), exact_fields, weights, strict=True):
        same = own.isfinite()
        assert torch.equal(same, other.isfinite())
        torch.testing.assert_close(own[same].double(), other[same], rtol=4e-6, atol=2e-6)
        ours = ours + (own.masked_fill(~same, 0.0) * weight.masked_fill(~same, 0.0)).sum()
        exact = exact + (other.masked_fill(~same, 0.0) * weight.masked_fill(~same, 0.0)).sum()
    (to_logits,) = torch.autograd.grad(exact, logits)
    weight = dict(lm.named_parameters())["lm_head.weight"]
    (gradient,) = torch.autograd.grad(ours, weight)
    tapped = lm.generate(prompt + output, max_new_tokens=1, temperature=0, taps={"norm": "all"}).taps["norm"]
    expected = to_logits.T @ tapped[len(prompt) - 1 : -1].double()
    # Each score has a relative error of a few roundings, and each row's gradient adds up 10 terms.
    assert float((gradient - expected).norm()) <= 2.0**-18 * float(expected.norm())


def test_gradcheck_of_the_scores():
    class Reported(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores, ids, top_ids):
            logs = scores.log_softmax(-1)
            ctx.save_for_backward(scores, ids, top_ids)
            entropy = -(logs.exp() * logs.masked_fill(logs == -math.inf, 0.0)).sum(-1)
            return logs.gather(1, ids), logs.gather(1, top_ids), entropy

        @staticmethod
        def backward(ctx, chosen, top, entropy):
            scores, ids, top_ids = ctx.saved_tensors
            return head.gradient_of_scores(scores, [(ids, chosen), (top_ids, top)], entropy), None, None

    draws = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 9, dtype=torch.float64, generator=draws)
    scores[0, 3:] = -math.inf
    scores[1, ::2] = -math.inf
    ids, top_ids = torch.tensor([[0], [1], [8], [2]]), torch.tensor([[1, 2], [3, 1], [8, 0], [2, 4]])
    finite = scores.isfinite()

    def of(values):
        return Reported.apply(scores.masked_scatter(finite, values), ids, top_ids)

    assert torch.autograd.gradcheck(of, (scores[finite].clone().requires_grad_(),))


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_logprobs": True}, "without logprobs: set logprobs to 0"),
        ({"sampling_logprobs": True, "logprobs": 0, "beams": 2}, "searches and does not sample"),
    ],
    ids=str,
)
def test_unsupported_options(options, message):
    with pytest.raises(RequestError, match=message):
        onward.GenerateOptions(**options)


def test_logprobs_false_leaves_them_out():
    options = onward.GenerateOptions(logprobs=0, sampling_logprobs=True)
    assert not options.replace(logprobs=None).sampling_logprobs
    assert not options.replace(beams=2).sampling_logprobs


def test_texts_with_unknown_sampling():
    lm = trainable("qwen3")
    greedy = lm.generate([5, 6], temperature=0, max_new_tokens=2)
    beams = lm.generate([5, 6], beams=2, max_new_tokens=2)
    for text, sampling, message in (
        ([5, 6], True, "give SamplingParams"),
        (([5], [6]), True, "give SamplingParams"),
        ([5, 6], "top_p", "must be True, False or SamplingParams"),
        ([5, 6], SamplingParams(top_p=0.5), "a temperature of 0 draws nothing"),
        (greedy, True, "a temperature of 0 draws nothing"),
        (beams, True, "a temperature of 0 draws nothing"),
        ([5, 6], SamplingParams(temperature=1.0, xtc_probability=0.5), "needs the seed"),
        ([5, 6], SamplingParams(temperature=1.0, logit_bias={999: 1.0}), "names id 999"),
        ([5, 6], SamplingParams(temperature=1.0, bad_words=["owl"]), "bad_words"),
    ):
        with pytest.raises(RequestError, match=message):
            lm.logprobs(text, sampling=sampling)
    for top, message in ((-1, "top"), (259, "the vocabulary has 258 ids"), (True, "top"), ("3", "top")):
        with pytest.raises(OptionError, match=message):
            lm.logprobs([5, 6], top=top)
