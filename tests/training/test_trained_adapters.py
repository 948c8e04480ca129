"""LoRA adapters trained on float and quantized weights: equal logprobs, exact gradients, files for peft."""

import copy
import pickle

import pytest
import torch
from families import PROMPTS, assert_equal, reported
from peft import PeftModel
from transformers import AutoModelForCausalLM

import onward
from onward.errors import CheckpointError, RequestError
from onward.testing import random_checkpoint

BASES = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"},
    "bfloat16 in int8": {"dtype": "bfloat16", "quantize": "int8"}, "int4": {"quantize": "int4"},
}  # fmt: skip
OPTIONS = {"max_new_tokens": 20, "n": 2, "temperature": 1.0, "seed": 0, "logprobs": 0, "ignore_eos": True}


def _samples(lm, **options):
    return [text for each in lm.generate(PROMPTS, **OPTIONS, **options) for text in each.choices]


def _step(lm, name, texts):
    optimizer = torch.optim.AdamW(lm.parameters(name), lr=1e-2)
    torch.cat(lm.logprobs(texts, adapter=name)).sum().neg().backward()
    assert all(parameter.grad is not None for parameter in lm.parameters(name))
    optimizer.step()


@pytest.mark.strength(1)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_logprobs_equal_the_sampled_ones_over_steps(family, base, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, family), trainable="poet", **BASES[base])
    plain = _samples(lm)
    assert_equal(plain, map(reported, _samples(lm, adapter="poet")))  # a new adapter changes nothing
    with onward.Engine(lm, max_sequences=4) as engine:
        for _ in range(3):
            texts = _samples(lm, adapter="poet")
            assert_equal(texts, lm.logprobs(texts, adapter="poet"))
            assert_equal(texts[::-1], lm.logprobs(texts[::-1], adapter="poet"))
            again = _samples(lm, adapter="poet", draft="lookup")
            assert max(text.cached_tokens for text in again) > 0
            assert_equal(again, map(reported, texts))
            served = [engine.submit(prompt, adapter="poet", **OPTIONS) for prompt in PROMPTS]
            assert_equal([text for each in served for text in each.result().choices], map(reported, texts))
            _step(lm, "poet", texts)
    assert not torch.equal(reported(_samples(lm, adapter="poet")[0]), reported(texts[0]))
    assert_equal(_samples(lm), map(reported, plain))  # other rows keep their bits
    folder = lm.save_adapter("poet", tmp_path / "saved")
    lm.load_adapter("again", folder)
    with torch.no_grad():
        loaded, trained = (lm.logprobs(texts, adapter=name) for name in ("again", "poet"))
    assert all(map(torch.equal, loaded, trained))
    assert_equal(_samples(lm, adapter="poet"), map(reported, _samples(lm, adapter="again")))


def test_gradients_equal_peft_in_float64(tmp_path):
    base = random_checkpoint(tmp_path / "base", "qwen3")
    lm = onward.load(base)
    lm.new_adapter("poet", rank=4, alpha=6.0, targets=["q_proj", "down_proj"], seed=3)
    with torch.no_grad():
        for index, parameter in enumerate(lm.parameters("poet")):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    ids = list(range(5, 60))
    weights = torch.randn(len(ids) - 1, generator=torch.Generator().manual_seed(9))
    (lm.logprobs(ids, adapter="poet") * weights).sum().backward()
    folder = lm.save_adapter("poet", tmp_path / "poet")

    def theirs(dtype):
        module = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=dtype),
            folder,
            is_trainable=True,
            autocast_adapter_dtype=False,
        )
        module.to(dtype)
        logits = module(torch.tensor([ids])).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        (chosen * weights).sum().backward()
        found = {n.replace(".default", ""): p.grad.double() for n, p in module.named_parameters() if "lora_" in n}
        return {n.removeprefix("base_model.model."): gradient for n, gradient in found.items()}

    exact, plain = theirs(torch.float64), theirs(torch.float32)
    ours = {name: parameter.grad.double() for name, parameter in lm.named_parameters("poet")}
    assert ours.keys() == exact.keys()

    def error(found):
        return sum(float((found[n] - g).square().sum()) for n, g in exact.items()) ** 0.5

    assert error(ours) <= 2 * error(plain)


def test_running_requests_keep_the_older_values():
    lm = onward.load("demo", trainable="poet")
    options = {"max_new_tokens": 12, "temperature": 0, "adapter": "poet", "ignore_eos": True}
    before = lm.generate("Once", **options)
    stream = lm.stream("Once", **options)
    first = [next(stream).token_id for _ in range(4)]
    with torch.no_grad():
        for parameter in lm.parameters("poet"):
            parameter += 0.5
    changed = lm.generate("Once", **options)
    assert changed.token_ids != before.token_ids
    assert first + [piece.token_id for piece in stream] == before.token_ids


def test_adapters_and_the_weights_are_trained_together():
    lm = onward.load("demo", trainable=True)
    lm.new_adapter("poet")
    lm.logprobs([1, 2, 3, 4], adapter="poet").sum().backward()
    assert all(p.grad is not None for p in lm.parameters())
    assert all(p.grad is not None for p in lm.parameters("poet"))


def _trained(source, **options):
    lm = onward.load(source, **options)
    lm.new_adapter("poet", rank=4)
    with torch.no_grad():
        for index, parameter in enumerate(lm.parameters("poet")):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return lm


@pytest.mark.parametrize("copied", [lambda lm: pickle.loads(pickle.dumps(lm)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_copy_of_a_model_has_copies_of_its_trained_adapters(tmp_path, copied, trainable):
    lm = _trained(random_checkpoint(tmp_path / "base", "qwen3"), trainable=trainable)
    texts = _samples(lm, adapter="poet")
    lm.load_adapter("saved", lm.save_adapter("poet", tmp_path / "saved"))
    other = copied(lm)
    for name in ("poet", "saved"):
        assert_equal(_samples(other, adapter=name), map(reported, texts))
    _step(other, "poet", _samples(other, adapter="poet"))
    assert not torch.equal(reported(_samples(other, adapter="poet")[0]), reported(texts[0]))
    assert_equal(_samples(lm, adapter="poet"), map(reported, texts))
    assert other.source == lm.source
    if trainable:
        other.save(tmp_path / "whole")


def test_a_trained_adapter_is_merged_with_its_current_values(tmp_path):
    lm = _trained(random_checkpoint(tmp_path / "base", "qwen3"))
    of_file = lm.merge(lm.save_adapter("poet", tmp_path / "saved"))
    merged = lm.merge("poet")
    assert_equal(_samples(merged), map(reported, _samples(of_file)))
    assert not torch.equal(reported(_samples(merged)[0]), reported(_samples(lm)[0]))
    assert not merged.adapters


@pytest.mark.parametrize("trainable", [False, True])
def test_a_quantized_model_has_copies_of_trained_adapters(tmp_path, trainable):
    lm = _trained(random_checkpoint(tmp_path / "base", "qwen3"), trainable=trainable)
    lm.load_adapter("saved", lm.save_adapter("poet", tmp_path / "saved"))
    small = onward.quantize(lm, "int8")
    assert_equal(_samples(small, adapter="poet"), map(reported, _samples(small, adapter="saved")))
    before = _samples(small, adapter="saved")
    _step(small, "poet", _samples(small, adapter="poet"))
    assert_equal(_samples(small, adapter="saved"), map(reported, before))


def test_training_changes_no_model_derived_from_it(tmp_path):
    lm = _trained(random_checkpoint(tmp_path / "base", "qwen3"), trainable=True)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 1.1  # not packed yet
    changed = onward.load(lm.save(tmp_path / "changed"))
    others = {"merged": lm.merge("poet"), "int8": onward.quantize(lm, "int8")}
    assert_equal(_samples(others["int8"]), map(reported, _samples(onward.quantize(changed, "int8"))))
    before = {name: _samples(other) for name, other in others.items()}
    version = {name: other.weights_version for name, other in others.items()}
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 1.1
    lm.generate(PROMPTS[0], max_new_tokens=1)
    for name, other in others.items():
        assert_equal(_samples(other), map(reported, before[name]))
        with torch.no_grad():
            assert_equal(before[name], other.logprobs(before[name]))
        assert other.weights_version == version[name] == 0
        with pytest.raises(RequestError, match="no parameters to train"):
            other.parameters().__next__()


def test_a_changed_folder_is_not_reloaded(tmp_path):
    lm = _trained(random_checkpoint(tmp_path / "base", "qwen3"))
    folder = lm.save_adapter("poet", tmp_path / "saved")
    lm.load_adapter("saved", folder)
    pickled = pickle.dumps(lm)
    with torch.no_grad():
        for parameter in lm.parameters("poet"):
            parameter *= 2
    lm.save_adapter("poet", tmp_path / "other").joinpath("adapter_model.safetensors").replace(
        folder / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match="has changed since 'saved' was loaded"):
        pickle.loads(pickled)


def test_bad_input(tmp_path):
    lm = onward.load("demo", trainable="poet")
    with pytest.raises(RequestError, match="'poet' is already loaded"):
        lm.new_adapter("poet")
    with pytest.raises(RequestError, match=r"no linear layers 'w1'.*it has .*q_proj"):
        lm.new_adapter("other", targets=["w1"])
    with pytest.raises(onward.OnwardError, match="rank"):
        lm.new_adapter("other", rank=0)
    with pytest.raises(RequestError, match="there is no adapter 'other'"):
        lm.logprobs([1, 2], adapter="other")
    lm.load_adapter("saved", lm.save_adapter("poet", tmp_path / "saved"))
    with pytest.raises(RequestError, match="'saved' was loaded from a folder"):
        lm.parameters("saved").__next__()
    with pytest.raises(RequestError, match=r"trainable=True, or make an adapter"):
        lm.parameters().__next__()
    lm.drop_adapter("poet")
    with pytest.raises(RequestError, match="there is no adapter 'poet'"):
        lm.parameters("poet").__next__()
