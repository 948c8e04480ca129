"""Weights as parameters: forwards follow every change, prefixes of older weights are not reused, and errors."""

import copy
import pickle

import numpy as np
import pytest
import torch
from families import DTYPES, RECURRENT, TRAINED, assert_equal, reported, samples, step, trainable
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import onward
from onward.errors import ContextOverflowError, RequestError
from onward.models.linear import marked_parts
from onward.ops import NativeWeight
from onward.ops import packed as packing
from onward.testing import random_checkpoint
from tiny_checkpoint import FEW_EXPERTS


@pytest.mark.strength(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", TRAINED)
def test_packed_weights_equal_a_model_loaded_without_parameters(family, dtype, tmp_path):
    folder = random_checkpoint(tmp_path / "before", family, dtype=dtype, **FEW_EXPERTS.get(family, {}))
    lm = onward.load(folder, trainable=True)
    assert all(parameter.dtype == torch.float32 for parameter in lm.parameters())
    assert {name: tuple(p.shape) for name, p in lm.named_parameters()} == {
        name: tuple(weight.shape) for name, weight in load_file(folder / "model.safetensors").items()
    }
    plain = onward.load(folder)
    for trained, loaded in zip(marked_parts(lm.model.params), marked_parts(plain.model.params), strict=True):
        assert str(trained) == str(loaded)
    texts = samples(lm)
    assert [text.token_ids for text in samples(plain)] == [text.token_ids for text in texts]
    step(lm, texts)
    saved = onward.load(lm.save(tmp_path / "after"))
    changed = samples(lm)
    assert_equal(changed, map(reported, samples(saved)))


def test_prefixes_of_older_weights_are_never_reused():
    lm = trainable("qwen3")
    prompt = [3, 5] * 50
    options = {"max_new_tokens": 4, "temperature": 0, "logprobs": 0}
    lm.generate(prompt, **options)
    assert lm.generate(prompt, **options).cached_tokens == 99
    for change in (
        lambda weight: weight.add_(0.01),
        lambda weight: setattr(weight, "data", weight.detach() + 0.01),
        lambda weight: lm.logprobs([1, 2]),  # no change, after one that was packed by another call
    ):
        with torch.no_grad():
            change(dict(lm.named_parameters())["model.layers.1.mlp.up_proj.weight"])
        changed = lm.generate(prompt, **options)
        fresh = onward.LanguageModel(lm.model).generate(prompt, **options)
        assert torch.equal(reported(changed), reported(fresh))
        assert changed.cached_tokens == (0 if change.__code__.co_names != ("logprobs",) else 99)
    with torch.no_grad():
        dict(lm.named_parameters())["model.norm.weight"].mul_(1.5)
    lm.score([1, 2, 3])  # packs it
    assert lm.generate(prompt, **options).cached_tokens == 0


def test_only_changed_weights_are_repacked(monkeypatch):
    lm, count = trainable("qwen3moe"), 0
    pack_into = packing.pack_into

    def counted(*arguments):
        nonlocal count
        count += 1
        pack_into(*arguments)

    monkeypatch.setattr(packing, "pack_into", counted)
    with torch.no_grad():
        dict(lm.named_parameters())["model.layers.0.self_attn.q_proj.weight"].mul_(2)
    for _ in range(2):
        lm.score([1, 2, 3])
        lm.logprobs([1, 2, 3])
    assert count == 1


def test_only_frozen_parameters_get_no_gradient():
    lm = trainable("qwen3")
    everything = lm.logprobs([1, 2, 3, 4]).sum()
    everything.backward()
    expected = {name: p.grad for name, p in lm.named_parameters()}
    for name, parameter in lm.named_parameters():
        parameter.grad = None
        parameter.requires_grad_("q_proj" in name)
    lm.logprobs([1, 2, 3, 4]).sum().backward()
    for name, parameter in lm.named_parameters():
        assert (parameter.grad is not None) == ("q_proj" in name)
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name])


def test_weights_changed_before_the_backward_pass_raise():
    lm = trainable("qwen3")
    total = lm.logprobs([1, 2, 3, 4]).sum()
    with torch.no_grad():
        dict(lm.named_parameters())["model.layers.1.mlp.up_proj.weight"].add_(1.0)
    lm.score([1, 2, 3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_tied_head_is_one_parameter_with_the_gradients_of_both():
    lm = trainable("qwen3", tie_word_embeddings=True)
    names = [name for name, _ in lm.named_parameters()]
    assert "lm_head.weight" not in names
    packed = lm.model.params
    assert packed.embed_tokens.weight is packed.lm_head.weight or not isinstance(packed.lm_head.weight, NativeWeight)
    lm.logprobs([1, 2, 3]).sum().backward()
    gradient = dict(lm.named_parameters())["model.embed_tokens.weight"].grad
    assert bool(gradient[1].any())  # looked up
    assert bool(gradient[200].any())  # in the head only
    texts = samples(lm)
    step(lm, texts)
    assert_equal(changed := samples(lm), lm.logprobs(changed))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))])
def test_a_copy_is_trained_independently(again):
    lm = trainable("gemma2")
    before, other = samples(lm), again(lm)
    step(other, before)
    assert_equal(before, map(reported, samples(lm)))
    assert_equal(changed := samples(other), other.logprobs(changed))
    assert not torch.equal(reported(changed[0]), reported(before[0]))


@pytest.mark.parametrize("family", ["qwen3", "gptoss", "granitemoe", "deepseekv3", "gemma2"])
def test_transformers_opens_a_saved_model(family, tmp_path):
    with torch.no_grad():
        lm = onward.load(random_checkpoint(tmp_path / "before", family), trainable=True)
        for parameter in lm.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    folder = lm.save(tmp_path / "after")
    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = list(range(40))
    with torch.no_grad():
        theirs = module(torch.tensor([ids])).logits[0]
    assert float((lm.logits(ids) - theirs).abs().max()) <= 1e-4  # as in tests/models/transformers_reference.py
    again = onward.load(lm.save(tmp_path / "exact", dtype=torch.float32), dtype="bfloat16", trainable=True)
    for (name, parameter), (other, same) in zip(lm.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(parameter, same)


def test_the_demo_model_is_saved_with_its_tokenizer_and_template(tmp_path):
    lm = onward.load("demo", trainable=True)
    step(lm, lm.generate(["Once"], max_new_tokens=8, temperature=1.0, seed=0, logprobs=0), 1e-3)
    saved = onward.load(lm.save(tmp_path / "demo"))
    messages = [{"role": "user", "content": "Hi"}]
    assert saved.chat(messages, temperature=0).text == lm.chat(messages, temperature=0).text


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "trainable= does not work with quantize="),
        ({"cache_format": "int8"}, "trainable= does not work with cache_format="),
        ({"pipeline": 2}, "trainable= does not work with pipeline="),
        ({"via": "transformers"}, "trainable= needs a built-in family"),
    ],
    ids=str,
)
def test_options_that_training_excludes(options, message):
    with pytest.raises(onward.OnwardError, match=message):
        onward.load("demo", trainable=True, **options)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_frozen_and_quantized_weights_are_no_parameters(quantize, tmp_path):
    lm = onward.load("demo", quantize=quantize)
    for call in (lm.parameters, lm.named_parameters, lambda: lm.save(tmp_path / "saved")):
        with pytest.raises(RequestError, match="no parameters to train: load it with trainable=True, or make an"):
            list(call())
    assert not lm.logprobs([5, 6, 7]).requires_grad
    assert not (tmp_path / "saved").exists()


def test_models_that_cannot_be_trained(tmp_path):
    with pytest.raises(RequestError, match="recurrence overwrites its state"):
        onward.load(random_checkpoint(tmp_path / "recurrent", RECURRENT[0]), trainable=True)
    from onward.language_model import quantize_folder

    quantize_folder(random_checkpoint(tmp_path / "floats", "qwen3"), tmp_path / "int8", "int8")
    with pytest.raises(RequestError, match="quantized weights have no gradient"):
        onward.load(tmp_path / "int8", trainable=True)
    plain = onward.load(tmp_path / "floats")
    for call in (plain.parameters, plain.named_parameters, lambda: plain.save(tmp_path / "saved")):
        with pytest.raises(RequestError, match="load it with trainable=True"):
            call()


def test_texts_without_logprobs():
    lm = trainable("qwen3")
    for text, message in (
        ([5], "at least 2 ids"),
        ([], "empty list"),
        ([1, 999], "whole numbers from 0 to 257"),
        (([1, 2], [999]), "whole numbers from 0 to 257"),
        (([], [1]), "empty list"),
        (7, "a prompt is a str, ids"),
        (np.zeros((2, 2), dtype=np.int64), "one dimension"),
    ):
        with pytest.raises(RequestError, match=message):
            lm.logprobs(text)
    for text in ([1] * 257, ([1] * 200, [1] * 57)):
        with pytest.raises(ContextOverflowError):
            lm.logprobs(text)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RequestError, match="under autocast"):
        lm.logprobs([1, 2, 3])
    with pytest.raises(RequestError, match="without cache_format="):
        onward.load("demo", cache_format="int8", trainable="poet").logprobs([1, 2, 3], adapter="poet")
    module = torch.nn.Embedding(258, 258)
    module.vocab_size = 258
    model = onward.Model.from_module(
        module, new_cache=lambda batch, length: (), call=lambda m, tokens, offsets, cache: (m(tokens), cache)
    )
    with pytest.raises(RequestError, match="built-in family"):
        onward.LanguageModel(model).logprobs([1, 2, 3])


def test_an_existing_destination_and_a_model_without_a_folder(tmp_path):
    lm = onward.load("demo", trainable=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="file"):
        lm.save(tmp_path / "file")
    with pytest.raises(RequestError, match="not loaded from a folder"):
        onward.LanguageModel(lm.model).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
