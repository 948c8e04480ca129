"""A module of transformers whose parameters torch trains, and Onward's forward reads."""

import pytest
import torch
from families import DTYPES, assert_equal, reported, samples
from transformers import AutoModelForCausalLM

import onward
from onward.errors import RequestError
from onward.testing import random_checkpoint


def _module(folder, family, dtype, **fields):
    return AutoModelForCausalLM.from_pretrained(random_checkpoint(folder, family, dtype=dtype, **fields), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "olmo2"])
def test_parameters_are_those_of_the_module(family, dtype, tmp_path):
    module = _module(tmp_path, family, dtype, tie_word_embeddings=True)
    lm = onward.LanguageModel.from_module(module)
    own = dict(module.named_parameters())
    assert {name for name, _ in lm.named_parameters()} == own.keys()
    assert all(parameter is own[name] for name, parameter in lm.named_parameters())
    plain = onward.load(tmp_path)
    texts = samples(lm)
    assert_equal(texts, map(reported, samples(plain)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.cat(lm.logprobs(texts)).sum().neg().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    optimizer.step()
    changed = samples(lm)
    assert_equal(changed, lm.logprobs(changed))
    assert not torch.equal(reported(changed[0]), reported(texts[0]))


def test_float32_parameters_can_compute_in_bfloat16(tmp_path):
    module = _module(tmp_path, "qwen3", torch.float32)
    texts = samples(onward.LanguageModel.from_module(module, dtype=torch.bfloat16))
    assert_equal(texts, map(reported, samples(onward.load(tmp_path, dtype="bfloat16"))))


def test_unsupported_modules(tmp_path):
    with pytest.raises(RequestError, match=r"takes a causal language model of transformers.*Model\.from_module"):
        onward.LanguageModel.from_module(torch.nn.Linear(2, 2))
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(RequestError, match=r"GPT2LMHeadModel is of no built-in family.*Model\.from_module"):
        onward.LanguageModel.from_module(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)))
    experts = _module(tmp_path / "experts", "mixtral", torch.float32)
    with pytest.raises(RequestError, match="merged experts"):
        onward.LanguageModel.from_module(experts)
    module = _module(tmp_path / "qwen3", "qwen3", torch.float32)
    with pytest.raises(RequestError, match="save_pretrained"):
        onward.LanguageModel.from_module(module).save(tmp_path / "saved")
